"""Smoothing of the keys of an int8 cache (`KeySmoothing`), computed from the keys of a calibration prompt.

The channels of a head's keys differ: a few are an order of magnitude larger than the rest, and the largest hardly
change from token to token. One int8 scale per token and head would spend its steps on those. Subtracting what all
tokens have in common and scaling large channels down leaves attention as it is and a quarter of the quantization error
in the model's outputs (`docs/engine.md`).
"""

from __future__ import annotations

from typing import Final

import torch
from torch import Tensor

from penstock.engine.backends.interface import KeySmoothing
from penstock.engine.models.layers.attention import Attention

_POSITIONS: Final = 2048
"""RoPE rotates the mean key with the position. The rotation is averaged over this many positions, whatever the engine's
`max_model_len`, so that a model gives the same output under any."""
_STRENGTH: Final = 0.5
"""Exponent of the channel ranges. With 0 every channel is rounded as coarsely as the largest one needs; with 1 each is
rounded relative to its own range, although queries depend on some channels more than on others."""
_MIN_RANGE: Final = 1e-3
"""Relative range below which a channel is not scaled up further, so that one that is always zero stays finite."""


def key_smoothing(keys: Tensor, attention: Attention, rotation: Tensor | None = None) -> KeySmoothing:
    """From keys [tokens, kv_heads, head_dim] that were rotated for positions 0, 1, ... `rotation`: `mean_rotation` of
    its table, where that is known."""
    unrotated = _rotate(keys, attention.cos_sin[: len(keys)].unsqueeze(1), inverse=True)
    middle = (unrotated.amax(0) + unrotated.amin(0)) / 2
    centre = _rotate(middle, mean_rotation(attention.cos_sin) if rotation is None else rotation)
    if attention.heads.softcap is not None or attention.sinks is not None:
        centre.zero_()
    ranges = (keys - centre).abs().amax(0)
    ranges = ranges / ranges.mean(-1, keepdim=True).clamp_min(torch.finfo(torch.float32).tiny)
    return KeySmoothing(centre.contiguous(), (ranges.clamp_min(_MIN_RANGE) ** _STRENGTH).contiguous())


def mean_rotation(table: Tensor) -> Tensor:
    """The mean of the first `_POSITIONS` rows of a rotary table that may have fewer: its second row has every angle."""
    if len(table) < 2:
        return table[0]
    cos, sin = table[1].double().chunk(2)
    angles = torch.arange(_POSITIONS, device=table.device).unsqueeze(1) * torch.atan2(sin, cos)
    return (torch.cat((angles.cos(), angles.sin()), -1).mean(0) * torch.hypot(cos, sin).repeat(2)).float()


def _rotate(x: Tensor, table: Tensor, inverse: bool = False) -> Tensor:
    """Apply rows of a rotary table as `Ops.rope_and_cache` does, or undo it."""
    half = table.shape[-1] // 2
    cos, sin = table[..., :half], table[..., half:]
    if inverse:
        # Tables of scaled contexts may carry a factor: (cos, sin) of length `size` squared.
        size = cos.square() + sin.square()
        cos, sin = cos / size, -sin / size
    low, high, rest = x[..., :half], x[..., half : 2 * half], x[..., 2 * half :]
    return torch.cat((low * cos - high * sin, high * cos + low * sin, rest), -1)
