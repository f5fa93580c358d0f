"""Gated delta nets in GGUF files: which tensors stand for which of the checkpoint's, and in which order.

The converter stores the decay itself instead of its logarithm. It keeps all queries, keys and values apart from the
output gates, where checkpoints of Qwen3-Next, and files from before, have them by key head. Files of Qwen3.5 have value
heads in *tiled* order: the first of every key head, then the second of every key head; checkpoints have those of a key
head together. Files of Kimi Linear have other axes of one in some tensors, and quantizing drops those at the end.
"""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from penstock.engine.loading.dequantize import dequantize
from penstock.engine.loading.gguf import GGMLType, RawTensor
from penstock.engine.loading.gguf_origin import Origin
from penstock.errors import CheckpointError

Order = npt.NDArray[np.int64]
_AT = "linear_attn."


def delta_origins(
    name: str, layer: str, present: Collection[str], config: Mapping[str, Any], *, tiled: bool
) -> dict[str, Origin] | None:
    """The checkpoint's tensors, below `layers.N.`, that the GGUF tensor `name` of a layer stands for; None: it is no
    part of a delta net. `present`: all tensors of the file."""
    part = name.removeprefix(f"blk.{layer}.")
    keys, values = config["linear_num_key_heads"], config["linear_num_value_heads"]
    k_dim, v_dim = config["linear_key_head_dim"], config["linear_value_head_dim"]
    if not keys or values % keys:
        raise CheckpointError(f"{values} value heads cannot share {keys} key heads evenly")
    ratio = values // keys
    heads = _grouped(keys, ratio) if tiled and ratio > 1 else None

    def order(size: int, before: int = 0) -> Order | None:
        """Rows of `size` for each value head, behind `before` others."""
        if heads is None:
            return None
        rows = (heads[:, None] * size + np.arange(size)).ravel() + before
        return np.concatenate((np.arange(before), rows))

    queries_and_keys = 2 * keys * k_dim
    if part == "ssm_ba.weight":
        if f"blk.{layer}.attn_qkv.weight" not in present:
            return {f"{_AT}in_proj_ba.weight": Origin(name)}
        rows = np.arange(2 * values).reshape(keys, 2, ratio)
        return {f"{_AT}in_proj_{'ba'[i]}.weight": Origin(name, rows=rows[:, i].ravel()) for i in range(2)}
    found: dict[str, tuple[str, Origin]] = {
        "ssm_in.weight": ("in_proj_qkvz.weight", Origin(name)),
        "attn_qkv.weight": ("in_proj_qkv.weight", Origin(name, rows=order(v_dim, queries_and_keys))),
        "attn_gate.weight": ("in_proj_z.weight", Origin(name, rows=order(v_dim))),
        "ssm_beta.weight": ("in_proj_b.weight", Origin(name, rows=order(1))),
        "ssm_alpha.weight": ("in_proj_a.weight", Origin(name, rows=order(1))),
        "ssm_a": ("A_log", Origin(name, rows=order(1), log_of_negative=True)),
        "ssm_dt.bias": ("dt_bias", Origin(name, rows=order(1))),
        "ssm_conv1d.weight": ("conv1d.weight", Origin(name, rows=order(v_dim, queries_and_keys), depthwise=True)),
        "ssm_norm.weight": ("norm.weight", Origin(name)),
        "ssm_out.weight": ("out_proj.weight", Origin(name, columns=order(v_dim))),
    }
    if part not in found:
        return None
    target, origin = found[part]
    return {_AT + target: origin}


def channel_delta_origins(name: str, layer: str, config: Mapping[str, Any]) -> dict[str, Origin] | None:
    """Likewise of delta nets with a decay for every channel; None for tensors that are stored as they are, too."""
    part, heads = name.removeprefix(f"blk.{layer}."), config["linear_num_heads"]
    if part == "ssm_a":
        return {"self_attn.forget_gate.A_log": Origin(name, log_of_negative=True, shape=(1, 1, heads, 1))}
    conv = re.fullmatch(r"ssm_conv1d_([qkv])\.weight", part)
    if conv is None:
        return None
    shape = (heads * config["linear_head_dim"], 1, config["linear_conv_kernel_dim"])
    return {f"self_attn.{conv[1]}_conv1d.weight": Origin(name, shape=shape)}


def reordered(raw: RawTensor, origin: Origin) -> RawTensor:
    """The tensor as the checkpoint has it. Rows are moved as they are stored; columns, which quantized weights share
    blocks with, are widened."""
    if origin.flat:
        raw = RawTensor(raw.type, raw.data.reshape(1, -1), (math.prod(raw.shape),))
    if origin.rows is not None:
        if len(raw.shape) == 1:  # its elements are the rows
            data = raw.data.reshape(raw.shape[0], -1)
            if len(data) <= origin.rows.max():
                raise CheckpointError(f"the GGUF tensor {origin.name} has {len(data)} numbers, too few for its heads")
            raw = RawTensor(raw.type, data[origin.rows].reshape(1, -1), raw.shape)
        else:
            if len(raw.data) <= origin.rows.max():
                raise CheckpointError(f"the GGUF tensor {origin.name} has {len(raw.data)} rows, too few for its heads")
            raw = RawTensor(raw.type, raw.data[origin.rows], (len(origin.rows), *raw.shape[1:]))
    if origin.columns is not None:
        wide = dequantize(torch.from_numpy(raw.data), raw.type, raw.shape)
        if wide.shape[1] != len(origin.columns):
            raise CheckpointError(f"the GGUF tensor {origin.name} has {wide.shape[1]} columns, not those of its heads")
        raw = _floats(wide[:, torch.from_numpy(origin.columns)], raw.shape)
    if origin.log_of_negative:
        decay = dequantize(torch.from_numpy(raw.data), raw.type, raw.shape)
        if not bool((decay < 0).all()):
            raise CheckpointError(f"the GGUF tensor {origin.name} holds decays, which must be negative")
        raw = _floats((-decay).log(), raw.shape)
    if origin.depthwise and len(raw.shape) == 2:
        raw = replace(raw, shape=(raw.shape[0], 1, raw.shape[1]))
    if origin.shape:
        if _beyond_one(raw.shape) != _beyond_one(origin.shape):
            raise CheckpointError(f"the GGUF tensor {origin.name} has the shape {raw.shape}, not {origin.shape}")
        raw = RawTensor(raw.type, raw.data.reshape(math.prod(origin.shape[:-1]), -1), origin.shape)
    return raw


def _beyond_one(shape: tuple[int, ...]) -> list[int]:
    return [size for size in shape if size != 1]


def _floats(tensor: torch.Tensor, shape: tuple[int, ...]) -> RawTensor:
    rows = 1 if len(shape) == 1 else shape[0]
    return RawTensor(GGMLType.F32, tensor.float().contiguous().numpy().view(np.uint8).reshape(rows, -1), shape)


def _grouped(keys: int, ratio: int) -> Order:
    """Where each value head, those of a key head together, stands in tiled order."""
    return np.arange(keys * ratio).reshape(ratio, keys).T.ravel()
