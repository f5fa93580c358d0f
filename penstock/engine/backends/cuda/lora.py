"""LoRA on CUDA: y[t] += B(A x[t]), each token with the matrices of its own adapter slot.

Launches cost more than bytes here, so there are three ways. A few tokens: no launch at all, adapters are part of
the linear's own (`inline_lora`). Other decode steps: two launches on a second stream of their graph, beside the linear;
what follows adds both results (`addends`). Prompts: the same two launches behind the linear, into its output.

The two launches go over tiles of tokens that share a slot (`adapters.tiles`): `shrink` multiplies by A, cut along the
input so that few tokens still keep the chip reading, `expand` adds up those partial sums and multiplies by B. Neither
starts early: thousands of programs that wait for the products with A would keep the linear beside them from running.
All slots lie in one buffer of fixed stride; what a slot holds, its rank included, is read in the kernel, so a captured
graph serves any adapters. A tile of no tokens, or a site that its adapter does not touch, costs an early return.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from penstock.engine.adapters.apply import TABLES
from penstock.engine.adapters.banks import Banks
from penstock.engine.adapters.layout import AdapterLayout, PlacedSite, Site
from penstock.engine.adapters.peft import LoadedAdapter
from penstock.engine.adapters.tiles import make_tiles, most_tiles
from penstock.engine.backends.cuda.kernels import expert_lora
from penstock.engine.backends.cuda.kernels.addends import Addends
from penstock.engine.backends.cuda.kernels.common import ceil_div, launch, next_power_of_2
from penstock.engine.backends.cuda.kernels.inline_lora import COPIES, TILE_ROWS, InlineLora, open_pass
from penstock.engine.backends.cuda.kernels.tiled_lora import (
    column_kernel,
    expand_kernel,
    shrink_kernel,
    tiles_kernel,
)
from penstock.engine.backends.cuda.slot_tables import NormTable, VectorTable
from penstock.engine.backends.staging import staging_for

_FEW, _MANY = 16, 64
"""Tokens per tile: in decode steps, and in steps with prompts."""
ALL_PARTS = 7
"""See `LoadedAdapter.parts`."""


@dataclass(frozen=True, slots=True)
class _Step:
    """A step's tiles on the device."""

    order: Tensor
    slots: Tensor
    starts: Tensor
    counts: Tensor
    tokens: Tensor
    """The slot of each token; -1: none."""
    tiles: int
    block: int
    captured: bool = False
    """Whether the step becomes part of a graph."""
    alters: bool = False
    """Whether adapters in that graph may change single outputs and norms."""


class TritonLora:
    """See `LoraKernel` and `GraphLora`."""

    pdl = False
    """As in `CudaLinear`."""

    def __init__(
        self,
        layout: AdapterLayout,
        slots: int,
        rank: int,
        dtype: torch.dtype,
        device: torch.device,
        *,
        fixed: bool = False,
    ) -> None:
        """`fixed`: what a token gets does not depend on the others of its step: all steps go one way, over tiles of
        one size, and sums are rounded where they are added."""
        assert layout.by_output
        self.banks = Banks()
        self._fixed = fixed
        self._layout = layout
        self._sites = len(layout.sites)
        self._count = slots
        self._rank = max(16, next_power_of_2(rank))
        self._bank = torch.zeros(slots, layout.width(rank) * layout.unit, dtype=dtype, device=device)
        self._ranks = torch.zeros(slots, self._sites, dtype=torch.int32, device=device)
        self._parts = torch.full_like(self._ranks, ALL_PARTS)
        self._side = torch.cuda.Stream(device, priority=-1) if device.type == "cuda" else None  # type: ignore[no-untyped-call]
        # Models that run through transformers may begin a pass for each sequence of a step.
        self._staging = staging_for(device, fenced=True)
        self._step: _Step | None = None
        self._tiles: tuple[Tensor, Tensor, Tensor] | None = None
        """Of the pass that has begun: the tokens of its tiles, their ranks [sites, tiles], and, if it is captured, the
        tokens' [sites, tokens]."""
        self._pass: tuple[Tensor, Tensor] | None = None
        """Of the pass that has begun, if its adapters are inside linears: room for the products with A [layers, all
        sites], no part of which is used twice, and the ranks of its tokens [sites, tokens]."""

    def put(self, slot: int, adapter: LoadedAdapter) -> None:
        self.banks.put(slot, adapter)
        self._bank[slot, : adapter.data.numel()].copy_(adapter.data, non_blocking=True)
        self._ranks[slot].copy_(adapter.ranks, non_blocking=True)
        if adapter.parts is None:
            self._parts[slot].fill_(ALL_PARTS)
        else:
            self._parts[slot].copy_(adapter.parts, non_blocking=True)

    def begin(self, slots: np.ndarray) -> None:
        self.banks.begin(slots)
        # More tokens than sequences can decode mean prompts: so there are few kinds of steps to compile.
        block = _MANY if len(slots) > 4 * _MANY and not self._fixed else _FEW
        tiles = make_tiles(slots, block)
        tables = [tiles.order, tiles.slots, tiles.starts, tiles.counts, slots.astype(np.int32)]
        order, of, starts, counts, tokens = self._staging.upload(tables)
        self._begin(_Step(order, of, starts, counts, tokens, len(tiles.slots), block))

    def tables(self, slots: np.ndarray, tokens: int) -> dict[str, np.ndarray]:
        tiles = make_tiles(slots, _FEW)
        assert len(tiles.slots) <= most_tiles(tokens, self._count, _FEW)
        values = (tiles.order, tiles.slots, tiles.starts, tiles.counts, slots.astype(np.int32))
        return dict(zip(TABLES, values, strict=True))

    def use(self, tables: dict[str, Tensor], tokens: int, *, alters: bool = False) -> None:
        self.banks.clear()
        order, slots, starts, counts, of = (tables[name] for name in TABLES)
        self._begin(_Step(order, slots, starts, counts, of, most_tiles(tokens, self._count, _FEW), _FEW, True, alters))
        if alters:
            self.look_up_all()

    def look_up_all(self) -> None:
        """Have the step that has begun change outputs and norms as if some adapter of it did."""
        for bank in (self.banks.vectors, self.banks.norms):
            if isinstance(bank, VectorTable | NormTable):
                bank.active = True

    def _begin(self, step: _Step) -> None:
        self._step = step
        for bank in (self.banks.vectors, self.banks.norms):
            if isinstance(bank, VectorTable | NormTable):
                bank.token_slots = step.tokens
        self._pass = None
        self._tiles = None

    def fits_inline(self, layout: AdapterLayout) -> bool:
        return not self._fixed and all(
            size % TILE_ROWS == 0 for site in layout.sites if not site.end for size in site.sizes
        )

    def inline(self, placed: PlacedSite) -> InlineLora:
        step, site = self._step, placed.site
        assert step is not None
        tokens = step.tokens.shape[0]
        copies = COPIES if tokens == 1 else tokens
        sizes = [0 if each.end else copies * len(each.sizes) * self._rank for each in self._layout.sites]
        if self._pass is None:
            sums = torch.empty((self._layout.layers, sum(sizes)), dtype=torch.int32, device=self._bank.device)
            ranks = torch.empty((self._sites, tokens), dtype=torch.int32, device=self._bank.device)
            open_pass(sums, ranks, step.tokens, self._ranks, pdl=self.pdl)
            self._pass = sums, ranks
        sums, ranks = self._pass
        begin = sum(sizes[: placed.index])
        return InlineLora(
            bank=self._bank,
            ranks=ranks[placed.index],
            slots=step.tokens,
            sums=sums[placed.layer, begin : begin + sizes[placed.index]],
            start=placed.start,
            rank=self._rank,
            parts=len(site.sizes),
            ends=_ends(site),
            inputs=site.inputs,
        )

    def beside(self, x: Tensor, placed: PlacedSite, base: Callable[[Tensor], Tensor]) -> Tensor | Addends:
        step = self._step
        assert step is not None
        # Launched from the host, a second stream would gain nothing; vectors scale the sum, so it must be there.
        if self._fixed or not step.captured or step.alters:
            y = base(x)
            self.add(x, y, placed)
            return y
        # Everything is allocated on the stream that joins both, and kept until then.
        sums = self._partial(x, placed)
        ranks = self._tiled(step)[2][placed.index]
        delta = torch.empty((x.shape[0], placed.site.outputs), dtype=x.dtype, device=x.device)
        if self._side is None:
            self._launch(x, sums, delta, placed, add=False)
            return Addends(base(x), delta, ranks)
        stream = torch.cuda.current_stream(self._bank.device)
        self._side.wait_stream(stream)
        with torch.cuda.stream(self._side):
            self._launch(x, sums, delta, placed, add=False)
        y = base(x)
        stream.wait_stream(self._side)
        return Addends(y, delta, ranks)

    @property
    def token_slots(self) -> Tensor:
        # Before the first step too: Python 3.11 reads it to find out which protocols a kernel follows.
        return self._ranks.new_empty(0) if self._step is None else self._step.tokens

    def add_visits(
        self, x: Tensor, y: Tensor, placed: PlacedSite, slots: Tensor, experts: Tensor, weights: Tensor | None = None
    ) -> None:
        expert_lora.add_visits(
            x,
            y,
            self._bank,
            self._ranks,
            placed,
            self._rank,
            slots.int().contiguous(),
            experts.int().contiguous(),
            weights,
            pdl=self.pdl,
        )

    def add(self, x: Tensor, y: Tensor, placed: PlacedSite) -> None:
        self._launch(x, self._partial(x, placed), y, placed, add=True)
        if self.banks.vectors is not None:
            self.banks.vectors.alter(y, placed)

    def begin_head(self, slots: np.ndarray) -> None:
        self.begin(slots)
        self.banks.begin_head(slots)

    def add_head(self, x: Tensor, y: Tensor, placed: PlacedSite) -> None:
        """In a graph all tokens have logits, so their tiles are those of the step."""
        self._launch(x, self._partial(x, placed), y, placed, add=True)
        if self.banks.vectors is not None:
            self.banks.vectors.alter_head(y, placed)

    def add_embedding(self, token_ids: Tensor, y: Tensor, placed: PlacedSite) -> None:
        step, site = self._step, placed.site
        assert step is not None
        if not step.tiles:
            return
        columns = torch.empty((1, step.tiles * step.block, self._rank), dtype=torch.float32, device=y.device)
        launch(
            column_kernel,
            (step.tiles,),
            token_ids,
            self._bank,
            *self._where(step, placed),
            columns,
            self._bank.stride(0),
            placed.start,
            K=site.inputs,
            R=self._rank,
            BLOCK_M=step.block,
            num_warps=4,
            pdl=self.pdl,
        )
        self._expand(columns, y, placed, add=True)
        if self.banks.vectors is not None:
            self.banks.vectors.alter(y, placed)

    def _partial(self, x: Tensor, placed: PlacedSite) -> Tensor:
        """Room for the partial sums of `_launch`."""
        step = self._step
        assert step is not None
        entries = step.tiles * step.block
        shape = (input_shares(placed.site.inputs), entries, len(placed.site.sizes) * self._rank)
        return torch.empty(shape, dtype=torch.float32, device=x.device)

    def _tiled(self, step: _Step) -> tuple[Tensor, Tensor, Tensor]:
        if self._tiles is None:
            count = step.tokens.shape[0] if step.captured else 0
            tokens = torch.empty(step.tiles * step.block, dtype=torch.int32, device=self._bank.device)
            ranks = torch.empty((self._sites, step.tiles), dtype=torch.int32, device=self._bank.device)
            token_ranks = torch.empty((self._sites, count), dtype=torch.int32, device=self._bank.device)
            launch(
                tiles_kernel,
                (step.tiles,),
                step.order,
                step.slots,
                step.starts,
                step.counts,
                self._ranks,
                self._parts,
                step.tokens,
                tokens,
                ranks,
                token_ranks,
                step.tiles,
                TOKENS=count,
                MOST=next_power_of_2(count),
                SITES=self._sites,
                BLOCK=step.block,
                num_warps=1,
                pdl=self.pdl,
                in_order=True,
            )
            self._tiles = tokens, ranks, token_ranks
        return self._tiles

    def _where(self, step: _Step, placed: PlacedSite) -> tuple[Tensor, Tensor, Tensor]:
        """Of each tile: slot, rank at the site, tokens."""
        tile_tokens, tile_ranks, _ = self._tiled(step)
        return step.slots, tile_ranks[placed.index], tile_tokens

    @property
    def _precision(self) -> str:
        return "ieee" if self._bank.dtype == torch.float32 else "tf32"

    def _common(self, step: _Step, site: Site, splits: int) -> dict[str, Any]:
        return {
            "K": site.inputs,
            "PARTS": len(site.sizes),
            "R": self._rank,
            "BLOCK_M": step.block,
            "SPLITS": splits,
            "PRECISION": self._precision,
        }

    def _launch(self, x: Tensor, sums: Tensor, y: Tensor, placed: PlacedSite, *, add: bool) -> None:
        step = self._step
        assert step is not None
        if step.tiles:
            self._shrink(x, sums, placed)
            self._expand(sums, y, placed, add=add)

    def _shrink(self, x: Tensor, sums: Tensor, placed: PlacedSite) -> None:
        step, site = self._step, placed.site
        assert step is not None
        splits, entries = sums.shape[:2]
        launch(
            shrink_kernel,
            (step.tiles, len(site.sizes) * splits),
            x,
            self._bank,
            *self._where(step, placed),
            sums,
            x.stride(0),
            self._bank.stride(0),
            placed.start,
            entries,
            BLOCK_K=min(128, max(16, next_power_of_2(site.inputs))),
            num_warps=4,
            num_stages=5 if step.block == _FEW else 3,
            pdl=self.pdl,
            in_order=True,
            **self._common(step, site, splits),
        )

    def _expand(self, sums: Tensor, y: Tensor, placed: PlacedSite, *, add: bool) -> None:
        step, site = self._step, placed.site
        assert step is not None
        outputs, (splits, entries) = site.outputs, sums.shape[:2]
        block_n = columns_at_once(outputs)
        end_0, end_1 = _ends(site)
        launch(
            expand_kernel,
            (step.tiles, ceil_div(outputs, block_n)),
            sums,
            self._bank,
            *self._where(step, placed),
            y,
            y.stride(0),
            self._bank.stride(0),
            placed.start,
            entries,
            N=outputs,
            END_0=end_0,
            END_1=end_1,
            ADD=add,
            BLOCK_N=block_n,
            num_warps=4,
            num_stages=2,
            pdl=self.pdl,
            in_order=True,
            **self._common(step, site, splits),
        )


def _ends(site: Site) -> tuple[int, int]:
    """Where the first and the second part of the outputs end."""
    ends = np.cumsum(site.sizes)
    return int(ends[0]), int(ends[min(1, len(ends) - 1)])


def columns_at_once(outputs: int) -> int:
    """Outputs of one program that multiplies by B."""
    return 256 if outputs > 8192 else 128


def input_shares(inputs: int) -> int:
    """Programs that share an input: more read faster, and leave more partial sums to add up."""
    return max(1, min(4, inputs // 512))
