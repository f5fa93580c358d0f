"""How a checkpoint in few bits holds its matrices, from `quantization_config`: bytes per weight, scales included.

Heads, embeddings and routers stay dense in all of these formats unless a configuration says otherwise.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from penstock.errors import CheckpointError
from penstock.planning.numbers import WEIGHT_FORMATS, ComputeDType, WeightFormat

_METHODS = "fp8, gptq, awq, compressed-tensors, mxfp4, bitsandbytes"
_DENSE = 2.0
_SCALE = 2.0


def stored_form(settings: Any) -> WeightFormat:
    """CheckpointError for a method that is not known."""
    if not isinstance(settings, Mapping):
        raise CheckpointError(f"quantization_config must be an object, found {settings!r:.80}")
    method = str(settings.get("quant_method") or "").lower()
    if method == "fp8" or method == "fbgemm_fp8":
        found = _fp8(settings.get("weight_block_size"))
        four = settings.get("expert_dtype") == "fp4"  # of DeepSeek V4
        return replace(found, expert_bytes=WEIGHT_FORMATS["fp4"].matrix_bytes) if four else found
    if method in ("gptq", "awq"):
        bits = _whole(settings, "bits", _whole(settings, "w_bit", 4))
        group = _whole(settings, "group_size", _whole(settings, "q_group_size", 128))
        return _groups(bits, group, zero=True, head=bool(settings.get("lm_head")))
    if method in ("compressed-tensors", "compressed_tensors"):
        return _compressed(settings)
    if method == "mxfp4":
        fp4 = WEIGHT_FORMATS["fp4"]  # of gpt-oss, which has its experts in four bits and all else dense
        return WeightFormat("mxfp4 experts", _DENSE, _DENSE, "bf16", expert_bytes=fp4.matrix_bytes)
    if method == "bitsandbytes":
        four = settings.get("load_in_4bit", settings.get("_load_in_4bit")) is True
        return _groups(4, 64, zero=False) if four else _groups(8, 0, zero=False)
    raise CheckpointError(f"quantization_config: quant_method {method!r:.60} is not known; known are {_METHODS}")


def _fp8(block: Any) -> WeightFormat:
    scale = 0.0  # per output: nothing beside the weights
    if (
        isinstance(block, list | tuple)
        and len(block) == 2
        and all(isinstance(side, int) and side > 0 for side in block)
    ):
        scale = 4 / (block[0] * block[1])
    return WeightFormat("fp8", 1 + scale, _DENSE, "fp8")


def _groups(bits: int, group: int, *, zero: bool, head: bool = False) -> WeightFormat:
    """Integers with a float16 scale per group, and a packed zero point where they are not symmetric. A group of 0 or
    less is a whole row."""
    if not 2 <= bits <= 8:
        raise CheckpointError(f"quantization_config: {bits} bits are not supported; known are 2 to 8")
    beside = _SCALE + (bits / 8 if zero else 0)
    size = bits / 8 + (beside / group if group > 0 else 0)
    return WeightFormat(f"int{bits}", size, size if head else _DENSE, "bf16")


def _compressed(settings: Mapping[str, Any]) -> WeightFormat:
    groups = settings.get("config_groups")
    schemes = list(groups.values()) if isinstance(groups, Mapping) else []
    weights = schemes[0].get("weights") if schemes and isinstance(schemes[0], Mapping) else None
    if not isinstance(weights, Mapping):
        raise CheckpointError("quantization_config: config_groups has no group with `weights`")
    bits, group = _whole(weights, "num_bits", 8), _whole(weights, "group_size", 0)
    if weights.get("type") == "float" and bits == 8:
        return _fp8(weights.get("block_structure"))
    if weights.get("type") == "float":
        compute: ComputeDType = "fp4"
        return WeightFormat("fp4", 0.5 + 1 / (group or 16), _DENSE, compute)
    return _groups(bits, group, zero=weights.get("symmetric") is False)


def _whole(settings: Mapping[str, Any], key: str, default: int) -> int:
    value = settings.get(key)
    if value is None:
        return default
    if isinstance(value, bool) or not isinstance(value, int):
        raise CheckpointError(f"quantization_config: {key} must be an integer, found {value!r:.80}")
    return value
