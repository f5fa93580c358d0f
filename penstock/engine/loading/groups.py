"""Weights as integers in groups: the common form of all few-bit layouts.

W = scale * q + minimum, where q has 4 or 8 bits and a scale (and a minimum) serves a group of consecutive inputs. The
published layouts differ in packing, in how they write the minimum (a zero point, an offset) and in the order of
inputs; read as `IntGroups` they are all alike, and every weight keeps the value it has in the checkpoint. This form
spends a byte per weight and is held for one layer at a time; kernels pack it their own way.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from penstock.engine.loading.dequantize import dequantize, fifth_bits, half_at, k_scales, nibbles, quants_q5_k
from penstock.engine.loading.gguf import BLOCK, GGMLType, RawTensor
from penstock.errors import CheckpointError


@dataclass(frozen=True, slots=True)
class IntGroups:
    """W [out, in]."""

    quants: Tensor
    """[out, in]: uint8 from 0 to 15 with 4 bits, int8 with 8."""
    scale: Tensor
    """float32 [out, in / group]."""
    minimum: Tensor | None
    """float32 [out, in / group]; None: zero."""
    bits: int
    order: Tensor | None = None
    """int64 [in]: column i of `quants` belongs to input order[i]. None: to input i."""

    @property
    def shape(self) -> tuple[int, int]:
        return self.quants.shape[0], self.quants.shape[1]

    @property
    def group(self) -> int:
        return self.shape[1] // self.scale.shape[1]

    def dense(self) -> Tensor:
        """float32 [out, in], columns in the order of the inputs."""
        wide = self.quants.float().reshape(self.shape[0], -1, self.group) * self.scale.unsqueeze(-1)
        if self.minimum is not None:
            wide += self.minimum.unsqueeze(-1)
        wide = wide.flatten(1)
        if self.order is None:
            return wide
        out = torch.empty_like(wide)
        out[:, self.order] = wide
        return out

    def in_groups_of(self, size: int) -> IntGroups:
        """The same weights with each group cut into groups of `size`."""
        times = self.group // size
        if times * size != self.group:
            raise ValueError(f"groups of {self.group} cannot be cut into groups of {size}")
        if times == 1:
            return self
        low = None if self.minimum is None else self.minimum.repeat_interleave(times, 1)
        return replace(self, scale=self.scale.repeat_interleave(times, 1), minimum=low)


def stack(parts: Sequence[IntGroups]) -> IntGroups | None:
    """One matrix of several with the same inputs; None where their groups or orders do not go together."""
    first = parts[0]
    if len(parts) == 1:
        return first
    for part in parts[1:]:
        if part.bits != first.bits or (part.minimum is None) != (first.minimum is None):
            return None
        if (part.order is None) != (first.order is None):
            return None
        if part.order is not None and first.order is not None and not torch.equal(part.order, first.order):
            return None
    size = min(part.group for part in parts)
    if any(part.group % size for part in parts):
        return None
    parts = [part.in_groups_of(size) for part in parts]
    lows = [part.minimum for part in parts if part.minimum is not None]
    return IntGroups(
        torch.cat([part.quants for part in parts]),
        torch.cat([part.scale for part in parts]),
        torch.cat(lows) if lows else None,
        first.bits,
        first.order,
    )


def consecutive(inputs: int, size: int, device: torch.device) -> Tensor:
    """int64 [in]: the group of each input, `size` after `size` (-1: all in one); the last may be smaller."""
    if size != -1 and size < 1:
        raise CheckpointError(f"quantization_config: group_size must be positive, or -1 for one group, found {size}")
    return torch.arange(inputs, device=device) // (inputs if size == -1 else size)


def in_groups(quants: Tensor, scale: Tensor, minimum: Tensor | None, bits: int, group_of: Tensor) -> IntGroups:
    """Integers [out, in] whose scales [out, groups] belong to any groups of inputs: `group_of` [in].

    Inputs are put in the order of their groups; groups of different sizes are cut into equal ones.
    """
    order = None
    if bool((group_of.diff() < 0).any()):
        order = group_of.argsort(stable=True)
        quants, group_of = quants[:, order], group_of[order]
    ends = torch.bincount(group_of).cumsum(0)
    size = math.gcd(*(int(end) for end in ends.tolist()))
    of_group = group_of[::size]
    return IntGroups(
        quants.contiguous(),
        scale.float()[:, of_group].contiguous(),
        None if minimum is None else minimum[:, of_group].contiguous(),
        bits,
        order,
    )


def from_zero_points(quants: Tensor, scale: Tensor, zero: Tensor, bits: int, group_of: Tensor) -> IntGroups:
    """W = scale * (q - zero), with unsigned q [out, in] and zero points [out, groups] of the same kind; `group_of`
    [in] is the group of each input."""
    scale = scale.float()
    if bits == 8:
        # Centred, so that they fit into a signed byte; a zero point in the centre then needs no minimum at all.
        signed = (quants.int() - 128).to(torch.int8)
        off = zero.float() - 128
        return in_groups(signed, scale, -scale * off if bool(off.any()) else None, 8, group_of)
    return in_groups(quants.to(torch.uint8), scale, -scale * zero.float(), 4, group_of)


def from_gguf(raw: RawTensor, device: str | torch.device = "cpu") -> IntGroups | None:
    """A GGUF tensor in groups; None for types that are not integers in groups of 32 or more.

    Types of 5 bits take 8. Q6_K has groups of 16 and goes into groups of 32 in 8 bits, rounded: that adds less than a
    tenth to the error the type has already. All others keep their values.
    """
    if raw.type not in _READERS or len(raw.shape) != 2:
        return None
    data = torch.from_numpy(raw.data).to(device)
    return _READERS[raw.type](data.reshape(-1, BLOCK[raw.type][1]), raw.shape[0])


def _rows(values: Tensor, rows: int) -> Tensor:
    return values.reshape(rows, -1)


def _q4_0(blocks: Tensor, rows: int) -> IntGroups:
    scale = _rows(half_at(blocks, 0), rows)
    return IntGroups(_rows(nibbles(blocks[:, 2:]), rows), scale, scale * -8, 4)


def _q4_1(blocks: Tensor, rows: int) -> IntGroups:
    low = _rows(half_at(blocks, 2), rows)
    return IntGroups(_rows(nibbles(blocks[:, 4:]), rows), _rows(half_at(blocks, 0), rows), low, 4)


def _q8_0(blocks: Tensor, rows: int) -> IntGroups:
    return IntGroups(_rows(blocks[:, 2:].view(torch.int8), rows), _rows(half_at(blocks, 0), rows), None, 8)


def _q4_k(blocks: Tensor, rows: int) -> IntGroups:
    scale, offset = k_scales(blocks)
    quants = nibbles(blocks[:, 16:].reshape(-1, 4, 32))
    return IntGroups(_rows(quants, rows), _rows(scale, rows), _rows(-offset, rows), 4)


def _q5_0(blocks: Tensor, rows: int) -> IntGroups:
    quants = (nibbles(blocks[:, 6:]) | fifth_bits(blocks, 2)).to(torch.int8) - 16
    return IntGroups(_rows(quants, rows), _rows(half_at(blocks, 0), rows), None, 8)


def _q5_1(blocks: Tensor, rows: int) -> IntGroups:
    quants = (nibbles(blocks[:, 8:]) | fifth_bits(blocks, 4)).to(torch.int8)
    return IntGroups(_rows(quants, rows), _rows(half_at(blocks, 0), rows), _rows(half_at(blocks, 2), rows), 8)


def _q5_k(blocks: Tensor, rows: int) -> IntGroups:
    scale, offset = k_scales(blocks)
    return IntGroups(_rows(quants_q5_k(blocks).to(torch.int8), rows), _rows(scale, rows), _rows(-offset, rows), 8)


def _q6_k(blocks: Tensor, rows: int) -> IntGroups:
    wide = dequantize(blocks, GGMLType.Q6_K, (rows, blocks.shape[0] // rows * 256)).reshape(rows, -1, 32)
    scale = wide.abs().amax(-1) / 127
    quants = (wide / scale.clamp(min=1e-30).unsqueeze(-1)).round_().clamp_(-127, 127)
    return IntGroups(quants.to(torch.int8).flatten(1), scale, None, 8)


_READERS: dict[GGMLType, Callable[[Tensor, int], IntGroups]] = {
    GGMLType.Q4_0: _q4_0,
    GGMLType.Q4_1: _q4_1,
    GGMLType.Q8_0: _q8_0,
    GGMLType.Q4_K: _q4_k,
    GGMLType.Q5_0: _q5_0,
    GGMLType.Q5_1: _q5_1,
    GGMLType.Q5_K: _q5_k,
    GGMLType.Q6_K: _q6_k,
}
