"""MXFP4: 4-bit floats (e2m1) in blocks of 32 inputs that share a power of two (e8m0).

Checkpoints store them in two orders: gpt-oss folders with neighbouring inputs in a byte, GGUF files with inputs i and
i + 16 of a block in a byte. Here they are always in the first. `stored_mxfp4` finds them in any checkpoint; kernels
read them in layouts of their own, and every weight keeps its value.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from penstock.errors import CheckpointError

BLOCK = 32
"""Inputs that share a scale."""
VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)
"""Of the sixteen codes."""
_BIAS = 127


@dataclass(frozen=True, slots=True)
class Mxfp4:
    """W [out, in]."""

    blocks: Tensor
    """uint8 [out, in / 2]: input 2 i in the low half of byte i, input 2 i + 1 in the high half."""
    scales: Tensor
    """uint8 [out, in / 32]: exponents of two, 127 too large."""

    @property
    def shape(self) -> tuple[int, int]:
        return self.blocks.shape[0], 2 * self.blocks.shape[1]

    def dense(self) -> Tensor:
        """float32 [out, in]."""
        values = torch.tensor(VALUES, device=self.blocks.device)
        wide = values[torch.stack((self.blocks & 15, self.blocks >> 4), -1).int()]
        exponents = (self.scales.int() - _BIAS).unsqueeze(-1)
        return torch.ldexp(wide.reshape(*self.scales.shape, BLOCK), exponents).flatten(1)

    def rows(self, first: int, last: int) -> Mxfp4:
        return Mxfp4(self.blocks[first:last], self.scales[first:last])

    def inputs(self, first: int, last: int) -> Mxfp4:
        """Whole blocks of every row."""
        blocks, scales = slice(first // 2, last // 2), slice(first // BLOCK, last // BLOCK)
        return Mxfp4(self.blocks[:, blocks].contiguous(), self.scales[:, scales].contiguous())


def stack(parts: list[Mxfp4]) -> Mxfp4:
    """One matrix of several with the same inputs."""
    return Mxfp4(torch.cat([part.blocks for part in parts]), torch.cat([part.scales for part in parts]))


def from_gguf_blocks(data: Tensor, rows: int) -> Mxfp4:
    """Of blocks [n, 17]: the exponent, then 16 bytes with inputs i and i + 16."""
    blocks = data.reshape(rows, -1, 17)
    low, high = blocks[..., 1:] & 15, blocks[..., 1:] >> 4
    inputs = torch.cat((low, high), -1).reshape(rows, -1, 2)
    return Mxfp4(inputs[..., 0] | inputs[..., 1] << 4, blocks[..., 0].contiguous())


def round_mxfp4(weight: Tensor) -> Mxfp4:
    """The nearest values with the usual choice of scales: the largest of a block keeps two bits of exponent."""
    wide = weight.float().reshape(weight.shape[0], -1, BLOCK)
    peak = wide.abs().amax(-1, keepdim=True)
    exponent = torch.where(peak > 0, peak.log2().floor() - 2, 0.0).clamp(-_BIAS, _BIAS)
    scaled = torch.ldexp(wide, -exponent.int())
    values = torch.tensor(VALUES[:8], device=weight.device)
    code = torch.bucketize(scaled.abs(), (values[1:] + values[:-1]) / 2).to(torch.uint8) | (scaled < 0).byte() << 3
    pairs = code.reshape(weight.shape[0], -1, 2)
    return Mxfp4(pairs[..., 0] | pairs[..., 1] << 4, (exponent.squeeze(-1) + _BIAS).to(torch.uint8))


def has_mxfp4(weights: Any) -> bool:
    """Whether a checkpoint can hold matrices in MXFP4."""
    return hasattr(weights, "mxfp4")


def stored_mxfp4(weights: Any, names: dict[str, int], inputs: int, device: str | torch.device) -> Mxfp4 | None:
    """The named matrices of a checkpoint as one; None where some are not stored in MXFP4."""
    if not has_mxfp4(weights):
        return None
    found = []
    for name, size in names.items():
        part: Mxfp4 | None = weights.mxfp4(name, device)
        if part is None:
            return None
        if part.shape != (size, inputs):
            raise CheckpointError(f"tensor {name!r} has shape {part.shape}, the configuration says {(size, inputs)}")
        found.append(part)
    return stack(found)
