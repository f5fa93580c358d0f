"""LoRA adapters in GGUF files, as llama.cpp's converter writes them: the same pairs of matrices under other names.

A pair is `blk.N.attn_q.weight.lora_a` and `.lora_b`; what they add is multiplied by `adapter.lora.alpha` over the rank
of the pair. Rows of B are in the order in which such files have the rows of the matrix. Linears of layers are read; a
tensor of anything else (stacked experts, embedding, head, norms) is refused by name.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from penstock.engine.adapters.base_tensors import BaseTensors
from penstock.engine.adapters.kinds.modules import PREFIX, Converted, Tensors
from penstock.engine.adapters.peft_config import LoraConfig
from penstock.engine.adapters.spec import CONFIG
from penstock.engine.loading.dequantize import dequantize
from penstock.engine.loading.gguf import GGUFFile
from penstock.engine.loading.gguf_names import layer_names
from penstock.engine.models.families import family_of
from penstock.errors import CheckpointError

_KEY = re.compile(r"blk\.(\d+)\.(\w+)\.weight\.lora_([ab])")


def adapter_file(folder: Path) -> Path | None:
    """The GGUF file in an adapter's folder, where it is no folder of PEFT's."""
    if (folder / CONFIG).exists():
        return None
    found = sorted(folder.glob("*.gguf"))
    if len(found) > 1:
        raise CheckpointError(f"{folder} holds several GGUF files: give each adapter a folder of its own")
    return found[0] if found else None


def read_gguf_lora(path: Path, base: BaseTensors | None) -> tuple[LoraConfig, Tensors]:
    """The tensors of a file under the names that PEFT has for them, and a configuration that fits these."""
    if base is None or base.may_be_transposed:
        raise CheckpointError(f"{path.name}: GGUF adapters are not supported on models that run through transformers")
    file, model = GGUFFile(path), base.config
    family = family_of(model.family)
    _check(file, path.name, family.gguf.architectures)
    alpha = file.metadata.get("adapter.lora.alpha", 0.0)
    if isinstance(alpha, bool) or not isinstance(alpha, int | float) or not 0 < abs(alpha) < 1e30:
        raise CheckpointError(f"{path.name}: adapter.lora.alpha must be a number other than 0, found {alpha!r:.80}")
    names = layer_names(family)
    heads = {"attn_q": model.num_heads, "attn_k": model.num_kv_heads} if family.gguf.interleaved_rope else {}
    made: dict[str, Callable[[], Tensor]] = {}
    ranks: dict[str, int] = {}
    for name, info in file.tensors.items():
        found = _KEY.fullmatch(name)
        if found is None or found[2] not in names or len(info.shape) != 2:
            raise CheckpointError(
                f"{path.name}: cannot apply {name!r}; GGUF adapters may change linears of layers: serve the folder "
                "that PEFT has saved"
            )
        layer, part, side = found.groups()
        module = f"{family.names.prefix}layers.{layer}.{names[part]}"
        rank = info.shape[0] if side == "a" else info.shape[1]
        if ranks.setdefault(module, rank) != rank or not rank:
            raise CheckpointError(f"{path.name}: the matrices of {name!r} and its partner have different ranks")
        scale = 1.0 if side == "a" else alpha / rank
        made[f"{PREFIX}{module}.lora_{side.upper()}.weight"] = partial(
            _read, file, name, scale, heads.get(part, 0) if side == "b" else 0
        )
    config = replace(LoraConfig.of_kind({}, "LoRA"), ranks=ranks)
    return config, Converted(_Empty(), (), made)


class _Empty:
    """See `Tensors`: what stands for a file of PEFT's."""

    def keys(self) -> list[str]:
        return []

    def get_tensor(self, key: str) -> Tensor:
        raise KeyError(key)

    def get_slice(self, key: str) -> Tensor:
        raise KeyError(key)


def _check(file: GGUFFile, name: str, architectures: tuple[str, ...]) -> None:
    kinds = file.metadata.get("general.type"), file.metadata.get("adapter.type")
    if kinds != ("adapter", "lora"):
        raise CheckpointError(f"{name} is no LoRA adapter: general.type and adapter.type are {kinds!r:.80}")
    architecture = file.metadata.get("general.architecture")
    if architecture not in architectures:
        raise CheckpointError(f"{name} is an adapter of {architecture!r:.80} models, and not of this one")
    if "adapter.alora.invocation_tokens" in file.metadata:
        raise CheckpointError(f"{name}: activated LoRA (adapter.alora.invocation_tokens) is not supported")


def _read(file: GGUFFile, name: str, scale: float, heads: int) -> Tensor:
    raw = file.raw(name)
    tensor = dequantize(torch.from_numpy(raw.data), raw.type, raw.shape).float()
    if heads:
        if tensor.shape[0] % (2 * heads):
            raise CheckpointError(f"the GGUF tensor {name} has {tensor.shape[0]} rows, not {heads} heads of even size")
        tensor = tensor.view(heads, -1, 2, tensor.shape[1]).transpose(1, 2).reshape(tensor.shape)
    return tensor * scale
