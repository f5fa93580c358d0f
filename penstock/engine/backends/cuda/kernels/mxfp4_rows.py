"""MXFP4 weights row by row, as a chain of products of one token reads them (`csrc/product_chain.cu`).

A row is cut into units of 512 bytes, each for 960 inputs: 30 blocks of 32 inputs in 16 bytes, with bits as in
`mxfp4_fragments` (two words for sixteen inputs), then a byte for the power of each block, and two zeros. So a warp
reads a unit at once, and lanes 30 and 31 bring the powers of the others.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from penstock.engine.backends.cuda.kernels.mxfp4_fragments import Mxfp4Fragments

UNIT_INPUTS = 960
_UNIT, _BLOCKS = 512, 30
"""Bytes and blocks of a unit."""


@dataclass(frozen=True, slots=True)
class Mxfp4Rows:
    """A stack of matrices [experts, out, in]."""

    units: Tensor
    """uint8 [experts, out, units * 512]"""
    scale: Tensor
    """float32 [experts, out]: the largest power of two of a row."""

    def put(self, index: int, other: Mxfp4Fragments) -> None:
        """Another matrix, at a place of the stack."""
        (units,) = rows_of(_one(other)).units
        self.units[index].copy_(units)
        self.scale[index].copy_(other.scale)


def row_bytes(inputs: int) -> int:
    return -(-inputs // UNIT_INPUTS) * _UNIT


def rows_of(stack: Mxfp4Fragments) -> Mxfp4Rows:
    """The same weights; bits of a word stay where they are."""
    experts, tiles, steps = stack.words.shape[:3]
    units = -(-stack.inputs // UNIT_INPUTS)
    words = stack.words.view(experts, tiles, steps, 8, 4, 2, 2).permute(0, 1, 5, 3, 2, 4, 6)
    weights = _rows(words.reshape(experts, tiles, 2, 8, steps * 8), stack).view(torch.uint8)[..., : stack.inputs // 2]
    spans = stack.exponents.shape[2]
    powers = stack.exponents.unsqueeze(-1).view(torch.uint8).view(experts, tiles, spans, 8, 2, 2, 4)
    powers = _rows(powers.permute(0, 1, 5, 3, 2, 6, 4).reshape(experts, tiles, 2, 8, spans * 8), stack)
    powers = powers[..., : stack.inputs // 32]
    shape = experts, stack.outputs, units
    weights = F.pad(weights, (0, units * 16 * _BLOCKS - weights.shape[-1])).view(*shape, 16 * _BLOCKS)
    powers = F.pad(powers, (0, units * _BLOCKS - powers.shape[-1])).view(*shape, _BLOCKS)
    together = torch.cat((weights, powers, torch.zeros_like(powers[..., :2])), -1)
    return Mxfp4Rows(together.flatten(-2).contiguous(), stack.scale)


def _rows(tiles: Tensor, stack: Mxfp4Fragments) -> Tensor:
    """[experts, tile, half, 8, n] as [experts, out, n], without the rows past the last one."""
    outputs = stack.outputs
    if not stack.paired:
        return tiles.flatten(1, 3)[:, :outputs].contiguous()
    return tiles.transpose(1, 2).flatten(2, 3)[:, :, : outputs // 2].flatten(1, 2).contiguous()


def _one(matrix: Mxfp4Fragments) -> Mxfp4Fragments:
    words, exponents, scale = (tensor.unsqueeze(0) for tensor in matrix.tensors)
    return Mxfp4Fragments(words, exponents, scale, matrix.inputs, matrix.paired)
