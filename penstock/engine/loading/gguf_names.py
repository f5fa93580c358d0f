"""The GGUF tensor behind each Hugging Face tensor name, and what the conversion to GGUF did to it.

Names follow from the family's descriptor (`models.families`). Four conversions are undone: GGUF files store the query
and key rows of some families in interleaved rotary order, stack the experts of a layer into one tensor, add the
family's offset to norm weights, and keep what makes keys and what makes values of latents apart. Gate and up of stacked
experts may be one stack, queries, keys and values one matrix, and single numbers of layers may stand in the metadata.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from itertools import pairwise, product
from typing import Any

import numpy as np
import torch
from torch import Tensor

from penstock.engine.loading.gguf import Bytes, GGMLType, GGUFFile, RawTensor
from penstock.engine.loading.gguf_delta import channel_delta_origins, delta_origins, reordered
from penstock.engine.loading.gguf_mamba import mamba_origins
from penstock.engine.loading.gguf_origin import Origin
from penstock.engine.models.families import Family, TensorNames
from penstock.engine.models.families.family import NEXTN_KEY
from penstock.errors import CheckpointError

_LATENT_PARTS = ("attn_k_b", "attn_v_b")
"""Of `attn_kv_b`: instead of it, or (some writers) beside it."""
_NEXTN = {
    "eh_proj": "eh_proj",
    "embed_tokens": "embed_tokens",
    "enorm": "enorm",
    "hnorm": "hnorm",
    "shared_head_head": "shared_head.head",
    "shared_head_norm": "shared_head.norm",
}
"""What layers for multi-token prediction have beside those of a layer."""
_GATE_UP_STACK = "ffn_gate_up_exps"
"""Of a layer's experts, where gate and up are one stack: gate above up."""
_ROWS = frozenset({"ffn_gate_inp_shexp"})
_DEPTHWISE = frozenset({"shortconv.conv"})
_IGNORED = re.compile(r"rope_freqs\.weight|rope_factors_(long|short)\.weight|blk\.\d+\.attn_rot_embd\.weight")


def origins(file: GGUFFile, family: Family, config: Mapping[str, Any]) -> dict[str, Origin]:
    """Hugging Face name to origin, for every tensor the model uses."""
    of_layer_names, experts = layer_names(family), _expert_names(family.names)
    interleaved: dict[str, int] = {}
    if family.gguf.interleaved_rope:
        interleaved = {"attn_q": config["num_attention_heads"], "attn_k": config["num_key_value_heads"]}
    names = family.names
    top = {
        "token_embd": names.prefix + names.embedding,
        family.gguf.final_norm: names.prefix + names.final_norm,
        "output": "lm_head",
        **{theirs: names.prefix + ours for theirs, ours in family.gguf.top.items()},
    }
    unread = {
        f"blk.{layer}.{part}"
        for layer in range(config["num_hidden_layers"] if family.gguf.unread else 0)
        for part in (family.gguf.unread(config, layer) if family.gguf.unread else ())
    }
    layers = f"{names.prefix}layers"
    every_layer = config["num_hidden_layers"] + config.get("num_nextn_predict_layers", 0)
    found: dict[str, Origin] = {}
    for name, info in file.tensors.items():
        if _IGNORED.fullmatch(name):
            continue
        offset = -family.norm_offset if name.endswith("norm.weight") else 0.0
        stem, _, suffix = name.rpartition(".")
        if stem in unread:
            continue
        if stem in top:
            found[f"{top[stem]}.{suffix}"] = Origin(name, offset=offset)
            continue
        if (family.gguf.delta_nets or family.gguf.mamba) and (of_layer := re.match(r"blk\.(\d+)\.", name)):
            if family.gguf.mamba:
                parts = mamba_origins(name, of_layer[1], names.mamba)
            elif family.gguf.delta_nets == "by_channel":
                parts = channel_delta_origins(name, of_layer[1], config)
            else:
                tiled = family.gguf.delta_nets == "tiled"
                parts = delta_origins(name, of_layer[1], file.tensors, config, tiled=tiled)
            if parts is not None:
                found |= {f"{layers}.{of_layer[1]}.{target}": origin for target, origin in parts.items()}
                continue
        further = re.fullmatch(r"blk\.(\d+)\.nextn\.(\w+)", stem)
        if further is not None and NEXTN_KEY in family.gguf.reads and further[2] in _NEXTN:
            found[f"{layers}.{further[1]}.{_NEXTN[further[2]]}.{suffix}"] = Origin(name, offset=offset)
            continue
        match = re.fullmatch(r"blk\.(\d+)\.([\w.]+)", name)
        layer, whole_part = (match[1], match[2]) if match else ("", "")
        part = whole_part.rpartition(".")[0]
        prefix = f"{layers}.{layer}"
        if part in _LATENT_PARTS and "attn_kv_b" in of_layer_names:
            whole, values = f"blk.{layer}.attn_kv_b.{suffix}", f"blk.{layer}.attn_v_b.{suffix}"
            if part == "attn_k_b" and whole not in file.tensors and values in file.tensors:
                found[f"{prefix}.{of_layer_names['attn_kv_b']}.{suffix}"] = Origin(name, values=values)
        elif whole_part in of_layer_names:
            found[f"{prefix}.{of_layer_names[whole_part]}"] = Origin(name)
        elif part in experts:
            for expert in range(info.shape[0]):
                target = f"{family.names.moe}experts.{expert}.{experts[part]}"
                found[f"{prefix}.{target}.{suffix}"] = Origin(name, expert=expert)
        elif part == _GATE_UP_STACK and len(info.shape) == 3:
            for expert, half in product(range(info.shape[0]), range(2)):
                target = f"{family.names.moe}experts.{expert}.{names.expert_gate_up[half]}"
                found[f"{prefix}.{target}.{suffix}"] = Origin(name, expert=expert, half=half)
        elif part == "attn_qkv" and family.gguf.fused_rows and int(layer) < every_layer:
            ends = np.cumsum((0, *family.gguf.fused_rows(config, int(layer))))
            if info.shape[0] != ends[-1]:
                raise CheckpointError(
                    f"the GGUF tensor {name} has {info.shape[0]} rows, not the {ends[-1]} of its heads"
                )
            for ours, (start, end) in zip(names.qkv, pairwise(ends), strict=True):
                found[f"{prefix}.{names.attention}{ours}.{suffix}"] = Origin(name, rows=np.arange(start, end))
        elif part in of_layer_names:
            heads = interleaved.get(part, 0)
            found[f"{prefix}.{of_layer_names[part]}.{suffix}"] = Origin(
                name, heads=heads, offset=offset, row=part in _ROWS, depthwise=part in _DEPTHWISE and suffix == "weight"
            )
        else:
            # An unknown tensor changes what the model computes; keep its name so that the checkpoint is refused.
            found[name] = Origin(name)
    for key, (target, shape) in family.gguf.numbers.items():
        for index, raw in enumerate(_numbers(file, key, shape, config["num_hidden_layers"])):
            found[f"{layers}.{index}.{target}"] = Origin(key, given=raw)
    return found


def _numbers(file: GGUFFile, key: str, shape: tuple[int, ...], layers: int) -> list[RawTensor]:
    """A number for each layer, of one key."""
    given = file.metadata.get(key)
    value = given if isinstance(given, np.ndarray) else np.array([given] if isinstance(given, float) else [])
    if len(value) not in (1, layers) or value.dtype.kind != "f" or not np.isfinite(value).all():
        raise CheckpointError(f"{file.path}: {key} must be a number for each of {layers} layers; the file is damaged")
    each = np.broadcast_to(value.astype(np.float32), layers)
    return [RawTensor(GGMLType.F32, one.reshape(1).view(np.uint8).reshape(1, 4), shape) for one in each]


def layer_names(family: Family) -> dict[str, str]:
    """GGUF names below `blk.N.` to Hugging Face names below `layers.N.`."""
    names = family.names
    found = {
        "ffn_norm": names.feed_forward_norm,
        "attn_norm": names.mixer_norm,
        "attn_qkv": names.attention + names.fused_qkv,
        "attn_output": names.attention + names.output,
        "attn_q_norm": names.attention + names.head_norms[0],
        "attn_k_norm": names.attention + names.head_norms[1],
        "ffn_down": names.mlp + names.down,
        "ffn_gate_inp": names.moe + names.router,
    }
    for theirs, ours in zip(("attn_q", "attn_k", "attn_v"), names.qkv, strict=True):
        found[theirs] = names.attention + ours
    for theirs, ours in zip(("ffn_gate", "ffn_up"), names.gate_up, strict=True):
        found[theirs] = names.mlp + ours
    if names.fused:
        found["ffn_up"] = names.mlp + names.fused_gate_up
    if names.mixer_out_norm:
        found["post_attention_norm"] = names.mixer_out_norm
    if names.feed_forward_out_norm:
        found["post_ffw_norm"] = names.feed_forward_out_norm
    return found | dict(family.gguf.tensors)


def _expert_names(names: TensorNames) -> dict[str, str]:
    """GGUF names of stacked experts to the matrix of one expert."""
    gate, up = names.expert_gate_up
    return {"ffn_gate_exps": gate, "ffn_up_exps": up, "ffn_down_exps": names.expert_down}


def raw_of(file: GGUFFile, origin: Origin) -> RawTensor:
    """The stored bytes behind a Hugging Face tensor, rows in Hugging Face order. Quantization blocks lie within
    rows, so whole rows can be moved without decoding them."""
    if origin.given is not None:
        return origin.given
    raw = file.raw(origin.name)
    if origin.reordered:
        return reordered(raw, origin)
    if origin.expert >= 0:
        rows = raw.shape[1] if len(raw.shape) == 3 else 1  # of biases one
        data = raw.data[origin.expert * rows : (origin.expert + 1) * rows]
        if origin.half < 0:
            return RawTensor(raw.type, data, raw.shape[1:])
        rows //= 2
        return RawTensor(raw.type, data[origin.half * rows : (origin.half + 1) * rows], (rows, *raw.shape[2:]))
    if origin.row and len(raw.shape) == 1:
        return RawTensor(raw.type, raw.data, (1, *raw.shape))
    if origin.heads:
        if raw.shape[0] % (2 * origin.heads):
            raise CheckpointError(
                f"the GGUF tensor {origin.name} has {raw.shape[0]} rows, not {origin.heads} heads of even size"
            )
        if len(raw.shape) == 1:  # a bias: its elements are the rows
            size = raw.data.shape[1] // raw.shape[0]
            return RawTensor(raw.type, deinterleave(raw.data.reshape(-1, size), origin.heads).reshape(1, -1), raw.shape)
        return RawTensor(raw.type, deinterleave(raw.data, origin.heads), raw.shape)
    return raw


def join_latent_parts(keys: Tensor, values: Tensor) -> Tensor:
    """Rows of all heads, those of a head's keys before those of its values, from both parts (see `Origin.values`)."""
    rank, plain = values.shape[-1], keys.shape[-1]
    heads = keys.numel() // (rank * plain)
    if not heads or keys.numel() % (rank * plain) or values.numel() % (heads * rank):
        raise CheckpointError(
            f"the GGUF tensors attn_k_b {tuple(keys.shape)} and attn_v_b {tuple(values.shape)} do not fit together"
        )
    rows = keys.reshape(heads, rank, plain).transpose(1, 2), values.reshape(heads, -1, rank)
    return torch.cat(rows, 1).flatten(0, 1)


def deinterleave(rows: Bytes, heads: int) -> Bytes:
    """Within each head, bring rows 0, 2, 4, ... before rows 1, 3, 5, ..."""
    count, size = rows.shape
    return np.ascontiguousarray(rows.reshape(heads, count // heads // 2, 2, size).swapaxes(1, 2)).reshape(count, size)
