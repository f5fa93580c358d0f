"""MXFP4 weights in the order in which threads multiply them.

A tensor-core product of 16 rows and 64 inputs takes 32 threads; thread 4 g + t multiplies inputs 16 t .. 16 t + 15 of
rows g and g + 8. Two words hold those sixteen of a row, and the four words of both rows are next to each other: what a
thread reads is 16 bytes, what 32 threads read is 512 bytes in a row.

A float of e2m1 becomes one of bfloat16 by moving its bits: sign to sign, the three others to where exponent and
mantissa meet, which is the value times 2^-126, zero and subnormals included. One multiplication by a power of two then
makes the weight of it, in units of the largest power of its row. `_PLACES` says where the bits lie: inputs 2 r and
2 r + 1 are taken out of a word together, one into each half of a register, by one shift and one mask. For two of the
eight pairs sign and highest bit come from the first word, the other bits from the second.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from penstock.engine.loading.mxfp4 import Mxfp4

STEP = 64
"""Inputs of a tensor-core product."""
TOP = 253
"""Exponent of a bfloat16 that is 2^126: what the bits of a weight are multiplied by where its power is its row's
largest."""
_SIGN, _HIGH, _MIDDLE, _LOW = 3, 2, 1, 0
_TARGET = {_SIGN: 15, _HIGH: 8, _MIDDLE: 7, _LOW: 6}
"""Bits of a code, and where they go in a half of a register."""
_ALL = (_SIGN, _HIGH, _MIDDLE, _LOW)
_PLACES: tuple[tuple[tuple[int, int, tuple[int, ...]], ...], ...] = (
    ((0, 6, _ALL),),
    ((0, 2, _ALL),),
    ((0, 12, _ALL),),
    ((1, 4, _ALL),),
    ((1, 0, _ALL),),
    ((1, 10, _ALL),),
    ((0, 1, (_SIGN, _HIGH)), (1, 29, (_MIDDLE, _LOW))),
    ((0, 0, (_SIGN, _HIGH)), (1, 6, (_MIDDLE, _LOW))),
)
"""Of pair r: word, bits by which it is rotated to the left, and what is taken of it then."""


@dataclass(frozen=True, slots=True)
class Mxfp4Fragments:
    """One matrix [out, in], or a stack of them with one more axis in front."""

    words: Tensor
    """int32 [tiles of 16 rows, steps, 8, 4, 4]; see the top of the file. Zeros past the last input."""
    exponents: Tensor
    """int32 [tiles, ceil(steps / 4), 8, 2, 2]: of thread 4 g + t, rows g and g + 8 at [g, t // 2], four steps to a
    word, the first in the lowest byte; see `TOP`."""
    scale: Tensor
    """float32 [out]: the largest power of two of a row."""
    inputs: int
    paired: bool
    """Whether a tile has rows i .. i + 7 of the upper half of the matrix (gates), then those of the lower (ups)."""

    @property
    def nbytes(self) -> int:
        """Of the weights and their powers; neither what is past the last input nor `scale`."""
        return self.scale.numel() * self.inputs * 17 // 32

    @property
    def outputs(self) -> int:
        return self.scale.shape[-1]

    @property
    def tensors(self) -> tuple[Tensor, Tensor, Tensor]:
        return self.words, self.exponents, self.scale

    def put(self, index: int, other: Mxfp4Fragments) -> None:
        """Another matrix, at a place of the stack."""
        for ours, theirs in zip(self.tensors, other.tensors, strict=True):
            ours[index].copy_(theirs)


def fragments(weight: Mxfp4, *, paired: bool) -> Mxfp4Fragments:
    out, inputs = weight.shape
    steps = -(-inputs // STEP)
    codes = torch.stack((weight.blocks & 15, weight.blocks >> 4), -1).view(out, inputs).to(torch.int32)
    codes = F.pad(codes, (0, steps * STEP - inputs))
    top = weight.scales.to(torch.int32).amax(1, keepdim=True)
    powers = (weight.scales.to(torch.int32) - top + TOP).clamp_(min=0)
    spans = -(-steps // 4)
    powers = F.pad(powers, (0, spans * 8 - inputs // 32))
    # tile, half, g, step, t, r, e; and tile, half, g, span, step of it, t // 2
    split = _tiles(codes, paired, steps, 4, 8, 2)
    shifts = torch.arange(0, 32, 8, device=powers.device, dtype=torch.int32).view(4, 1)
    exponents = (_tiles(powers, paired, spans, 4, 2) << shifts).sum(-2, dtype=torch.int32)
    words = torch.stack(_words(split), -1).permute(0, 3, 2, 4, 1, 5).flatten(-2)
    scale = torch.ldexp(torch.ones_like(top, dtype=torch.float32), top - 127).view(out)
    return Mxfp4Fragments(words.contiguous(), exponents.permute(0, 3, 2, 4, 1).contiguous(), scale, inputs, paired)


def _tiles(rows: Tensor, paired: bool, *inner: int) -> Tensor:
    """[out, ...] as [tile, half, g, *inner], with zeros past the last row."""
    if paired:
        halves = rows.view(2, rows.shape[0] // 2, -1)
        halves = F.pad(halves, (0, 0, 0, -halves.shape[1] % 8))
        return halves.view(2, -1, 8, *inner).transpose(0, 1)
    return F.pad(rows, (0, 0, 0, -rows.shape[0] % 16)).view(-1, 2, 8, *inner)


def _words(codes: Tensor) -> list[Tensor]:
    """Codes [..., r, e] to the two words that hold them."""
    halves = (codes >> _SIGN) << _TARGET[_SIGN] | (codes & 7) << _TARGET[_LOW]
    pairs = halves[..., 0].long() | halves[..., 1].long() << 16
    words = [torch.zeros(pairs.shape[:-1], dtype=torch.int64, device=codes.device) for _ in range(2)]
    for r, places in enumerate(_PLACES):
        for word, rotation, bits in places:
            part = pairs[..., r] & sum(0x10001 << _TARGET[bit] for bit in bits)
            words[word] |= part >> rotation | part << (32 - rotation) & 0xFFFFFFFF if rotation else part
    return [word.to(torch.int32) for word in words]


def stacked(matrices: list[Mxfp4Fragments]) -> Mxfp4Fragments:
    words, exponents, scale = (torch.stack(parts) for parts in zip(*(m.tensors for m in matrices), strict=True))
    return Mxfp4Fragments(words, exponents, scale, matrices[0].inputs, matrices[0].paired)
