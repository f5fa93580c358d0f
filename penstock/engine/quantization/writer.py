"""Writing quantized checkpoints in the layouts that other programs read: GPTQ, AWQ, compressed-tensors.

Tensors go to safetensors shards as they are made, so that memory holds one shard at most; the folder gets its
`config.json` last, and is no checkpoint before that.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors.torch import save_file
from torch import Tensor

from penstock.engine.backends.interface import FP8, FP8_MAX
from penstock.engine.loading.checkpoint import INDEX
from penstock.engine.loading.groups import IntGroups
from penstock.engine.loading.packed_words import pack, pack_awq

Method = Literal["int8", "fp8", "gptq-int4", "awq-int4"]
_SHARD = 2 << 30


class ShardWriter:
    """safetensors files of bounded size, and their index."""

    def __init__(self, folder: Path, limit: int = _SHARD) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.folder = folder
        self.size = 0
        self._limit = limit
        self._pending: dict[str, Tensor] = {}
        self._pending_size = 0
        self._shards: list[list[str]] = []

    def add(self, name: str, tensor: Tensor) -> None:
        size = tensor.numel() * tensor.element_size()
        if self._pending and self._pending_size + size > self._limit:
            self._flush()
        self._pending[name] = tensor.cpu().contiguous()
        self._pending_size += size
        self.size += size

    def close(self) -> None:
        """Write what is left, and give the files their final names."""
        if self._pending:
            self._flush()
        if len(self._shards) == 1:
            self._path(1).rename(self.folder / "model.safetensors")
            return
        where: dict[str, str] = {}
        for number, names in enumerate(self._shards, 1):
            final = f"model-{number:05d}-of-{len(self._shards):05d}.safetensors"
            self._path(number).rename(self.folder / final)
            where |= dict.fromkeys(names, final)
        index = {"metadata": {"total_size": self.size}, "weight_map": where}
        (self.folder / INDEX).write_text(json.dumps(index, indent=2))

    def _path(self, number: int) -> Path:
        return self.folder / f"part-{number}.safetensors.incomplete"

    def _flush(self) -> None:
        self._shards.append(list(self._pending))
        save_file(self._pending, self._path(len(self._shards)), metadata={"format": "pt"})
        self._pending, self._pending_size = {}, 0


def zero_points(groups: IntGroups) -> Tensor:
    """uint8 [out, groups] of weights that were rounded on a zero-point grid."""
    assert groups.minimum is not None
    return (-groups.minimum / groups.scale).round().to(torch.uint8)


def gptq_tensors(base: str, groups: IntGroups) -> dict[str, Tensor]:
    inputs, size = groups.shape[1], groups.group
    group_of = torch.arange(inputs) // size
    quants = groups.quants.cpu()
    if groups.order is not None:
        order = groups.order.cpu()
        group_of = torch.empty_like(group_of).index_copy_(0, order, group_of)
        quants = torch.empty_like(quants).index_copy_(1, order, quants)
    return {
        f"{base}qweight": pack(quants.T, 4, 0),
        f"{base}qzeros": pack((zero_points(groups).cpu() - 1).T, 4, 1),
        f"{base}scales": groups.scale.T.half(),
        f"{base}g_idx": group_of.to(torch.int32),
    }


def awq_tensors(base: str, groups: IntGroups) -> dict[str, Tensor]:
    return {
        f"{base}qweight": pack_awq(groups.quants.T),
        f"{base}qzeros": pack_awq(zero_points(groups).T),
        f"{base}scales": groups.scale.T.half(),
    }


def int8_tensors(base: str, groups: IntGroups) -> dict[str, Tensor]:
    return {f"{base}weight": groups.quants, f"{base}weight_scale": groups.scale}


def fp8_tensors(base: str, weight: Tensor) -> dict[str, Tensor]:
    scale = weight.float().abs().amax(1, keepdim=True).clamp(min=1e-12) / FP8_MAX
    return {f"{base}weight": (weight.float() / scale).to(FP8), f"{base}weight_scale": scale}


def quantization_config(method: Method, group: int, symmetric: bool, act_order: bool) -> dict[str, Any]:
    """What goes into `config.json`."""
    if method == "gptq-int4":
        return {
            "quant_method": "gptq", "bits": 4, "group_size": group, "desc_act": act_order, "sym": symmetric,
            "checkpoint_format": "gptq", "damp_percent": 0.01, "true_sequential": False, "lm_head": False,
        }  # fmt: skip
    if method == "awq-int4":
        return {"quant_method": "awq", "bits": 4, "group_size": group, "zero_point": True, "version": "gemm"}
    kind = "int" if method == "int8" else "float"
    numbers = {"num_bits": 8, "type": kind, "symmetric": True}
    return {
        "quant_method": "compressed-tensors",
        "format": f"{kind}-quantized",
        "quantization_status": "compressed",
        "config_groups": {
            "group_0": {
                "targets": ["Linear"],
                "weights": numbers | {"strategy": "channel", "dynamic": False},
                "input_activations": numbers | {"strategy": "token", "dynamic": True},
            }
        },
        "ignore": ["lm_head"],
    }


def write_config(folder: Path, config: dict[str, Any], quantization: dict[str, Any], dtype: torch.dtype) -> None:
    name = str(dtype).removeprefix("torch.")
    whole = {k: v for k, v in config.items() if k not in ("dtype", "torch_dtype")}
    whole |= {"torch_dtype": name, "quantization_config": quantization}
    (folder / "config.json").write_text(json.dumps(whole, indent=2))
