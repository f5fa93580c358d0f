"""How a chain of products of one token is laid out over a device: what `csrc/product_chain.cu` is built with and given.

Pure arithmetic over shapes and addresses: the same plan is launched on a device and in the emulation of the tests.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from ctypes import c_float, c_int32, c_void_p
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

from penstock.engine.backends.interface import FP8, Link

SOURCE = "product_chain.cu"
ENTRY = "product_chain"
_UNIT = 512
"""Bytes that a warp copies of a row at once."""
_ROWS = 4
"""Of a stage of the ring, a unit of each."""
_FEW_COLUMNS, _MOST_COLUMNS = 2, 8
"""Units of a row for which a lane has inputs in registers, eight for each: what is good, and the limit."""
_FEW, _MORE = 80, 96
"""Registers of a lane that are enough without spilling: with few inputs, and with more."""
_SHARED = 227 << 10
"""Bytes of shared memory that a block may have."""
_FORMS = ("NORM", "GATED", "RESIDUAL", "BIAS")


@dataclass(frozen=True, slots=True)
class ChainShape:
    """A launch: one block to a multiprocessor, and for each of its warps a ring of `stages` of 2 KiB. The next chain of
    a step begins to read while attention computes, on multiprocessors with room for both: those of an 8B model take 135
    and 73 of 228 KiB, 80 x 512 and 168 x 128 of 65,536 registers."""

    blocks: int
    warps: int = 16
    stages: int = 4
    waits: bool = True
    """Without them results are wrong: to time what waiting for each other costs."""
    multiplies: bool = True
    """Without it nothing is computed: to time the copies alone."""


@dataclass(frozen=True, slots=True)
class LinkPlan:
    """One product: how many warps share a row, and how many units of it each of them has."""

    inputs: int
    outputs: int
    norm: bool
    gated: bool
    residual: bool
    bias: bool
    slices: int
    columns: int

    @property
    def parts(self) -> int:
        return 2 if self.gated else 1

    @property
    def text(self) -> str:
        """As the source has it."""
        flags = (self.norm, self.gated, self.residual, self.bias)
        form = "|".join(name for name, on in zip(_FORMS, flags, strict=True) if on) or "0"
        return f"Link<{self.inputs},{self.outputs},{self.slices},{form}>"


@dataclass(frozen=True, slots=True)
class ChainPlan:
    """A chain in one launch."""

    shape: ChainShape
    links: tuple[LinkPlan, ...]

    @property
    def shared_bytes(self) -> int:
        shape = self.shape
        sums = max(link.slices * link.parts * -(-link.outputs // shape.blocks) for link in self.links)
        return shape.warps * shape.stages * _ROWS * _UNIT + 4 * (shape.warps + sums)

    @property
    def defines(self) -> dict[str, int | float | str]:
        shape = self.shape
        return {
            "CHAIN": ",".join(link.text for link in self.links),
            "BLOCKS": shape.blocks,
            "WARPS": shape.warps,
            "STAGES": shape.stages,
            "WAITS": int(shape.waits),
            "MULTIPLIES": int(shape.multiplies),
        }

    @property
    def options(self) -> tuple[str, ...]:
        """Of the compiler."""
        few = max(link.columns for link in self.links) <= _FEW_COLUMNS
        return (f"--maxrregcount={_FEW if few else _MORE}",)

    def arguments(
        self, links: Sequence[Link], x: Tensor, residual: Tensor, outs: Sequence[Tensor | None], counter: Tensor
    ) -> ctypes.Structure:
        """What the kernel is given, by value. `outs`: of each link that adds nothing to the residual stream."""
        kind = _arguments(len(self.links), sum(link.parts for link in self.links))
        found = kind(x.data_ptr(), residual.data_ptr(), counter.data_ptr())
        place = 0
        for index, (link, plan, out) in enumerate(zip(links, self.links, outs, strict=True)):
            found.links[index] = _Link(_at(link.scale), _at(link.bias), _at(link.norm), _at(out), link.eps, 0)
            for part in range(plan.parts):
                at = link.weight.data_ptr() + part * plan.outputs * plan.inputs
                bits = plan.slices.bit_length() - 1
                found.parts[place] = _Part(at, plan.outputs, plan.inputs, plan.columns, bits)
                place += 1
        return found


def plan_chain(links: Sequence[Link], shape: ChainShape) -> ChainPlan | None:
    """None where the kernel has no form for one of the links, or no room."""
    if not links or not all(_fits(link) for link in links) or not _follow(links):
        return None
    plans = tuple(_plan(link, shape) for link in links)
    if any(plan is None for plan in plans):
        return None
    found = ChainPlan(shape, tuple(plan for plan in plans if plan is not None))
    return found if found.shared_bytes <= _SHARED else None


def _fits(link: Link) -> bool:
    """Weights in e4m3 with a float32 scale for every row, bfloat16 besides; rows of whole pieces of 16 bytes, and
    vectors as long as the kernel reads them."""
    weight, scale = link.weight, link.scale
    if weight.dtype != FP8 or scale is None or scale.dtype != torch.float32 or link.inputs % 16:
        return False
    of_rows = [tensor for tensor in (scale, link.bias) if tensor is not None]
    others = [tensor for tensor in (link.bias, link.norm) if tensor is not None]
    return (
        all(one.dtype == torch.bfloat16 for one in others)
        and all(one.numel() == len(weight) for one in of_rows)
        and (link.norm is None or link.norm.numel() == link.inputs)
        and all(one.is_contiguous() for one in (weight, *of_rows, *others))
        and all(one.data_ptr() % 16 == 0 for one in (weight, *others))
    )


def _follow(links: Sequence[Link]) -> bool:
    """Whether each reads what there is: the residual stream, or as many numbers as the link before it wrote."""
    width = next((link.inputs for link in links if link.norm is not None), None)
    for index, link in enumerate(links):
        before = links[index - 1] if index else None
        if link.norm is None and before is not None and (before.residual or before.outputs != link.inputs):
            return False
        streams = [link.inputs] * (link.norm is not None) + [link.outputs] * link.residual
        if width is not None and any(stream != width for stream in streams):
            return False
    return True


def _plan(link: Link, shape: ChainShape) -> LinkPlan | None:
    """With few registers for inputs if that is possible; then as few stages for each warp as can be."""
    units, rows = -(-link.inputs // _UNIT), -(-link.outputs // shape.blocks)
    best: tuple[int, int, int, int] | None = None
    for slices in (1 << bit for bit in range(shape.warps.bit_length())):
        columns = -(-units // slices)
        if shape.warps % slices or columns > _MOST_COLUMNS:
            continue
        stages = -(-rows // (_ROWS * (shape.warps // slices))) * columns
        taken = (max(columns, _FEW_COLUMNS) - 1).bit_length()
        best = min(best or (32, 0, 0, 0), (taken, stages, columns, slices))
    if best is None:
        return None
    return LinkPlan(
        link.inputs,
        link.outputs,
        link.norm is not None,
        link.gated,
        link.residual,
        link.bias is not None,
        slices=best[3],
        columns=best[2],
    )


class _Link(ctypes.Structure):
    _fields_ = (
        ("scale", c_void_p),
        ("bias", c_void_p),
        ("norm", c_void_p),
        ("out", c_void_p),
        ("eps", c_float),
        ("unused", c_int32),
    )


class _Part(ctypes.Structure):
    _fields_ = (
        ("weight", c_void_p),
        ("outputs", c_int32),
        ("inputs", c_int32),
        ("columns", c_int32),
        ("slices", c_int32),
    )


@cache
def _arguments(links: int, parts: int) -> type[ctypes.Structure]:
    class Arguments(ctypes.Structure):
        _fields_ = (
            ("x", c_void_p),
            ("residual", c_void_p),
            ("counter", c_void_p),
            ("links", _Link * links),
            ("parts", _Part * parts),
        )

    return Arguments


def _at(tensor: Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()
