"""Number formats: what a weight or a cached key takes in memory, and in which arithmetic it is multiplied.

The few-bit forms are those that the engine keeps: groups of 128 inputs (on CPUs 32) share a float16 scale, with four
bits also a float16 minimum; FP8 has one scale per output. Scales are included in the bytes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

WeightDType = Literal["auto", "fp32", "bf16", "fp16", "fp8", "int8", "int4", "fp4"]
"""`auto`: as the checkpoint stores them."""
KVDType = Literal["auto", "fp32", "bf16", "fp16", "fp8", "int8"]
"""`auto`: that of activations, the cache's default on GPUs."""
ComputeDType = Literal["fp32", "bf16", "fp8", "int8", "fp4"]
"""Keys of `Device.flops`."""

WEIGHT_DTYPES: tuple[str, ...] = get_args(WeightDType)
KV_DTYPES: tuple[str, ...] = get_args(KVDType)

_GROUP = 128
"""Inputs that share a scale: `engine.quantization.grids.SIZES[0]`."""
_CPU_GROUP = 32
"""`engine.backends.cpu.quant_linear`."""
_SCALE_BYTES = 2


@dataclass(frozen=True, slots=True)
class WeightFormat:
    """How a model's matrices are held in memory."""

    name: str
    matrix_bytes: float
    """Of one weight of a layer's matrix, its share of scales included."""
    head_bytes: float
    """Of one weight of the output head, which is rounded less: its error goes straight into the logits."""
    compute: ComputeDType
    """Whose peak a matrix product is measured by. Integer weights are widened as they are read, or multiplied in two
    digits on CPUs: they save bytes, and calibrations hold their speed over that of dense products."""
    dense_bytes: float = 2
    """Of embeddings, norms, biases and routers, which are never rounded."""
    expert_bytes: float | None = None
    """Of one weight of a routed expert, where it is not `matrix_bytes`."""

    @property
    def further(self) -> float:
        return self.matrix_bytes if self.expert_bytes is None else self.expert_bytes


def _int8(group: int) -> float:
    return 1 + _SCALE_BYTES / group


def _int4(group: int) -> float:
    return 0.5 + 2 * _SCALE_BYTES / group


WEIGHT_FORMATS: dict[str, WeightFormat] = {
    "fp32": WeightFormat("fp32", 4, 4, "fp32", 4),
    "bf16": WeightFormat("bf16", 2, 2, "bf16"),
    "fp16": WeightFormat("fp16", 2, 2, "bf16"),
    "fp8": WeightFormat("fp8", 1, 2, "fp8"),
    "int8": WeightFormat("int8", _int8(_GROUP), _int8(_GROUP), "bf16"),
    "int4": WeightFormat("int4", _int4(_GROUP), _int8(_GROUP), "bf16"),
    "fp4": WeightFormat("fp4", 0.5 + 1 / 32, 2, "fp4"),  # MXFP4: one byte of scale for 32 weights
}
CPU_FORMATS: dict[str, WeightFormat] = {
    **WEIGHT_FORMATS,
    "int8": WeightFormat("int8", _int8(_CPU_GROUP), _int8(_CPU_GROUP), "bf16"),
    "int4": WeightFormat("int4", _int4(_CPU_GROUP), _int4(_CPU_GROUP), "bf16"),
}
"""On CPUs, whose kernels keep the head in as few bits as the rest."""

_ELEMENT_BYTES: dict[str, int] = {"fp32": 4, "bf16": 2, "fp16": 2, "fp8": 1, "int8": 1}


def kv_element_bytes(dtype: str, head_dim: int) -> float:
    """Of one key or value element; an int8 cache has a bfloat16 scale per token and head (`engine.kv.kinds`)."""
    return _ELEMENT_BYTES[dtype] + (_SCALE_BYTES / head_dim if dtype == "int8" else 0)
