"""LoRA in plain PyTorch: any device, the definition the other kernels are tested against."""

from __future__ import annotations

import dataclasses

import numpy as np
import torch
from torch import Tensor

from penstock.engine.adapters.banks import Banks
from penstock.engine.adapters.layout import AdapterLayout, PlacedSite
from penstock.engine.adapters.peft import LoadedAdapter
from penstock.engine.adapters.tiles import Tiles, make_tiles

_BLOCK = 1 << 30
"""Tokens per tile: all that share a slot."""


class ReferenceLora:
    """See `LoraKernel`."""

    def __init__(self, layout: AdapterLayout, slots: int, device: torch.device) -> None:
        self.banks = Banks()
        self._layout = layout
        self._adapters: list[LoadedAdapter | None] = [None] * slots
        self._data: list[Tensor | None] = [None] * slots
        self._device = device
        self._slots = torch.empty(0, dtype=torch.int32)
        self._groups: list[tuple[int, Tensor]] = []

    def put(self, slot: int, adapter: LoadedAdapter) -> None:
        self.banks.put(slot, adapter)
        self._adapters[slot] = adapter
        self._data[slot] = adapter.data.to(self._device, non_blocking=True)

    def begin(self, slots: np.ndarray) -> None:
        self.banks.begin(slots)
        self._slots = torch.from_numpy(slots.astype(np.int32)).to(self._device)
        tiles: Tiles = make_tiles(slots, _BLOCK)
        self._groups = [
            (int(slot), torch.from_numpy(tiles.order[start : start + count].astype(np.int64)).to(self._device))
            for slot, start, count in zip(tiles.slots, tiles.starts, tiles.counts, strict=True)
        ]

    @property
    def token_slots(self) -> Tensor:
        return self._slots

    def add_visits(
        self, x: Tensor, y: Tensor, placed: PlacedSite, slots: Tensor, experts: Tensor, weights: Tensor | None = None
    ) -> None:
        pairs = torch.stack((slots.long(), experts.long()), 1)
        for slot, expert in torch.unique(pairs, dim=0).tolist():
            if slot < 0:
                continue
            adapter, data = self._adapters[slot], self._data[slot]
            assert adapter is not None and data is not None
            width = int(adapter.ranks[placed.index])
            rows = ((pairs[:, 0] == slot) & (pairs[:, 1] == expert)).nonzero().flatten()
            if width and len(rows):
                at = dataclasses.replace(placed, start=placed.start + expert * placed.site.each)
                delta = self._delta(x[rows], data, width, at)
                y.index_add_(0, rows, delta if weights is None else (delta * weights.view(-1, 1)[rows]).to(y.dtype))

    def begin_head(self, slots: np.ndarray) -> None:
        self.begin(slots)
        self.banks.begin_head(slots)

    def add_head(self, x: Tensor, y: Tensor, placed: PlacedSite) -> None:
        self._add(x, y, placed)
        if self.banks.vectors is not None:
            self.banks.vectors.alter_head(y, placed)

    def add_embedding(self, token_ids: Tensor, y: Tensor, placed: PlacedSite) -> None:
        site = placed.site
        for slot, tokens in self._groups:
            adapter, data = self._adapters[slot], self._data[slot]
            assert adapter is not None and data is not None
            width = int(adapter.ranks[placed.index])
            if width:
                begin, middle = width * placed.start, width * (placed.start + site.inputs)
                down = data[begin:middle].view(width, site.inputs)
                up = self._layout.up(data[middle : middle + width * site.outputs], width, site.outputs)
                added = down[:, token_ids[tokens]].t().float() @ up.float()
                y.index_add_(0, tokens, added.to(y.dtype))
        if self.banks.vectors is not None:
            self.banks.vectors.alter(y, placed)

    def add(self, x: Tensor, y: Tensor, placed: PlacedSite) -> None:
        self._add(x, y, placed)
        if self.banks.vectors is not None:
            self.banks.vectors.alter(y, placed)

    def _add(self, x: Tensor, y: Tensor, placed: PlacedSite) -> None:
        for slot, tokens in self._groups:
            adapter, data = self._adapters[slot], self._data[slot]
            assert adapter is not None and data is not None
            width = int(adapter.ranks[placed.index])
            if width:
                y.index_add_(0, tokens, self._delta(x[tokens], data, width, placed).to(y.dtype))

    def _delta(self, x: Tensor, data: Tensor, width: int, placed: PlacedSite) -> Tensor:
        site = placed.site
        parts = len(site.sizes)
        begin, middle = width * placed.start, width * (placed.start + parts * site.inputs)
        down = data[begin:middle].view(parts, width, site.inputs)
        up = self._layout.up(data[middle : middle + width * site.outputs], width, site.outputs)
        columns = torch.split(up, list(site.sizes), dim=1)
        sums = [x.float() @ down[part].t().float() @ columns[part].float() for part in range(parts)]
        return torch.cat(sums, dim=1).to(x.dtype)
