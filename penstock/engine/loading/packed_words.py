"""How few-bit layouts put integers into 32-bit words, in both directions.

All pack low bits first along one axis. AWQ deals the eight columns of a word out as 0, 2, 4, 6, 1, 3, 5, 7.
"""

from __future__ import annotations

import torch
from torch import Tensor

AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
"""Which of a word's eight columns sits at each nibble, lowest first."""


def unpack(words: Tensor, bits: int, dim: int) -> Tensor:
    """uint8: every int32 of `words` becomes 32 / bits numbers along `dim`."""
    per = 32 // bits
    words = words.movedim(dim, -1)
    shifts = torch.arange(0, 32, bits, dtype=torch.int32, device=words.device)
    numbers = (words.unsqueeze(-1) >> shifts) & ((1 << bits) - 1)
    return numbers.to(torch.uint8).reshape(*words.shape[:-1], words.shape[-1] * per).movedim(-1, dim)


def pack(numbers: Tensor, bits: int, dim: int) -> Tensor:
    """int32: the inverse of `unpack`; the axis must hold whole words."""
    per = 32 // bits
    numbers = numbers.movedim(dim, -1)
    if numbers.shape[-1] % per:
        raise ValueError(f"{numbers.shape[-1]} numbers of {bits} bits do not fill whole words")
    shifts = torch.arange(0, 32, bits, dtype=torch.int64, device=numbers.device)
    words = (numbers.to(torch.int64).reshape(*numbers.shape[:-1], -1, per) << shifts).sum(-1)
    return torch.where(words >= 1 << 31, words - (1 << 32), words).to(torch.int32).movedim(-1, dim).contiguous()


def unpack_awq(words: Tensor) -> Tensor:
    """uint8 [rows, columns]: 4-bit numbers packed along columns in AWQ's order."""
    dealt = unpack(words, 4, 1).reshape(words.shape[0], -1, 8)
    out = torch.empty_like(dealt)
    out[:, :, list(AWQ_ORDER)] = dealt
    return out.flatten(1)


def pack_awq(numbers: Tensor) -> Tensor:
    """int32: the inverse of `unpack_awq`."""
    return pack(numbers.reshape(numbers.shape[0], -1, 8)[:, :, list(AWQ_ORDER)].flatten(1), 4, 1)
