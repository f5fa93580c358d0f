"""Tiny checkpoints in every few-bit layout, packed here word by word, beside what they stand for in float64.

Nothing of the engine is used, so that a mistake there cannot hide: numbers are dealt into words with plain loops.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file

GROUP = 32
Tensors = dict[str, torch.Tensor]
Array = np.ndarray[Any, Any]


@dataclass
class Stored:
    """A matrix as a layout stores it (suffix to tensor), and its values."""

    tensors: Tensors
    dense: Array


def words(numbers: Array, bits: int) -> Array:
    """Pack the last axis, low bits first."""
    per = 32 // bits
    out = np.zeros((*numbers.shape[:-1], numbers.shape[-1] // per), np.uint32)
    for i in range(numbers.shape[-1]):
        out[..., i // per] |= numbers[..., i].astype(np.uint32) << np.uint32(bits * (i % per))
    return out.view(np.int32)


def tensor(array: Array, dtype: torch.dtype | None = None) -> torch.Tensor:
    made = torch.from_numpy(np.ascontiguousarray(array))
    return made if dtype is None else made.to(dtype)


def rounded(weight: Array, bits: int, group_of: Array) -> tuple[Array, Array, Array]:
    """Integers [out, in], scales and zero points [out, groups]; scales are exact in float16."""
    groups, top = int(group_of.max()) + 1, 2**bits - 1
    scale, zero = np.zeros((len(weight), groups)), np.zeros((len(weight), groups), np.int64)
    quants = np.zeros(weight.shape, np.int64)
    for g in range(groups):
        part = weight[:, group_of == g]
        low, high = np.minimum(part.min(1), -1e-3), np.maximum(part.max(1), 1e-3)
        scale[:, g] = ((high - low) / top).astype(np.float16)
        zero[:, g] = np.clip(np.rint(-low / scale[:, g]), 1, top)
        quants[:, group_of == g] = np.clip(np.rint(part / scale[:, g : g + 1]) + zero[:, g : g + 1], 0, top)
    return quants, scale, zero


def gptq(
    weight: Array, *, bits: int = 4, act_order: bool = False, v2: bool = False, group: int = GROUP, g_idx: bool = True
) -> Stored:
    inputs = weight.shape[1]
    group_of = np.arange(inputs) // group
    if act_order:
        group_of = group_of[np.random.default_rng(0).permutation(inputs)]
    quants, scale, zero = rounded(weight, bits, group_of)
    tensors = {
        "qweight": tensor(words(quants, bits).T),
        "qzeros": tensor(words((zero - (0 if v2 else 1)).T, bits)),
        "scales": tensor(scale.T, torch.float16),
    }
    if g_idx:
        tensors["g_idx"] = tensor(group_of, torch.int32)
    return Stored(tensors, scale[:, group_of] * (quants - zero[:, group_of]))


def awq(weight: Array, *, group: int = GROUP) -> Stored:
    group_of = np.arange(weight.shape[1]) // group
    quants, scale, zero = rounded(weight, 4, group_of)

    def dealt(numbers: Array) -> Array:
        out = np.zeros_like(numbers)
        for column in range(numbers.shape[1]):
            place = (0, 4, 1, 5, 2, 6, 3, 7)[column % 8]
            out[:, column // 8 * 8 + place] = numbers[:, column]
        return words(out, 4)

    tensors = {
        "qweight": tensor(dealt(quants.T)),
        "qzeros": tensor(dealt(zero.T)),
        "scales": tensor(scale.T, torch.float16),
    }
    return Stored(tensors, scale[:, group_of] * (quants - zero[:, group_of]))


def packed(weight: Array, *, symmetric: bool, group: int = GROUP) -> Stored:
    group_of = np.arange(weight.shape[1]) // group
    if symmetric:
        starts = range(0, weight.shape[1], group)
        largest = np.stack([np.abs(weight[:, start : start + group]).max(1) for start in starts], 1)
        scale = (largest / 7).astype(np.float16).astype(float)
        quants = np.clip(np.rint(weight / scale[:, group_of]), -8, 7).astype(np.int64) + 8
        zero = np.full(scale.shape, 8)
    else:
        quants, scale, zero = rounded(weight, 4, group_of)
    tensors = {
        "weight_packed": tensor(words(quants, 4)),
        "weight_scale": tensor(scale, torch.float16),
        "weight_shape": torch.tensor(weight.shape),
    }
    if not symmetric:
        tensors["weight_zero_point"] = tensor(words(zero.T, 4).T)
    return Stored(tensors, scale[:, group_of] * (quants - zero[:, group_of]))


def plain_int8(weight: Array) -> Stored:
    scale = (np.abs(weight).max(1, keepdims=True) / 127).astype(np.float16).astype(float)
    quants = np.clip(np.rint(weight / scale), -127, 127)
    return Stored({"weight": tensor(quants, torch.int8), "weight_scale": tensor(scale, torch.float16)}, scale * quants)


def fp8(weight: Array) -> Stored:
    scale = (np.abs(weight).max(1, keepdims=True) / 448).astype(np.float32)
    quants = tensor(weight / scale, torch.float32).to(torch.float8_e4m3fn)
    dense = quants.float().numpy().astype(float) * scale.astype(float)
    return Stored({"weight": quants, "weight_scale": tensor(scale)}, dense)


def fp8_tiles(
    weight: Array,
    *,
    tile: tuple[int, int] = (GROUP, GROUP),
    scale_name: str = "weight_scale_inv",
    dtype: torch.dtype = torch.float8_e4m3fn,
) -> Stored:
    """A scale per tile of weights; those at the edges may be cut."""
    rows, inputs = (-(-size // side) for size, side in zip(weight.shape, tile, strict=True))
    padded = np.zeros((rows * tile[0], inputs * tile[1]))
    padded[: weight.shape[0], : weight.shape[1]] = weight
    largest = float(torch.finfo(dtype).max)
    scale = (np.abs(padded.reshape(rows, tile[0], inputs, tile[1])).max((1, 3)) / largest).astype(np.float32)
    wide = scale.repeat(tile[0], 0).repeat(tile[1], 1)[: weight.shape[0], : weight.shape[1]]
    quants = tensor(weight / wide, torch.float32).to(dtype)
    dense = quants.float().numpy().astype(float) * wide.astype(float)
    return Stored({"weight": quants, scale_name: tensor(scale)}, dense)


def _compressed(form: str, kind: str, bits: int, group: int = GROUP, **more: Any) -> dict[str, Any]:
    weights: dict[str, Any] = {"type": kind, "num_bits": bits, "strategy": "channel", **more}
    if bits == 4:
        weights |= {"strategy": "group", "group_size": group}
    return {
        "quant_method": "compressed-tensors",
        "format": form,
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": weights}},
        "ignore": ["lm_head"],
    }


LAYOUTS: dict[str, tuple[dict[str, Any], Callable[[Array], Stored]]] = {
    "gptq": ({"quant_method": "gptq", "bits": 4, "group_size": GROUP}, gptq),
    "gptq-act-order": (
        {"quant_method": "gptq", "bits": 4, "group_size": GROUP, "desc_act": True},
        lambda weight: gptq(weight, act_order=True),
    ),
    "gptq-v2": (
        {"quant_method": "gptq", "bits": 4, "group_size": GROUP, "checkpoint_format": "gptq_v2"},
        lambda weight: gptq(weight, v2=True),
    ),
    "gptq-int8": ({"quant_method": "gptq", "bits": 8, "group_size": GROUP}, lambda weight: gptq(weight, bits=8)),
    "awq": ({"quant_method": "awq", "bits": 4, "group_size": GROUP, "version": "gemm", "zero_point": True}, awq),
    "packed": (_compressed("pack-quantized", "int", 4), lambda weight: packed(weight, symmetric=True)),
    "packed-zero-point": (_compressed("pack-quantized", "int", 4), lambda weight: packed(weight, symmetric=False)),
    "int8": (_compressed("int-quantized", "int", 8), plain_int8),
    "fp8": (_compressed("float-quantized", "float", 8), fp8),
    "fp8-tiles": ({"quant_method": "fp8", "weight_block_size": [GROUP, GROUP]}, fp8_tiles),
    # The down matrix has 96 inputs: groups and tiles of 64 do not divide them.
    "gptq-cut": ({"quant_method": "gptq", "bits": 4, "group_size": 64}, lambda weight: gptq(weight, group=64)),
    "gptq-cut-no-index": (
        {"quant_method": "gptq", "bits": 4, "group_size": 64},
        lambda weight: gptq(weight, group=64, g_idx=False),
    ),
    "gptq-cut-act-order": (
        {"quant_method": "gptq", "bits": 4, "group_size": 64, "desc_act": True},
        lambda weight: gptq(weight, group=64, act_order=True),
    ),
    "awq-cut": ({"quant_method": "awq", "bits": 4, "group_size": 64}, lambda weight: awq(weight, group=64)),
    "packed-cut": (
        _compressed("pack-quantized", "int", 4, group=64),
        lambda weight: packed(weight, symmetric=True, group=64),
    ),
    "fp8-tiles-cut": (
        {"quant_method": "fp8", "weight_block_size": [64, 64]},
        lambda weight: fp8_tiles(weight, tile=(64, 64)),
    ),
    "fp8-tiles-long": (
        {"quant_method": "fp8", "weight_block_size": [40, 64]},
        lambda weight: fp8_tiles(weight, tile=(40, 64)),
    ),
    "fp8-blocks": (
        _compressed("float-quantized", "float", 8, strategy="block", block_structure=[64, 64]),
        lambda weight: fp8_tiles(weight, tile=(64, 64), scale_name="weight_scale"),
    ),
    "fp8-groups": (
        _compressed("float-quantized", "float", 8, strategy="group", group_size=64),
        lambda weight: fp8_tiles(weight, tile=(1, 64), scale_name="weight_scale"),
    ),
}


def is_linear(name: str) -> bool:
    return name.endswith("_proj.weight")


def write(
    dense: Path,
    layout: str,
    folder: Path,
    *,
    is_linear: Callable[[str], bool] = is_linear,
    turned: Callable[[str], bool] = lambda name: False,
) -> tuple[Path, Path, dict[str, Array]]:
    """From a dense checkpoint: one in `layout`, one of the values it stands for, and those values. `turned`: matrices
    that the dense one has as [in, out]; layouts have all of them as [out, in]."""
    settings, make = LAYOUTS[layout]
    tensors = load_file(dense / "model.safetensors")
    stored: Tensors = {}
    values: dict[str, Array] = {}
    for name, value in tensors.items():
        if not is_linear(name):
            stored[name] = value
            continue
        matrix = value.double().numpy()
        made = make(matrix.T if turned(name) else matrix)
        values[name] = made.dense.T if turned(name) else made.dense
        stored |= {name.removesuffix("weight") + suffix: part.contiguous() for suffix, part in made.tensors.items()}
    config = json.loads((dense / "config.json").read_text())
    few, same = folder / layout, folder / f"{layout}-dense"
    for target in (few, same):
        shutil.copytree(dense, target)
    save_file(stored, few / "model.safetensors")
    save_file(tensors | {k: tensor(v, torch.float32) for k, v in values.items()}, same / "model.safetensors")
    (few / "config.json").write_text(json.dumps(config | {"quantization_config": settings}))
    return few, same, values
