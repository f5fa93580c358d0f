"""What the files in an adapter's folder say of it before it is read, so that an engine can make room for it.

A folder that cannot be read, or holds something else, says nothing: whoever reads the adapter itself says why.
"""

from __future__ import annotations

import functools
import json
import math
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, TypeVar

from penstock.engine.adapters.spec import CONFIG, WEIGHTS
from penstock.engine.adapters.stored_rank import stored_rank

T = TypeVar("T")

_MOST_HEADER = 100_000_000
"""Bytes of the list of tensors that a safetensors file begins with, at most."""
LEAST_RANK, MOST_RANK = 16, 512
"""Bounds of `adapter_rank` when the configuration names none."""
VIRTUAL_KINDS = ("PROMPT_TUNING", "P_TUNING", "CPT", "MULTITASK_PROMPT_TUNING", "PREFIX_TUNING", "CARTRIDGE")
"""Kinds that put tokens before every prompt: rows of the embedding, or keys and values."""
_STORED_KEYS = ("PREFIX_TUNING", "CARTRIDGE")
"""Those of them that are keys and values."""
MOST_TOKENS = 65536
"""Of an adapter's own, that are made room for where the configuration does not say."""
_OF_OUTPUTS = ("IA3", "BEFT", "LN_TUNING", "BOFT")
"""Kinds that change single outputs of linears, or norms."""
_ENDS = ("embed_tokens", "lm_head")
"""Modules that may be saved as a whole and are no norms."""
_UNREADABLE = (OSError, ValueError, AttributeError, TypeError, LookupError, ArithmeticError, RecursionError)
"""What files that are no adapter's raise, whatever JSON they hold."""


def _if_unreadable(nothing: Callable[[], T]) -> Callable[[Callable[[Path], T]], Callable[[Path], T]]:
    """Decorates what looks into a folder: it returns `nothing()` where that cannot be read."""

    def decorate(look: Callable[[Path], T]) -> Callable[[Path], T]:
        @functools.wraps(look)
        def safe(folder: Path) -> T:
            try:
                return look(folder)
            except _UNREADABLE:
                return nothing()

        return safe

    return decorate


def _config(folder: Path) -> dict[str, Any]:
    config: dict[str, Any] = json.loads((folder / CONFIG).read_bytes())
    return config


def default_rank(folders: Iterable[Path]) -> int:
    """The rank to make slots for when none is configured: the largest of the adapters in these folders."""
    return min(max((LEAST_RANK, *map(_stored_rank, folders))), MOST_RANK)


@_if_unreadable(int)
def _stored_rank(folder: Path) -> int:
    config = _config(folder)
    there = (folder / WEIGHTS).exists() and config.get("peft_type", "LORA") != "LORA"
    shapes = {name: tensor.get("shape", []) for name, tensor in _header(folder).items()} if there else {}
    return stored_rank(config, shapes)


@_if_unreadable(bool)
def changes_outputs(folder: Path) -> bool:
    """Whether the adapter in a folder changes single outputs of linears, or norms, by its configuration; False where it
    cannot be read."""
    config = _config(folder)
    saved = config.get("modules_to_save") or []
    norms = any(name.rpartition(".")[2] not in _ENDS for name in saved)
    biases = config.get("bias") not in (None, "none") or config.get("lora_bias")
    return bool(norms or biases or config.get("use_dora") or config.get("peft_type") in _OF_OUTPUTS)


@_if_unreadable(dict[str, int])
def input_blocks(folder: Path) -> dict[str, int]:
    """The size of the blocks by which the adapter in a folder turns inputs, by the path of each module; empty where it
    turns none, or cannot be read."""
    config = _config(folder)
    stored = {"OFT": ".oft_R", "BOFT": ".boft_R"}.get(str(config.get("peft_type")))
    if stored is None:
        return {}
    shapes = {name.partition(stored): tensor["shape"] for name, tensor in _header(folder).items()}
    return {
        path.removeprefix("base_model.model."): (1 + math.isqrt(1 + 8 * shape[1])) // 2
        if stored == ".oft_R"
        else shape[2] << min(shape[0] - 1, 16)
        for (path, found, _), shape in shapes.items()
        if found
    }


@_if_unreadable(bool)
def changes_experts(folder: Path) -> bool:
    """Whether the adapter in a folder changes experts, one by one or as stacks, or what makes keys and values of
    latents, which takes as much room; False where it cannot be read."""
    header = _header_bytes(folder)
    return b".experts." in header or b".kv_b_proj." in header


@_if_unreadable(int)
def virtual_tokens(folder: Path) -> int:
    """How many tokens the adapter in a folder puts before every prompt; 0 where it puts none, or cannot be read."""
    config = _config(folder)
    count = int(config["num_virtual_tokens"]) if config.get("peft_type") in VIRTUAL_KINDS else 0
    return min(max(count, 0), MOST_TOKENS)


@_if_unreadable(int)
def stored_keys(folder: Path) -> int:
    """For how many of these tokens the adapter in a folder has keys and values; the same."""
    config = _config(folder)
    return virtual_tokens(folder) if config.get("peft_type") in _STORED_KEYS else 0


@_if_unreadable(int)
def stored_tokens(folder: Path) -> int:
    """How many tokens embedding or head have with the adapter in a folder, where it says so; else 0."""
    config = _config(folder)
    return max([*(1 + int(max(each)) for each in _trained_tokens(config) if each), *_lengths(folder), 0])


@_if_unreadable(int)
def replaced_rows(folder: Path) -> int:
    """Rows of embedding or head that the adapter in a folder may replace: 0 where it cannot be read, or replaces none
    but those of few tokens of its own."""
    config = _config(folder)
    counts = [len(each) for each in _trained_tokens(config)]
    if config.get("modules_to_save"):
        counts += _lengths(folder)
    return max(*counts, virtual_tokens(folder), 0)


def _trained_tokens(config: Mapping[str, Any]) -> list[list[int]]:
    """The tokens whose rows an adapter has, of each matrix."""
    named = config.get("trainable_token_indices") or config.get("token_indices") or []
    return list(named.values()) if isinstance(named, dict) else [named]


def _lengths(folder: Path) -> list[int]:
    """Rows of the whole matrices outside of layers that an adapter's file has."""
    return [
        tensor["shape"][0]
        for name, tensor in _header(folder).items()
        if name.endswith(".weight") and ".layers." not in name and ".lora_" not in name and len(tensor["shape"]) == 2
    ]


def _header(folder: Path) -> dict[str, dict[str, Any]]:
    """What an adapter's file says of its tensors."""
    header: dict[str, dict[str, Any]] = json.loads(_header_bytes(folder))
    return header


def _header_bytes(folder: Path) -> bytes:
    with (folder / WEIGHTS).open("rb") as file:
        return file.read(min(int.from_bytes(file.read(8), "little"), _MOST_HEADER))
