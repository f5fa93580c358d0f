"""Random numbers that depend on a request alone.

The noise of a token is a hash of (seed, position of the token in its sequence, vocabulary index). It does not matter
which step, batch, row or replica draws it, so a seed gives the same text anywhere, and a sequence that was preempted
or moved to another engine goes on as if nothing had happened.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

GOLDEN = 0x9E3779B97F4A7C15
_POSITION = 0xD1342543DE82EF95
_MIX = ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB))
_WORD = 2**64


def _signed(value: int) -> int:
    value %= _WORD
    return value - _WORD if value >= _WORD // 2 else value


def row_keys(seeds: np.ndarray, positions: np.ndarray) -> np.ndarray:
    """int64 (bit pattern of uint64) key of each row: splitmix64 of its seed and the position to be sampled."""
    with np.errstate(over="ignore"):
        x = seeds.astype(np.uint64) + positions.astype(np.uint64) * np.uint64(_POSITION)
        for shift, factor in _MIX:
            x = (x ^ (x >> np.uint64(shift))) * np.uint64(factor)
        x ^= x >> np.uint64(31)
    return x.view(np.int64)


def gumbel(keys: Tensor, vocab_size: int) -> Tensor:
    """float32 [rows, vocab] standard Gumbel noise: -log(-log(u)), u from the top 23 bits of a splitmix64 hash."""
    index = torch.arange(vocab_size, dtype=torch.int64, device=keys.device) * _signed(GOLDEN)
    x = keys.unsqueeze(1) + index
    for shift, factor in _MIX:
        x ^= (x >> shift) & ((1 << (64 - shift)) - 1)
        x *= _signed(factor)
    x ^= (x >> 31) & ((1 << 33) - 1)
    # 23 bits and a half: every value, the largest included, is exact in float32 and strictly inside (0, 1).
    u = ((x >> 41) & ((1 << 23) - 1)).to(torch.float32).add_(0.5).mul_(2.0**-23)
    return u.log_().neg_().log_().neg_()
