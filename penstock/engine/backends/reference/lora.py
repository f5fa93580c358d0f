"""LoRA in plain PyTorch: any device, the definition the other kernels are tested against."""

from __future__ import annotations

import dataclasses

import numpy as np
import torch
from torch import Tensor

from penstock.engine.adapters.adaption_prompts import AdaptionBank
from penstock.engine.adapters.head_norms import HeadNormBank
from penstock.engine.adapters.inputs import InputBank
from penstock.engine.adapters.layout import AdapterLayout, PlacedSite
from penstock.engine.adapters.norms import Norms
from penstock.engine.adapters.peft import LoadedAdapter
from penstock.engine.adapters.prefixes import PrefixBank
from penstock.engine.adapters.rows import RowBank
from penstock.engine.adapters.tiles import Tiles, make_tiles
from penstock.engine.adapters.vectors import Vectors
from penstock.engine.adapters.visits import VisitBank

_BLOCK = 1 << 30
"""Tokens per tile: all that share a slot."""


class ReferenceLora:
    """See `LoraKernel`."""

    def __init__(self, layout: AdapterLayout, slots: int, device: torch.device) -> None:
        self.rows: RowBank | None = None
        self.vectors: Vectors | None = None
        self.norms: Norms | None = None
        self.head_norms: HeadNormBank | None = None
        self.inputs: InputBank | None = None
        self.prefixes: PrefixBank | None = None
        self.adaption: AdaptionBank | None = None
        self.visits: VisitBank | None = None
        self._layout = layout
        self._adapters: list[LoadedAdapter | None] = [None] * slots
        self._data: list[Tensor | None] = [None] * slots
        self._device = device
        self._slots = torch.empty(0, dtype=torch.int32)
        self._groups: list[tuple[int, Tensor]] = []

    def put(self, slot: int, adapter: LoadedAdapter) -> None:
        if self.rows is not None:
            self.rows.put(slot, adapter.rows)
        if self.vectors is not None:
            self.vectors.put(slot, adapter.vectors)
        if self.norms is not None:
            self.norms.put(slot, adapter.norms)
        if self.head_norms is not None:
            self.head_norms.put(slot, adapter.head_norms)
        if self.inputs is not None:
            self.inputs.put(slot, adapter.inputs)
        if self.prefixes is not None:
            self.prefixes.put(slot, adapter.prefix)
        if self.adaption is not None:
            self.adaption.put(slot, adapter.adaption)
        if self.visits is not None:
            self.visits.put(slot, adapter.visits)
        self._adapters[slot] = adapter
        self._data[slot] = adapter.data.to(self._device, non_blocking=True)

    def begin(self, slots: np.ndarray) -> None:
        if self.rows is not None:
            self.rows.begin(slots)
        if self.vectors is not None:
            self.vectors.begin(slots)
        if self.norms is not None:
            self.norms.begin(slots)
        if self.head_norms is not None:
            self.head_norms.begin(slots)
        if self.inputs is not None:
            self.inputs.begin(slots)
        if self.prefixes is not None:
            self.prefixes.begin(slots)
        if self.adaption is not None:
            self.adaption.begin(slots)
        if self.visits is not None:
            self.visits.begin()
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
        if self.rows is not None:
            self.rows.begin_head(slots)  # behind `begin`, which forgets the rows of logits of the step before
        if self.vectors is not None:
            self.vectors.begin_head(slots)

    def add_head(self, x: Tensor, y: Tensor, placed: PlacedSite) -> None:
        self._add(x, y, placed)
        if self.vectors is not None:
            self.vectors.alter_head(y, placed)

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
        if self.vectors is not None:
            self.vectors.alter(y, placed)

    def add(self, x: Tensor, y: Tensor, placed: PlacedSite) -> None:
        self._add(x, y, placed)
        if self.vectors is not None:
            self.vectors.alter(y, placed)

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
