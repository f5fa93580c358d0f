"""Attention to a window and to entries, in plain PyTorch: what every backend runs. See `CompressionOps`.

Queries of a prompt are computed some at a time, so that memory does not grow with the context.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from penstock.engine.backends.interface import (
    AttentionBatch,
    CompressionCache,
    CompressionLayout,
    Entries,
    EntryIndex,
    PoolInputs,
    PoolState,
)
from penstock.engine.backends.reference.indexer import best_of
from penstock.engine.backends.reference.latent import gather, store
from penstock.engine.backends.reference.paged_window import PlainPagedWindow, Seen, attend, queries_of
from penstock.engine.backends.reference.pooling import entry_slots, finished, pool_run, pool_singles, rotate_last
from penstock.engine.backends.reference.segments import Segment, Singles, waves_of

_BYTES = 64 << 20
"""Of what is made at a time for queries, at most."""


class PlainCompression(PlainPagedWindow):
    """See `CompressionOps`."""

    batch_invariant: bool

    def compressed_attention(
        self,
        q: Tensor,
        keys: Tensor,
        layout: CompressionLayout,
        sinks: Tensor,
        cos_sin: Tensor,
        batch: AttentionBatch,
        cache: CompressionCache,
        pool: PoolInputs | None,
        index: EntryIndex | None,
    ) -> Tensor:
        table = cos_sin[batch.positions]
        queries = queries_of(q, layout, table)
        if index is not None:
            turned = rotate_last(index.queries.view(len(q), index.heads, -1), table.unsqueeze(1))
            index = index._replace(queries=turned)
        layer = _Layer(queries, rotate_last(keys, table), layout, sinks, cos_sin, cache, pool, index)
        out = torch.empty_like(queries)
        # In deterministic mode every token by itself, so that nothing depends on how steps are cut.
        for wave in waves_of(batch, alone=self.batch_invariant):
            if wave.singles is not None:
                for some in wave.singles.split(layer.at_once(wave.singles.longest)):
                    out[some.at] = layer.singles(some)
            for run in wave.runs:
                out[run.begin : run.end] = layer.run(run, batch.block_tables[run.row])
        return rotate_last(out, table.unsqueeze(1), back=True).to(q.dtype).flatten(1)


class _Layer:
    """One layer of a step."""

    def __init__(
        self,
        queries: Tensor,
        keys: Tensor,
        layout: CompressionLayout,
        sinks: Tensor,
        cos_sin: Tensor,
        cache: CompressionCache,
        pool: PoolInputs | None,
        index: EntryIndex | None,
    ) -> None:
        self.queries, self.keys, self.layout, self.sinks, self.cos_sin = queries, keys, layout, sinks, cos_sin
        self.cache, self.index = cache, index
        self.pools: list[tuple[PoolInputs, PoolState, Entries]] = []
        """What makes entries, and what makes those of the indexer."""
        for inputs, state, entries in (
            (pool, cache.pool, cache.entries),
            (None if index is None else index.pool, cache.index_pool, cache.index_keys),
        ):
            if inputs is not None and state is not None and entries is not None:
                self.pools.append((inputs, state, entries))

    def at_once(self, context: int) -> int:
        """Queries for which keys of their own are made at a time."""
        layout, index = self.layout, self.index
        numbers, entries = layout.window * layout.head_dim, context // layout.rate if layout.rate else 0
        if index is not None:
            numbers += entries * (index.heads + index.queries.shape[-1])
            entries = min(entries, index.most)
        return max(1, _BYTES // (4 * (numbers + entries * layout.head_dim)))

    def singles(self, new: Singles) -> Tensor:
        layout, window = self.layout, self.cache.window
        places = new.positions % layout.window
        kept = window[new.reads]
        kept[torch.arange(len(places), device=places.device), places] = self.keys[new.at].to(kept.dtype)
        window[new.writes] = kept
        there = torch.arange(layout.window, device=places.device) <= new.positions.unsqueeze(1)
        seen = [(kept.masked_fill(~there.unsqueeze(-1), 0), there)]
        for inputs, state, entries in self.pools:
            own = inputs._replace(values=inputs.values[new.at], gates=inputs.gates[new.at])
            before = None if state.before is None else state.before[new.reads]
            made, running, before = pool_singles(own, new.positions, state.running[new.reads], before)
            state.running[new.writes] = running
            if state.before is not None and before is not None:
                state.before[new.writes] = before
            done = new.completing(layout.rate)
            which = new.positions[done].unsqueeze(1) // layout.rate
            self._store(made[done], which, new.tables[done], inputs, entries)
        count = new.longest // layout.rate if layout.rate else 0
        if count:
            complete = (new.positions + 1) // layout.rate
            seen.append(self._entries(count, complete, new.tables, self._part(new.at)))
        return self._attend(self.queries[new.at], seen)

    def run(self, run: Segment, table: Tensor) -> Tensor:
        layout, tokens, device = self.layout, slice(run.begin, run.end), self.keys.device
        window, count = self.cache.window, run.end - run.begin
        before = torch.arange(run.start - layout.window, run.start, device=device)
        older = window[run.read][before % layout.window].masked_fill((before < 0).unsqueeze(1), 0)
        keys = torch.cat((older, self.keys[tokens].to(window.dtype)))
        positions = torch.arange(run.start - layout.window, run.start + count, device=device)
        kept = slice(len(keys) - layout.window, len(keys))
        window[run.write, positions[kept] % layout.window] = keys[kept]
        for inputs, state, entries in self.pools:
            own = inputs._replace(values=inputs.values[tokens], gates=inputs.gates[tokens])
            group = None if state.before is None else state.before[run.read]
            made, running, group = pool_run(own, run.start, state.running[run.read], group)
            state.running[run.write] = running
            if state.before is not None and group is not None:
                state.before[run.write] = group
            first = run.start // layout.rate
            which = torch.arange(first, first + len(made), device=device)
            self._store(made, which, table, inputs, entries)
        total = (run.start + count) // layout.rate if layout.rate else 0
        out = torch.empty_like(self.queries[tokens])
        step = min(self.at_once(run.start + count), 4 * layout.window)
        for begin in range(0, count, step):
            end = min(count, begin + step)
            at = positions[layout.window + begin : layout.window + end].unsqueeze(1)
            near = slice(begin + 1, end + layout.window)
            to = positions[near]
            seen = [(keys[near], (to >= 0) & (to <= at) & (to > at - layout.window))]
            if total:
                part = self._part(slice(run.begin + begin, run.begin + end))
                seen.append(self._entries(total, (at.squeeze(1) + 1) // layout.rate, table, part))
            out[begin:end] = self._attend(self.queries[run.begin + begin : run.begin + end], seen)
        return out

    def _store(self, made: Tensor, which: Tensor, tables: Tensor, inputs: PoolInputs, entries: Entries) -> None:
        """Keep the entries `which`, one of each table, or those of one."""
        layout = self.layout
        if not len(made):
            return
        assert inputs.norm is not None
        rows = finished(made, which.flatten() * layout.rate, inputs.norm, layout.eps, self.cos_sin)
        slots = entry_slots(tables, which, layout.rate, entries).flatten()
        store(rows, entries.rows, entries.scales, slots)

    def _part(self, tokens: Tensor | slice) -> tuple[Tensor, Tensor] | None:
        """Queries and weights of the indexer."""
        return None if self.index is None else (self.index.queries[tokens], self.index.weights[tokens])

    def _entries(self, count: int, complete: Tensor, tables: Tensor, chooses: tuple[Tensor, Tensor] | None) -> Seen:
        """What queries see of the first `count` entries; `complete` [P] of them exist for each. `tables`: of each
        query, or of all."""
        cache = self.cache
        assert cache.entries is not None
        every = torch.arange(count, device=tables.device)
        there = torch.arange(count, device=tables.device) < complete.unsqueeze(1)
        slots = self._slots(tables, every, there, cache.entries)
        if chooses is not None and self.index is not None and count > self.index.most:
            assert cache.index_keys is not None
            keys = _rows(cache.index_keys, self._slots(tables, every, there, cache.index_keys), torch.float32)
            keys = keys if keys.dim() == 2 else keys.masked_fill(~there.unsqueeze(-1), 0)
            chosen, there = _best(*chooses, keys, there, self.index.most)
            slots = slots.expand(len(chosen), -1).gather(1, chosen)
        rows = _rows(cache.entries, slots, self.keys.dtype)
        # A place for which there is no entry holds anything, and a weight of zero does not silence a NaN.
        return (rows if rows.dim() == 2 else rows.masked_fill(~there.unsqueeze(-1), 0)), there

    def _slots(self, tables: Tensor, every: Tensor, there: Tensor, entries: Entries) -> Tensor:
        if tables.dim() == 1:
            return entry_slots(tables, every, self.layout.rate, entries)
        # Beyond a sequence's entries its table has anything.
        slots = entry_slots(tables, every.expand(len(tables), -1), self.layout.rate, entries)
        return torch.where(there, slots, 0)

    def _attend(self, q: Tensor, seen: list[Seen]) -> Tensor:
        """See `attend`."""
        return attend(q, seen, self.sinks, self.layout.scale)


def _rows(entries: Entries, slots: Tensor, dtype: torch.dtype) -> Tensor:
    rows = entries.rows.view(-1, 1, entries.rows.shape[-1])
    scales = entries.scales
    return gather(rows, scales.view(-1, 1) if scales is not None and scales.dim() == 2 else scales, slots, dtype)


def _best(queries: Tensor, weights: Tensor, keys: Tensor, there: Tensor, most: int) -> tuple[Tensor, Tensor]:
    """Places [P, most] of the entries that score best, and whether there are so many. `queries` [P, heads, dim], `keys`
    [n, dim], or [P, n, dim]."""
    _, heads, dim = queries.shape
    scores = F.relu(torch.matmul(queries.float(), keys.transpose(-1, -2)) * dim**-0.5)
    scores = torch.matmul((weights * heads**-0.5).unsqueeze(1), scores).squeeze(1)
    return best_of(scores, there, most)
