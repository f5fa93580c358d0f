"""Heads of values that are smaller than those of queries and keys (`Ops.pad_values`), and factors of whole heads."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from penstock.engine.backends.interface import HeadLayout, HeadScales


def pad_values(qkv: Tensor, layout: HeadLayout, value_dim: int, scale: float) -> Tensor:
    tokens, dim = len(qkv), layout.head_dim
    before = (layout.heads + layout.kv_heads) * dim
    values = qkv[:, before:].view(tokens, layout.kv_heads, value_dim) * scale
    padded = F.pad(values, (0, dim - value_dim))
    return torch.cat((qkv[:, :before], padded.view(tokens, layout.kv_heads * dim)), dim=1)


def by_heads(x: Tensor, factors: Tensor) -> Tensor:
    """`x` [T, heads * head_dim] times factors that are as wide or one for each head."""
    return (x.view(*factors.shape, -1) * factors.unsqueeze(-1)).view(x.shape)


def scale_heads(queries: Tensor, positions: Tensor, scales: HeadScales) -> Tensor:
    """See `Ops`."""
    factors = scales.logarithms[positions].unsqueeze(1) * scales.rates + scales.offsets
    heads = queries.view(len(queries), len(scales.rates), -1)
    return (heads * factors.unsqueeze(2)).to(queries.dtype).view(len(queries), -1)
