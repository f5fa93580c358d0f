"""The coordinates in which an int8 cache keeps a model's keys.

Keys of one head are not alike in all dimensions: a few are an order of magnitude larger than the rest, and the largest
hardly change from token to token. An int8 number per dimension under one scale per token spends itself on those. Taking
away what is common to all tokens and shrinking what is large (`KeyFrame`) leaves the same attention, and a quarter of
the rounding's effect on what the model says (`docs/engine.md`).

Which dimensions those are a `trial` shows.
"""

from __future__ import annotations

from typing import Final

import torch
from torch import Tensor

from penstock.engine.backends.interface import KeyFrame
from penstock.engine.models.decoder import DecoderLayer

_POSITIONS: Final = 2048
"""Rotation moves what is common to all tokens; it is averaged over so many positions, however many the engine is set up
for: a model says the same under any `max_model_len`."""
_SHRINKING: Final = 0.5
"""Of the ratio between dimensions, in logarithms. Without any, rounding is as coarse in all of them as the largest
need; with all of it as fine in each as its own size, though queries care more for some than for others."""
_LEAST: Final = 1e-3
"""A dimension that is always zero need not be blown up."""


def key_frame(keys: Tensor, layer: DecoderLayer) -> KeyFrame:
    """Of keys [tokens, kv_heads, head_dim] as they are at positions 0, 1, ..."""
    still = _turned(keys, layer.cos_sin[: len(keys)].unsqueeze(1), back=True)
    middle = (still.amax(0) + still.amin(0)) / 2
    centre = _turned(middle, _mean_turn(layer.cos_sin))
    if layer.heads.softcap is not None:
        centre.zero_()
    span = (keys - centre).abs().amax(0)
    span = span / span.mean(-1, keepdim=True).clamp_min(torch.finfo(torch.float32).tiny)
    return KeyFrame(centre.contiguous(), (span.clamp_min(_LEAST) ** _SHRINKING).contiguous())


def _mean_turn(table: Tensor) -> Tensor:
    """The average of `_POSITIONS` rows of a table that may have fewer: its second row has every angle."""
    if len(table) < 2:
        return table[0]
    cos, sin = table[1].double().chunk(2)
    turns = torch.arange(_POSITIONS, device=table.device).unsqueeze(1) * torch.atan2(sin, cos)
    return (torch.cat((turns.cos(), turns.sin()), -1).mean(0) * torch.hypot(cos, sin).repeat(2)).float()


def _turned(x: Tensor, table: Tensor, back: bool = False) -> Tensor:
    """Rotated as `Ops.rope_and_cache` does by rows of its table, or back."""
    half = table.shape[-1] // 2
    cos, sin = table[..., :half], table[..., half:]
    if back:
        # Tables of stretched contexts may carry a factor: cosines and sines of length `size`.
        size = cos.square() + sin.square()
        cos, sin = cos / size, -sin / size
    low, high, rest = x[..., :half], x[..., half : 2 * half], x[..., 2 * half :]
    return torch.cat((low * cos - high * sin, high * cos + low * sin, rest), -1)
