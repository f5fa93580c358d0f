"""Experts that move between ranks while the engine runs, so that every device has as much to do as the others.

Each layer counts the visits of its experts (`ExpertSlots.loads`). Now and then rank 0 gathers the counts and works out
a better placement (`placement`). A layer then moves in two calls: every rank reads the experts that come to it, in the
background; when all have, they put them in place between the same two steps. An expert computes the same wherever it
is, so nothing of the output changes.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import numpy as np
import torch

from penstock.engine.models.decoder import Decoder
from penstock.engine.models.layers.experts import Experts, ExpertSlots
from penstock.engine.models.model_config import ModelConfig
from penstock.engine.models.moe_config import LayerTable
from penstock.engine.parallel.launch import Ranks
from penstock.engine.parallel.layout import Place, place_experts, stage_span
from penstock.engine.parallel.placement import imbalance, keep_in_place, moves, place
from penstock.engine.request import EngineLoad

log = logging.getLogger(__name__)

_UNEVEN = 1.1
"""Layers that are more even than this stay as they are."""
_GAIN = 0.95
"""A placement is worth moving for when it is at most this much as uneven."""
_VISITS = 64
"""Fewer visits per expert say little about the next ones."""
_KEPT = 0.5
"""How much of what was counted before still counts."""


class HeldExperts:
    """The experts of one rank, by layer of the whole model."""

    def __init__(self, decoder: Decoder, model: ModelConfig, place: Place) -> None:
        first = stage_span(model, place)[0]
        self.shard = place.shard
        self.layers: dict[int, Experts] = {}
        for index, layer in enumerate(decoder.layers):
            found: Any = layer.feed_forward
            while hasattr(found, "feed_forward"):  # behind the sum over shards
                found = found.feed_forward
            if isinstance(getattr(found, "slots", None), ExpertSlots):
                self.layers[first + index] = found
        self._reader: ThreadPoolExecutor | None = None

    @property
    def handlers(self) -> dict[str, Callable[..., Any]]:
        """What rank 0 may call."""
        return {"expert loads": self.loads, "read experts": self.read, "move experts": self.move}

    def loads(self) -> list[tuple[int, np.ndarray]]:
        """Visits of every expert since the start, by layer."""
        return [(index, self._slots(index).loads.cpu().numpy().copy()) for index in self.layers]

    def read(self, layer: int, table: LayerTable) -> Future[None] | None:
        """Bring what `move` will need into memory, in the background."""
        coming = self._coming(layer, table)
        if not coming:
            return None
        if self._reader is None:
            self._reader = ThreadPoolExecutor(1, "experts")
        touch = self.layers[layer].source.touch

        def read() -> None:
            for _, expert in coming:
                touch(expert)

        return self._reader.submit(read)

    @torch.inference_mode()
    def move(self, layer: int, table: LayerTable) -> int:
        """Hold the experts of `table` from the next step on; how many are new here."""
        coming = self._coming(layer, table)
        for slot, expert in coming:
            self.layers[layer].replace(slot, self.layers[layer].source.make(expert))
        if layer in self.layers:
            self._slots(layer).put(_frozen(table))
        return len(coming)

    def table(self, layer: int) -> LayerTable:
        return self._slots(layer).table

    def _coming(self, layer: int, table: LayerTable) -> list[tuple[int, int]]:
        return moves(self.table(layer), table, self.shard) if layer in self.layers else []

    def _slots(self, layer: int) -> ExpertSlots:
        slots = self.layers[layer].slots
        assert slots is not None
        return slots


def make_balancer(decoder: Decoder, model: ModelConfig, ranks: Ranks, copies: int, period_s: float) -> ExpertBalancer:
    """For an engine whose experts are spread over `ranks`, as `layout.place_experts` places them at the start."""
    moe = place_experts(model, ranks.place.tensor, copies).moe
    assert moe is not None
    tables = {index: table for index, table in enumerate(moe.placement) if moe.layers[index]}
    balancer = ExpertBalancer(HeldExperts(decoder, model, ranks.place), ranks, tables, period_s)
    ranks.after_restart.append(balancer.start_over)
    return balancer


def _frozen(table: Sequence[Sequence[int]]) -> LayerTable:
    return tuple(tuple(map(int, held)) for held in table)


class ExpertBalancer:
    """Rank 0's side; see the top of the file. `tick` never waits."""

    def __init__(self, held: HeldExperts, ranks: Ranks, tables: dict[int, LayerTable], period_s: float) -> None:
        """`tables`: the placement that all ranks began with, of every layer with experts."""
        self.period_s = period_s
        self.moved = 0
        self._held = held
        self._ranks = ranks
        self._tables = tables
        self._first = dict(tables)
        self._counted: dict[int, np.ndarray] = {}
        """What each layer had counted at the last look."""
        self._recent: dict[int, np.ndarray] = {}
        self._imbalance = 1.0
        self._next: float | None = None
        self._waiting: list[Future[Any]] = []
        self._then: Callable[[], None] | None = None
        """What to do once those have answered."""
        self._plan: list[tuple[int, LayerTable]] = []

    def tick(self, now: float) -> None:
        if self._then is not None:
            if all(future.done() for future in self._waiting):
                then, self._then = self._then, None
                then()
        elif self._plan:
            self._read(*self._plan.pop(0))
        elif self._next is None:
            self._next = now + self.period_s
        elif self.period_s and now >= self._next:
            self._next = now + self.period_s
            self._waiting = self._ranks.call("expert loads")
            self._then = self._look

    def start_over(self) -> None:
        """A rank was lost and is there again: it holds the experts of the beginning."""
        self._waiting, self._then, self._plan = [], None, []
        self._counted.clear()
        for layer, table in self._tables.items():
            if table != self._first[layer]:
                self._ranks.call("move experts", layer, table)

    def report(self, load: EngineLoad) -> None:
        load.expert_imbalance = round(self._imbalance, 3)
        load.moved_experts = self.moved

    def _look(self) -> None:
        """Compare what was counted with what each shard holds, and plan the moves that pay."""
        fresh = self._fresh()
        if min((counts.sum() for counts in fresh.values()), default=0) < _VISITS * len(next(iter(fresh.values()))):
            return  # counted on at the next look
        gains: list[tuple[float, int, LayerTable]] = []
        worst = 1.0
        for layer, counts in fresh.items():
            self._counted[layer] = self._counted.get(layer, 0) + counts
            self._recent[layer] = recent = _KEPT * self._recent.get(layer, 0) + counts
            table, loads = self._tables[layer], recent.tolist()
            uneven = imbalance(table, loads)
            worst = max(worst, uneven)
            if uneven > _UNEVEN:
                better = keep_in_place(table, place(loads, len(table), len(table[0])))
                evened = imbalance(better, loads)
                if evened <= uneven * _GAIN:
                    gains.append((uneven / evened, layer, better))
        self._imbalance = worst
        self._plan = [(layer, table) for _, layer, table in sorted(gains, reverse=True)]

    def _fresh(self) -> dict[int, np.ndarray]:
        """Visits since the last look, by layer. Where shards of a stage route the same tokens, those of the first
        count."""
        place = self._ranks.place
        totals: dict[int, np.ndarray] = {}
        for rank, counted in enumerate([self._held.loads(), *(other.result() for other in self._waiting)]):
            if place.data or rank % place.tensor == 0:
                for layer, counts in counted:
                    totals[layer] = totals.get(layer, 0) + counts
        return {layer: counts - self._counted.get(layer, 0) for layer, counts in sorted(totals.items())}

    def _read(self, layer: int, table: LayerTable) -> None:
        self._waiting = self._ranks.call("read experts", layer, table)
        mine = self._held.read(layer, table)
        if mine is not None:
            self._waiting.append(mine)
        self._then = lambda: self._move(layer, table)

    def _move(self, layer: int, table: LayerTable) -> None:
        for future in self._waiting:
            future.result()  # a rank that could not read is lost, and so are we
        answers = self._ranks.call("move experts", layer, table)
        self.moved += self._held.move(layer, table)
        self._tables[layer] = table
        self._waiting, self._then = answers, lambda: self._moved(layer)

    def _moved(self, layer: int) -> None:
        count = sum(future.result() for future in self._waiting)
        self.moved += count
        log.info("layer %d: %d experts came to other devices", layer, count)
