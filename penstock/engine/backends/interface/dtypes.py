"""The formats of numbers in weights and caches, and how cached numbers are scaled."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

KVScales = tuple[Tensor, Tensor]
"""What cached keys and cached values are multiplied by when read. FP8 cache: float32 [kv_heads] each. Int8 cache:
`SCALE_DTYPE` [num_blocks, kv_heads, block_size] each, written with the tokens: their largest magnitude / 127."""
FP8 = torch.float8_e4m3fn
INT8 = torch.int8
SCALE_DTYPE = torch.bfloat16
"""Any magnitude in two bytes. Its eight bits cost nothing: numbers are divided by the scale as it was rounded."""
INT8_MAX = 127.0
FP8_MAX = 448.0


def torch_dtype(name: str) -> torch.dtype:
    """The torch dtype called `name` in configurations."""
    return {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}[name]


class KeySmoothing(NamedTuple):
    """How a layer's keys are smoothed before quantization: the cache holds (key - centre) / scale, and queries are
    multiplied by `scale`.

    All scores of a query change by the same constant, which softmax cancels, and quantization loses less: some channels
    of the keys are nearly constant over tokens, some are far larger than the others. Float32 [kv_heads, head_dim] each.
    With `softcap` or sinks the scores themselves matter, so there the centre must be zero.
    """

    centre: Tensor
    scale: Tensor
