"""LoRA on the native CPU library. A slot is a pointer to the adapter in host memory: nothing is copied."""

from __future__ import annotations

import ctypes
from ctypes import byref

import numpy as np
import torch
from torch import Tensor

from penstock.engine.adapters.banks import Banks
from penstock.engine.adapters.layout import AdapterLayout, PlacedSite, Site
from penstock.engine.adapters.peft import LoadedAdapter
from penstock.engine.adapters.tiles import Tiles, make_tiles
from penstock.engine.backends.cpu.layout import DTYPE_CODES, LayoutError, dtype_code, need_contiguous
from penstock.engine.backends.cpu.native import Handle, LoraArgs, LoraStep

LORA_FAILURES = {1: "an adapter's token is not one of the step", 2: "a token id is outside the embedding table"}
"""By what `pk_lora` returns."""
_BLOCK = 32
"""Tokens per tile: few enough that a prompt gives every core some, enough that a row of A is read from its cache."""


class CpuLora:
    """See `LoraKernel`. What differs between steps lies at one address, so the pass can be recorded."""

    def __init__(self, handle: Handle, layout: AdapterLayout, slots: int, dtype: torch.dtype = torch.float32) -> None:
        """`dtype`: of the adapters; that of the activations, or float16 where those are float32."""
        self.banks = Banks()
        self._handle = handle
        self._adapters: list[LoadedAdapter | None] = [None] * slots
        self._pointers = np.zeros(slots, np.uint64)
        self._ranks = np.zeros((slots, len(layout.sites)), np.int32)
        self._sizes = [np.array(site.sizes, np.int64) for site in layout.sites]
        self._dtype = dtype
        self._step, self._head_step = LoraStep(), LoraStep()
        self._slots = np.empty(0, np.int32)
        self._tiles: Tiles | None = None
        self._head_tiles: Tiles | None = None
        self._common = {
            "step": ctypes.addressof(self._step), "slots": self._pointers.ctypes.data,
            "ranks": self._ranks.ctypes.data, "sites": len(layout.sites),
            "matrix_dtype": DTYPE_CODES[dtype],
        }  # fmt: skip

    def put(self, slot: int, adapter: LoadedAdapter) -> None:
        self.banks.put(slot, adapter)
        self._adapters[slot] = adapter  # keeps the memory alive
        self._pointers[slot] = adapter.data.data_ptr()
        self._ranks[slot] = adapter.ranks.numpy()

    def begin(self, slots: np.ndarray) -> None:
        self.banks.begin(slots)
        self._slots = slots.astype(np.int32)
        self._tiles = tiles = make_tiles(slots, _BLOCK)
        self._fill(self._step, tiles, self._ranks)

    def begin_head(self, slots: np.ndarray) -> None:
        self.banks.begin_head(slots)
        self._head_tiles = tiles = make_tiles(slots, _BLOCK)
        self._fill(self._head_step, tiles, self._ranks)

    def _fill(self, step: LoraStep, tiles: Tiles, ranks: np.ndarray) -> None:
        step.order, step.tile_slots = tiles.order.ctypes.data, tiles.slots.ctypes.data
        step.tile_starts, step.tile_counts = tiles.starts.ctypes.data, tiles.counts.ctypes.data
        step.entries, step.tiles = len(tiles.order), len(tiles.slots)
        step.most_rank = int(ranks[tiles.slots].max(initial=0))

    @property
    def token_slots(self) -> Tensor:
        return torch.from_numpy(self._slots)

    def add(self, x: Tensor, y: Tensor, placed: PlacedSite) -> None:
        self._add(x, y, placed, self._common)
        if self.banks.vectors is not None:
            self.banks.vectors.alter(y, placed)

    def add_head(self, x: Tensor, y: Tensor, placed: PlacedSite) -> None:
        self._add(x, y, placed, {**self._common, "step": ctypes.addressof(self._head_step)})
        if self.banks.vectors is not None:
            self.banks.vectors.alter_head(y, placed)

    def add_embedding(self, token_ids: Tensor, y: Tensor, placed: PlacedSite) -> None:
        need_contiguous(token_ids, "token_ids")
        need_contiguous(y, "y")
        site = placed.site
        if token_ids.dtype is not torch.int64 or y.dtype is not torch.float32:
            raise LayoutError(f"tokens of {token_ids.dtype} and a stream of {y.dtype}")
        if y.shape != (len(token_ids), site.outputs):
            raise LayoutError(f"{len(token_ids)} tokens and y {tuple(y.shape)} do not fit {site}")
        self._call(site, placed, {**self._common, "ids": token_ids.data_ptr()}, y, dtype_code(y, "y"))
        if self.banks.vectors is not None:
            self.banks.vectors.alter(y, placed)

    def add_visits(
        self, x: Tensor, y: Tensor, placed: PlacedSite, slots: Tensor, experts: Tensor, weights: Tensor | None = None
    ) -> None:
        """Every expert of every adapter that is visited is a slot of its own."""
        assert weights is None, "experts on CPU are weighted later"
        site, of = placed.site, slots.numpy()
        keys = np.where(of >= 0, of * site.experts + experts.numpy(), -1)
        found, at = np.unique(keys[keys >= 0], return_inverse=True)
        if not len(found):
            return
        own = np.full(len(keys), -1, np.int64)
        own[keys >= 0] = at
        ranks = np.ascontiguousarray(self._ranks[found // site.experts])
        sizes = ranks[:, placed.index].astype(np.uint64) * np.uint64(site.each * self._dtype.itemsize)
        pointers = self._pointers[found // site.experts] + (found % site.experts).astype(np.uint64) * sizes
        step, tiles = LoraStep(), make_tiles(own, _BLOCK)
        self._fill(step, tiles, ranks)
        self._add(
            x,
            y,
            placed,
            {
                **self._common,
                "step": ctypes.addressof(step),
                "slots": pointers.ctypes.data,
                "ranks": ranks.ctypes.data,
            },
        )

    def _add(self, x: Tensor, y: Tensor, placed: PlacedSite, common: dict[str, int]) -> None:
        site = placed.site
        need_contiguous(x, "x")
        need_contiguous(y, "y")
        if self._dtype not in (x.dtype, torch.float16) or (x.dtype is torch.bfloat16 and self._dtype is not x.dtype):
            raise LayoutError(f"adapters of {self._dtype} do not go with activations of {x.dtype}")
        if y.dtype not in (x.dtype, torch.float32) or x.shape[1] != site.inputs or y.shape != (len(x), site.outputs):
            raise LayoutError(f"x {x.dtype} {tuple(x.shape)} and y {y.dtype} {tuple(y.shape)} do not fit {site}")
        self._call(site, placed, {**common, "x": x.data_ptr()}, y, dtype_code(x, "x"))

    def _call(self, site: Site, placed: PlacedSite, common: dict[str, int], y: Tensor, dtype: int) -> None:
        args = LoraArgs(
            y=y.data_ptr(), tokens=y.shape[0], dtype=dtype, out_dtype=dtype_code(y, "y"),
            inputs=site.inputs, outputs=site.outputs, parts=len(site.sizes), start=placed.start,
            site=placed.index, sizes=self._sizes[placed.index].ctypes.data, **common,
        )  # fmt: skip
        if code := self._handle.lib.pk_lora(self._handle.pointer, byref(args)):
            raise LayoutError(LORA_FAILURES[code])
