"""Choosing tokens in pools, in plain PyTorch: what every backend runs. See `PooledIndexOps`.

What is chosen is attended to as what an indexer of single tokens chooses (`indexer`). Scores are computed sequence by
sequence, some queries at a time, so that memory does not grow with the context.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from penstock.engine.backends.interface import (
    AttentionBatch,
    Chosen,
    ChosenTokens,
    Entries,
    PooledIndexLayout,
    PoolInputs,
    PoolState,
)
from penstock.engine.backends.reference.gathered import slots_of
from penstock.engine.backends.reference.indexer import best_of
from penstock.engine.backends.reference.pooling import entry_slots, pool_run, pool_singles
from penstock.engine.backends.reference.segments import waves_of

_BYTES = 64 << 20
"""Scores that are made at a time, at most."""


class PlainPooledIndexing:
    """See `PooledIndexOps`."""

    batch_invariant: bool

    def store_pools(self, inputs: PoolInputs, batch: AttentionBatch, pools: Entries, state: PoolState) -> None:
        rate, running = len(inputs.bias), state.running
        rows = pools.rows.view(-1, pools.rows.shape[-1])
        for wave in waves_of(batch, alone=self.batch_invariant):
            if wave.singles is not None:
                new = wave.singles
                own = inputs._replace(values=inputs.values[new.at], gates=inputs.gates[new.at])
                made, group, _ = pool_singles(own, new.positions, running[new.reads], None)
                running[new.writes] = group
                done = new.completing(rate)
                which = new.positions[done].unsqueeze(1) // rate
                slots = entry_slots(new.tables[done], which, rate, pools).flatten()
                rows[slots] = made[done].to(rows.dtype)
            for run in wave.runs:
                tokens = slice(run.begin, run.end)
                own = inputs._replace(values=inputs.values[tokens], gates=inputs.gates[tokens])
                made, group, _ = pool_run(own, run.start, running[run.read], None)
                running[run.write] = group
                first = run.start // rate
                which = torch.arange(first, first + len(made), device=rows.device)
                rows[entry_slots(batch.block_tables[run.row], which, rate, pools)] = made.to(rows.dtype)

    def store_paged_pools(self, inputs: PoolInputs, batch: AttentionBatch, pools: Entries, rows: Tensor) -> None:
        (rate, dim), size = inputs.bias.shape, rows.shape[1]
        kept = rows.view(-1, 2 * dim)
        kept[batch.slots] = torch.cat((inputs.values, inputs.gates), 1).to(kept.dtype)
        done = (batch.positions + 1) % rate == 0
        last = batch.positions[done].unsqueeze(1)
        tables = batch.block_tables[batch.rows[batch.owners[done]].long()]
        at = last + torch.arange(1 - rate, 1, device=rows.device)
        values, gates = kept[tables.gather(1, at // size).long() * size + at % size].float().chunk(2, -1)
        made = ((gates + inputs.bias).softmax(1) * values).sum(1)
        slots = entry_slots(tables, last // rate, rate, pools).flatten()
        pools.rows.view(-1, dim)[slots] = made.to(pools.rows.dtype)

    def choose_pools(
        self,
        queries: Tensor,
        weights: Tensor,
        layout: PooledIndexLayout,
        batch: AttentionBatch,
        pools: Entries,
        *,
        every: bool = False,
    ) -> Chosen:
        asked = queries.view(-1, layout.heads, layout.dim).float()
        weights = weights * layout.heads**-0.5
        starts, contexts = batch.query_starts.tolist(), batch.context_lens.tolist()
        found = []
        for i, context in enumerate(contexts):
            if not every and context <= layout.everything:
                continue
            new, table = slice(starts[i], starts[i + 1]), batch.block_tables[batch.rows[i]]
            which, there = _best(asked[new], weights[new], layout, batch.positions[new], table, pools, context)
            found.append(ChosenTokens(i, *_tokens_of(which, there, layout, batch.positions[new], table, pools)))
        return tuple(found)


def _best(
    queries: Tensor,
    weights: Tensor,
    layout: PooledIndexLayout,
    positions: Tensor,
    table: Tensor,
    pools: Entries,
    context: int,
) -> tuple[Tensor, Tensor]:
    """The pools [new, n] of each token, in order, and whether there are so many."""
    every = torch.arange(context // layout.rate, device=table.device)
    seen = every < ((positions + 1) // layout.rate).unsqueeze(1)
    if len(every) <= layout.most:
        return every.expand(len(positions), -1), seen
    slots = entry_slots(table, every, layout.rate, pools)
    keys = pools.rows.view(-1, layout.dim)[slots].float().t()
    which = torch.empty((len(positions), layout.most), dtype=torch.int64, device=table.device)
    there = torch.empty_like(which, dtype=torch.bool)
    step = max(1, _BYTES // (4 * layout.heads * len(every)))
    for begin in range(0, len(positions), step):
        part = slice(begin, begin + step)
        scores = F.relu(torch.matmul(queries[part], keys) * layout.dim**-0.5)
        scores = torch.matmul(weights[part].unsqueeze(1), scores).squeeze(1)
        which[part], there[part] = best_of(scores, seen[part], layout.most)
    return which, there


def _tokens_of(
    which: Tensor, there: Tensor, layout: PooledIndexLayout, positions: Tensor, table: Tensor, pools: Entries
) -> tuple[Tensor, Tensor]:
    """Cache slots of the tokens of pools, and of those behind the last complete one, and whether there is one."""
    within = torch.arange(layout.rate, device=table.device)
    members = (which.unsqueeze(2) * layout.rate + within).flatten(1)
    behind = ((positions + 1) // layout.rate * layout.rate).unsqueeze(1) + within[:-1]
    valid = torch.cat((there.repeat_interleave(layout.rate, 1), behind <= positions.unsqueeze(1)), 1)
    at = torch.minimum(torch.cat((members, behind), 1), positions.unsqueeze(1))
    return slots_of(table, at, pools.block_size), valid
