"""Descriptions of adapters for configuration, gateway and engine: plain values, no torch."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from penstock.engine.adapters.stored_rank import stored_rank

DEFAULT_SLOTS = 20
"""Device slots of an engine that has adapters, when the configuration names no number."""

MOST_HEADER = 100_000_000
"""Bytes of the list of tensors that a safetensors file begins with, at most."""
LEAST_RANK, MOST_RANK = 16, 512
"""Bounds of `adapter_rank` when the configuration names none."""
CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
"""Files of an adapter."""

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

AdapterState = Literal["known", "loading", "ready", "failed"]
"""`known`: it will be read when it is first asked for. `ready`: in host memory, perhaps in a slot too."""

ADAPTER_UNKNOWN = "no adapter is called"
"""How `Delta.error` begins when a request names an adapter the engine does not know, or has unloaded."""
ADAPTER_FAILED = "the adapter cannot be used"
"""How `Delta.error` begins when an adapter could not be read or does not fit the model."""
NO_ADAPTERS = "this engine serves no adapters: set adapter_slots, or list adapters, in its model's configuration"

_UNREADABLE = (OSError, ValueError, AttributeError, TypeError, LookupError, ArithmeticError, RecursionError)
"""What files that are no adapter's raise, whatever JSON they hold."""
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:/@+-]{0,127}")


@dataclass(frozen=True, slots=True)
class AdapterSpec:
    """An adapter to serve: what clients call it and where it comes from."""

    name: str = ""
    """The model name that selects it."""
    source: str = ""
    """A folder with adapter_config.json and adapter_model.safetensors, hf:ORG/NAME or s3://BUCKET/PREFIX."""
    pinned: bool = False
    """Read at start and never evicted."""
    owner: str = ""
    """The tenant that alone may use it; empty: all. The engine passes it on."""


@dataclass(frozen=True, slots=True)
class AdapterStatus:
    """An adapter as its engine sees it."""

    name: str
    source: str
    state: AdapterState
    pinned: bool = False
    rank: int = 0
    """0 until it has been read."""
    version: str = ""
    """A digest of its files: changes when a reload brought other weights."""
    on_device: bool = False
    users: int = 0
    """Requests running with it or waiting for a slot."""
    error: str = ""
    """Why it failed."""
    owner: str = ""
    kind: str = ""
    """LoRA, IA3 ...; empty until it has been read."""


@dataclass(slots=True)
class AdapterLoad:
    """The adapters' part of a load snapshot. Counters only grow while the engine lives."""

    slots: int = 0
    on_device: int = 0
    on_host: int = 0
    loading: int = 0
    running: list[str] = field(default_factory=list)
    """Adapters of running sequences."""
    waiting: list[str] = field(default_factory=list)
    """Adapters that waiting sequences need and do not have yet."""
    loads: int = 0
    failures: int = 0
    copies: int = 0
    """Times an adapter was brought into a slot."""
    evictions: int = 0
    """Times an adapter lost its slot to another."""
    host_evictions: int = 0
    load_seconds: float = 0.0


def default_rank(folders: Iterable[Path]) -> int:
    """The rank to make slots for when none is configured: the largest of the adapters in these folders."""
    return min(max((LEAST_RANK, *map(_stored_rank, folders))), MOST_RANK)


def _stored_rank(folder: Path) -> int:
    """0 where it cannot be read: whoever reads the adapter itself says why."""
    try:
        config = json.loads((folder / CONFIG).read_bytes())
        there = (folder / WEIGHTS).exists() and config.get("peft_type", "LORA") != "LORA"
        shapes = {name: tensor.get("shape", []) for name, tensor in _header(folder).items()} if there else {}
        return stored_rank(config, shapes)
    except _UNREADABLE:
        return 0


def changes_outputs(folder: Path) -> bool:
    """Whether the adapter in a folder changes single outputs of linears, or norms, by its configuration; False where it
    cannot be read."""
    try:
        config = json.loads((folder / CONFIG).read_bytes())
        saved = config.get("modules_to_save") or []
        norms = any(name.rpartition(".")[2] not in _ENDS for name in saved)
        biases = config.get("bias") not in (None, "none") or config.get("lora_bias")
        return bool(norms or biases or config.get("use_dora") or config.get("peft_type") in _OF_OUTPUTS)
    except _UNREADABLE:
        return False


def input_blocks(folder: Path) -> dict[str, int]:
    """The size of the blocks by which the adapter in a folder turns inputs, by the path of each module; empty where it
    turns none, or cannot be read."""
    try:
        config = json.loads((folder / CONFIG).read_bytes())
        stored = {"OFT": ".oft_R", "BOFT": ".boft_R"}.get(config.get("peft_type"))
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
    except _UNREADABLE:
        return {}


def changes_experts(folder: Path) -> bool:
    """Whether the adapter in a folder changes experts, one by one or as stacks, or what makes keys and values of
    latents, which takes as much room; False where it cannot be read."""
    try:
        with (folder / WEIGHTS).open("rb") as file:
            header = file.read(min(int.from_bytes(file.read(8), "little"), MOST_HEADER))
        return b".experts." in header or b".kv_b_proj." in header
    except OSError:
        return False


def virtual_tokens(folder: Path) -> int:
    """How many tokens the adapter in a folder puts before every prompt; 0 where it puts none, or cannot be read."""
    try:
        config = json.loads((folder / CONFIG).read_bytes())
        count = int(config["num_virtual_tokens"]) if config.get("peft_type") in VIRTUAL_KINDS else 0
        return min(max(count, 0), MOST_TOKENS)
    except _UNREADABLE:
        return 0


def stored_keys(folder: Path) -> int:
    """For how many of these tokens the adapter in a folder has keys and values; the same."""
    try:
        config = json.loads((folder / CONFIG).read_bytes())
        return virtual_tokens(folder) if config.get("peft_type") in _STORED_KEYS else 0
    except _UNREADABLE:
        return 0


def stored_tokens(folder: Path) -> int:
    """How many tokens embedding or head have with the adapter in a folder, where it says so; else 0."""
    try:
        config = json.loads((folder / CONFIG).read_bytes())
        named = config.get("trainable_token_indices") or config.get("token_indices") or []
        lists = named.values() if isinstance(named, dict) else [named]
        return max([*(1 + int(max(each)) for each in lists if each), *_lengths(folder), 0])
    except _UNREADABLE:
        return 0


def _lengths(folder: Path) -> list[int]:
    """Rows of the whole matrices outside of layers that an adapter's file has."""
    return [
        tensor["shape"][0]
        for name, tensor in _header(folder).items()
        if name.endswith(".weight") and ".layers." not in name and ".lora_" not in name and len(tensor["shape"]) == 2
    ]


def _header(folder: Path) -> dict[str, dict[str, Any]]:
    """What an adapter's file says of its tensors."""
    with (folder / WEIGHTS).open("rb") as file:
        header: dict[str, dict[str, Any]] = json.loads(
            file.read(min(int.from_bytes(file.read(8), "little"), MOST_HEADER))
        )
    return header


def replaced_rows(folder: Path) -> int:
    """Rows of embedding or head that the adapter in a folder may replace: 0 where it cannot be read, or replaces none
    but those of few tokens of its own."""
    try:
        config = json.loads((folder / CONFIG).read_bytes())
        named = config.get("trainable_token_indices") or config.get("token_indices") or []
        counts = [len(each) for each in (named.values() if isinstance(named, dict) else [named])]
        if config.get("modules_to_save"):
            counts += _lengths(folder)
        return max(*counts, virtual_tokens(folder), 0)
    except _UNREADABLE:
        return 0


def name_problem(name: str) -> str | None:
    """Why `name` cannot be an adapter's, or None."""
    if _NAME.fullmatch(name):
        return None
    return "an adapter's name is 1 to 128 letters, digits or . _ : / @ + -, and begins with a letter or digit"
