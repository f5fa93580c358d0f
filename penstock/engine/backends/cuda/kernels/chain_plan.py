"""How a chain of products of one token is laid out over a device: what `csrc/product_chain.cu` is built with and given.

Pure arithmetic over shapes and addresses: the same plan is launched on a device and in the emulation of the tests.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from penstock.engine.backends.cuda.kernels.chain_arguments import (
    ALIKE,
    OF_EACH,
    OF_SUM,
    PLAIN,
    LinkArguments,
    Part,
    arguments_of,
)
from penstock.engine.backends.cuda.kernels.chain_products import Product, Role, products_of
from penstock.engine.backends.cuda.kernels.mxfp4_rows import row_bytes
from penstock.engine.backends.interface import AnyLink, ClampedSwiglu, ExpertChoice

SOURCE = "product_chain.cu"
ENTRY = "product_chain"
_UNIT = 512
"""Bytes that a warp copies of a row at once."""
_ROWS = 4
"""Of a stage of the ring, a unit of each."""
_FEW_WORDS, _MOST_WORDS = 16, 64
"""Registers of a lane for its inputs: what is good, and the limit."""
_FEW, _MORE, _ORDINARY = 80, 96, 128
"""Registers of a lane that are enough: with few inputs, with more or experts, and for ordinary arithmetic."""
_SHARED = 227 << 10
"""Bytes of shared memory that a block may have."""
_FORMS = ("FP8", "FP4", "NORM", "GATED", "RESIDUAL", "BIAS", "GATES", "WIDE")


@dataclass(frozen=True, slots=True)
class ChainShape:
    """A launch: one block to a multiprocessor, and for each of its warps a ring of `stages` of 2 KiB. The next chain of
    a step begins to read while attention computes, on multiprocessors with room for both: those of an 8B model take 135
    and 73 of 228 KiB, 80 x 512 and 168 x 128 of 65,536 registers."""

    blocks: int
    warps: int = 16
    stages: int = 4
    tensor: bool = True
    """Tensor cores multiply; otherwise ordinary arithmetic in float32."""
    registers: int = 0
    """Of a thread at most; 0: few enough, without spilling."""
    fetch: int = 0
    """Bytes that the L2 cache reads at once, 128 or 256; 0: as it likes."""
    waits: bool = True
    """Without them results are wrong: to time what waiting for each other costs."""
    multiplies: bool = True
    """Without it nothing is computed: to time the copies alone."""


@dataclass(frozen=True, slots=True)
class LinkPlan:
    """One product: how many warps share a row, and how many units of it each of them has."""

    inputs: int
    outputs: int
    """Of one expert, both."""
    fp8: bool
    fp4: bool
    norm: bool
    gated: bool
    residual: bool
    bias: bool
    slices: int
    columns: int
    role: Role = Role.DENSE
    gates: bool = False
    wide: bool = False
    """Whether the gains of the norm are float32."""
    width: int = 0
    """Of a shared expert, whose inputs come behind the others."""
    visits: int = 1
    """Experts whose rows it has (EACH), or over whose inputs it sums (SUM)."""

    @property
    def row_bytes(self) -> int:
        return _row_bytes(self.inputs, self.fp8, self.fp4)

    @property
    def rows(self) -> int:
        return self.outputs * (self.visits if self.role is Role.EACH else 1)

    @property
    def parts(self) -> int:
        return (2 if self.gated else 1) + (self.role is Role.SCORES and self.gates)

    @property
    def words(self) -> int:
        """Registers of a lane for its inputs."""
        return _words(self.columns, self.fp8, self.fp4, self.norm)

    @property
    def text(self) -> str:
        """As the source has it."""
        flags = (self.fp8, self.fp4, self.norm, self.gated, self.residual, self.bias, self.gates, self.wide)
        names = [name for name, on in zip(_FORMS, flags, strict=True) if on]
        form = "|".join(names if self.role is Role.DENSE else [*names, self.role.value]) or "0"
        return f"Link<{self.inputs},{self.outputs},{self.slices},{form}{f',{self.width}' if self.width else ''}>"


@dataclass(frozen=True, slots=True)
class ChainPlan:
    """A chain in one launch."""

    shape: ChainShape
    links: tuple[LinkPlan, ...]
    experts: int = 1
    choice: ExpertChoice | None = None
    clamped: ClampedSwiglu | None = None

    @property
    def shared_bytes(self) -> int:
        shape = self.shape
        sums = max(link.slices * link.parts * -(-link.rows // shape.blocks) for link in self.links)
        floats = shape.warps + 2 * self._top_k + 1 + self._scales + sums
        return shape.warps * shape.stages * _ROWS * _UNIT + 4 * floats

    @property
    def _top_k(self) -> int:
        return 1 if self.choice is None else self.choice.top_k

    @property
    def _scales(self) -> int:
        """Floats for those of a sum over experts."""
        sums = [link for link in self.links if link.role is Role.SUM and (link.fp8 or link.fp4)]
        return sum((link.visits + (link.width > 0)) * -(-link.outputs // self.shape.blocks) for link in sums)

    @property
    def defines(self) -> dict[str, int | float | str]:
        shape, choice = self.shape, self.choice
        found: dict[str, int | float | str] = {
            "CHAIN": ",".join(link.text for link in self.links),
            "BLOCKS": shape.blocks,
            "WARPS": shape.warps,
            "STAGES": shape.stages,
            "TENSOR": int(shape.tensor),
            "PENSTOCK_FETCH": shape.fetch,
            "WAITS": int(shape.waits),
            "MULTIPLIES": int(shape.multiplies),
        }
        if choice is not None:
            found |= {
                "EXPERTS": self.experts,
                "TOP_K": choice.top_k,
                "SIGMOID": int(choice.sigmoid),
                "NORMALIZE": int(choice.normalize),
                "CORRECTED": int(choice.correction is not None),
                "GROUPS": choice.groups,
                "TOP_GROUPS": choice.top_groups,
                "BEST_TWO": int(choice.best_two),
                "FACTOR": f"{float(choice.scale)!r}f",
                "SCALES": self._scales,
            }
        if self.clamped is not None:
            found |= {"ALPHA": f"{float(self.clamped.alpha)!r}f", "LIMIT": f"{float(self.clamped.limit)!r}f"}
        return found

    @property
    def options(self) -> tuple[str, ...]:
        """Of the compiler."""
        few = self.choice is None and max(link.words for link in self.links) <= _FEW_WORDS
        enough = _ORDINARY if not self.shape.tensor else _FEW if few else _MORE
        return (f"--maxrregcount={self.shape.registers or enough}",)

    def outs(self, make: Callable[[int, torch.dtype], Tensor], dtype: torch.dtype) -> list[Tensor | None]:
        """What each link writes, none of those that add to the residual stream. What visited experts and the shared one
        give is in one tensor, in the order in which the next link reads it."""
        found: list[Tensor | None] = []
        inner = sum(link.rows for link in self.links if link.role in (Role.EACH, Role.SHARED))
        together = make(inner, dtype) if inner else None
        for link in self.links:
            if link.residual:
                found.append(None)
            elif link.role in (Role.EACH, Role.SHARED):
                assert together is not None
                found.append(together[inner - link.outputs :] if link.role is Role.SHARED else together[: link.rows])
            else:
                found.append(make(link.rows, torch.float32 if link.role is Role.SCORES else dtype))
        return found

    def arguments(
        self, links: Sequence[AnyLink], x: Tensor, residual: Tensor, outs: Sequence[Tensor | None], counter: Tensor
    ) -> ctypes.Structure:
        """What the kernel is given, by value. `outs`: see there."""
        products = products_of(links)
        assert products is not None
        kind = arguments_of(len(self.links), sum(link.parts for link in self.links))
        correction = None if self.choice is None else self.choice.correction
        found = kind(x.data_ptr(), residual.data_ptr(), counter.data_ptr(), _at(correction))
        place = 0
        for index, (one, plan, out) in enumerate(zip(products, self.links, outs, strict=True)):
            pointers = (_at(tensor) for tensor in (one.scale, one.shared_scale, one.bias, one.norm, out))
            found.links[index] = LinkArguments(*pointers, one.eps, 0)
            for part in _parts(one, plan):
                found.parts[place] = part
                place += 1
        return found


def plan_chain(links: Sequence[AnyLink], shape: ChainShape) -> ChainPlan | None:
    """None where the kernel has no form for one of the links, or no room."""
    products = products_of(links)
    if products is None:
        return None
    plans = tuple(_plan(product, shape) for product in products)
    if any(plan is None for plan in plans):
        return None
    choice = next((product.choice for product in products if product.choice is not None), None)
    experts = next((len(product.weight) for product in products if product.role is Role.SCORES), 1)
    clamped = next((product.clamped for product in products if product.clamped is not None), None)
    found = ChainPlan(shape, tuple(plan for plan in plans if plan is not None), experts, choice, clamped)
    return found if found.shared_bytes <= _SHARED else None


def _plan(product: Product, shape: ChainShape) -> LinkPlan | None:
    """With few registers for inputs if that is possible; then as few stages for each warp as can be."""
    fp8, fp4, role = product.fp8, product.fp4, product.role
    if fp4 and not shape.tensor:
        return None
    visits = product.choice.top_k if product.choice is not None and role in (Role.EACH, Role.SUM) else 1
    if role is Role.EACH and product.outputs < _ROWS * shape.warps:
        return None  # a stage has rows of two visits at most
    units = _units(_row_bytes(product.inputs, fp8, fp4))
    if role is Role.SUM:
        units = visits * units + _units(_row_bytes(product.width, fp8, fp4))
    rows = -(-product.outputs * (visits if role is Role.EACH else 1) // shape.blocks)
    norm = product.norm is not None
    best: tuple[int, int, int, int] | None = None
    for slices in (1 << bit for bit in range(shape.warps.bit_length())):
        columns = -(-units // slices)
        words = _words(columns, fp8, fp4, norm)
        if shape.warps % slices or words > _MOST_WORDS:
            continue
        stages = -(-rows // (_ROWS * (shape.warps // slices))) * columns
        taken = (max(words, _FEW_WORDS) - 1).bit_length()
        best = min(best or (32, 0, 0, 0), (taken, stages, columns, slices))
    if best is None:
        return None
    return LinkPlan(
        product.inputs,
        product.outputs,
        fp8,
        fp4,
        norm,
        product.gated,
        product.residual,
        product.bias is not None,
        slices=best[3],
        columns=best[2],
        role=role,
        gates=product.gate is not None,
        wide=product.norm is not None and product.norm.dtype == torch.float32,
        width=product.width,
        visits=visits,
    )


def _parts(product: Product, plan: LinkPlan) -> Iterator[Part]:
    """The rows of a link in the order in which they are read."""
    bits, weight, size = plan.slices.bit_length() - 1, product.weight, plan.row_bytes
    rows = (plan.rows, size, plan.columns, bits)
    if plan.role is Role.SUM:
        span = _units(size)
        reciprocal, visited = -(-(1 << 16) // span), plan.visits * span
        assert all(unit * reciprocal >> 16 == unit // span for unit in range(visited))
        wide = _row_bytes(plan.width, plan.fp8, plan.fp4)
        step = plan.outputs * size
        yield Part(_at(weight), _at(product.shared), step, *rows, OF_SUM, span, reciprocal, visited, wide, 0)
        return
    step = plan.outputs * size
    for half in range(2 if plan.gated else 1):
        at = weight.data_ptr() + half * step
        if plan.role is Role.EACH:
            yield Part(at, None, 2 * step, *rows, OF_EACH, plan.outputs, 0, 0, 0, 0)
        else:
            yield Part(at, None, 0, *rows, PLAIN, 0, 0, 0, 0, 0)
    if plan.role is Role.SCORES and product.gate is not None:
        yield Part(_at(product.gate), None, 0, 1, size, plan.columns, bits, ALIKE, 0, 0, 0, 0, 0)


def _units(row_bytes: int) -> int:
    return -(-row_bytes // _UNIT)


def _row_bytes(inputs: int, fp8: bool, fp4: bool) -> int:
    return row_bytes(inputs) if fp4 else inputs * (1 if fp8 else 2)


def _words(columns: int, fp8: bool, fp4: bool, norm: bool) -> int:
    """In bfloat16 those with gains are two numbers each."""
    return columns * (16 if fp4 else 8 if fp8 or norm else 4)


def _at(tensor: Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()
