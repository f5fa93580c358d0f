"""Which GGUF tensor stands behind each Hugging Face tensor name, and what the conversion did to it.

Three conversions are undone: GGUF stores the query and key rows of Llama-family models in interleaved rotary
order, stacks the experts of a layer into one tensor, and adds one to Gemma's norm weights.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

import numpy as np

from penstock.engine.loading.gguf import Bytes, GGUFFile, RawTensor

_TOP = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}

_LAYER = {
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_qkv": "self_attn.qkv_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "ffn_gate_inp": "mlp.gate",
    "ffn_gate_inp_shexp": "mlp.shared_expert_gate",
    "ffn_gate_shexp": "mlp.shared_expert.gate_proj",
    "ffn_up_shexp": "mlp.shared_expert.up_proj",
    "ffn_down_shexp": "mlp.shared_expert.down_proj",
}

_SANDWICH_NORMS = {
    "ffn_norm": "pre_feedforward_layernorm",
    "post_attention_norm": "post_attention_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}

_EXPERTS = {"ffn_gate_exps": "gate_proj", "ffn_up_exps": "up_proj", "ffn_down_exps": "down_proj"}
_MIXTRAL_EXPERTS = {"gate_proj": "w1", "down_proj": "w2", "up_proj": "w3"}

_INTERLEAVED = ("llama", "mistral3")
"""Architectures whose query and key rows are stored in interleaved rotary order."""

_IGNORED = re.compile(r"rope_freqs\.weight|rope_factors_(long|short)\.weight|blk\.\d+\.attn_rot_embd\.weight")


@dataclass(frozen=True, slots=True)
class Origin:
    """How to obtain one Hugging Face tensor: the GGUF tensor and the steps to apply."""

    name: str
    heads: int = 0
    """Not 0: rows are interleaved within this many heads."""
    expert: int = -1
    """Not -1: the tensor is this slice of a stack of experts."""
    shift: float = 0.0
    """Added to the weights."""


def origins(file: GGUFFile, arch: str, config: dict[str, Any]) -> dict[str, Origin]:
    """Hugging Face name to origin, for every tensor the model uses."""
    layer_names = dict(_LAYER)
    if arch in ("gemma2", "gemma3"):
        layer_names |= _SANDWICH_NORMS
    if arch == "phi3":
        layer_names["ffn_up"] = "mlp.gate_up_proj"
    mixtral = config["model_type"] == "mixtral"
    if mixtral:
        layer_names["ffn_gate_inp"] = "block_sparse_moe.gate"
    found: dict[str, Origin] = {}
    for name, info in file.tensors.items():
        if _IGNORED.fullmatch(name):
            continue
        stem, _, suffix = name.rpartition(".")
        if stem in _TOP:
            found[f"{_TOP[stem]}.{suffix}"] = Origin(name, shift=_shift(arch, name))
            continue
        match = re.fullmatch(r"blk\.(\d+)\.(\w+)", stem)
        layer, part = (match[1], match[2]) if match else ("", "")
        prefix = f"model.layers.{layer}"
        if part in _EXPERTS:
            for expert in range(info.shape[0]):
                projection = _EXPERTS[part]
                if mixtral:
                    target = f"block_sparse_moe.experts.{expert}.{_MIXTRAL_EXPERTS[projection]}"
                else:
                    target = f"mlp.experts.{expert}.{projection}"
                found[f"{prefix}.{target}.{suffix}"] = Origin(name, expert=expert)
        elif part in layer_names:
            heads = 0
            if arch in _INTERLEAVED and part in ("attn_q", "attn_k"):
                heads = config["num_attention_heads" if part == "attn_q" else "num_key_value_heads"]
            found[f"{prefix}.{layer_names[part]}.{suffix}"] = Origin(name, heads=heads, shift=_shift(arch, name))
        else:
            # An unknown tensor changes what the model computes; keep its name so that the engine can object.
            found[name] = Origin(name)
    return found


def _shift(arch: str, name: str) -> float:
    return -1.0 if arch.startswith("gemma") and name.endswith("norm.weight") else 0.0


def raw_of(file: GGUFFile, origin: Origin) -> RawTensor:
    """The stored bytes behind a Hugging Face tensor, rows in Hugging Face order. Quantization blocks lie within
    rows, so whole rows can be moved without decoding them."""
    raw = file.raw(origin.name)
    if origin.expert >= 0:
        rows = raw.shape[1]
        data = raw.data[origin.expert * rows : (origin.expert + 1) * rows]
        return RawTensor(raw.type, data, raw.shape[1:])
    if origin.heads:
        if len(raw.shape) == 1:  # a bias: its elements are the rows
            size = raw.data.shape[1] // raw.shape[0]
            return RawTensor(raw.type, deinterleave(raw.data.reshape(-1, size), origin.heads).reshape(1, -1), raw.shape)
        return RawTensor(raw.type, deinterleave(raw.data, origin.heads), raw.shape)
    return raw


def deinterleave(rows: Bytes, heads: int) -> Bytes:
    """Within each head, bring rows 0, 2, 4, ... before rows 1, 3, 5, ..."""
    count, size = rows.shape
    return np.ascontiguousarray(rows.reshape(heads, count // heads // 2, 2, size).swapaxes(1, 2)).reshape(count, size)
