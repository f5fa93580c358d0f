"""Random numbers that depend on a request alone.

The noise of a token is a hash of (seed, position of the token in its sequence, vocabulary index). It does not matter
which step, batch, row or replica draws it, so a seed gives the same text anywhere, and a sequence that was preempted
or moved to another engine goes on as if nothing had happened.
"""

from __future__ import annotations

import torch
from torch import Tensor

from penstock.engine.noise import GOLDEN, LAST_SHIFT, MIX, row_keys

__all__ = ["GOLDEN", "gumbel", "row_keys"]
_WORD = 2**64


def _signed(value: int) -> int:
    value %= _WORD
    return value - _WORD if value >= _WORD // 2 else value


def gumbel(keys: Tensor, vocab_size: int) -> Tensor:
    """float32 [rows, vocab] standard Gumbel noise: -log(-log(u)), u from the top 23 bits of a splitmix64 hash."""
    index = torch.arange(vocab_size, dtype=torch.int64, device=keys.device) * _signed(GOLDEN)
    x = keys.unsqueeze(1) + index
    for shift, factor in MIX:
        x ^= (x >> shift) & ((1 << (64 - shift)) - 1)
        x *= _signed(factor)
    x ^= (x >> LAST_SHIFT) & ((1 << (64 - LAST_SHIFT)) - 1)
    # 23 bits and a half: every value, the largest included, is exact in float32 and strictly inside (0, 1).
    u = ((x >> 41) & ((1 << 23) - 1)).to(torch.float32).add_(0.5).mul_(2.0**-23)
    return u.log_().neg_().log_().neg_()
