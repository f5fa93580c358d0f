"""Attention over sequences of their own: each shard of a stage takes its part of every step.

Rank 0 tells all ranks of a step as ever. Whose a token is follows from its block: the caches of the shards are numbered
through (`kv.partition`); states of recurrent layers are numbered by each shard. A shard runs its layers on its own
tokens; in layers of experts the shards meet (`dispatch`). At the end rank 0 gets all final hidden states, in the step's
order. A shard without tokens in a step takes part with one that nobody reads, which attends to itself in the null block
and leaves no state.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from penstock.engine.backends.interface import AttentionBatch, Ints
from penstock.engine.kv.cache import KVCache
from penstock.engine.parallel.channel import Forward
from penstock.engine.parallel.groups import Group
from penstock.engine.parallel.layout import Place


@dataclass(frozen=True, slots=True)
class Shares:
    """How steps are divided between shards."""

    shard: int
    shards: int
    blocks: int
    """Of each cache."""
    block_size: int
    scratch_row: int
    """Of the block tables: that of no sequence."""

    def of(self, step: Forward) -> Share:
        slots = self.blocks * self.block_size
        owner = step.slots // slots
        tokens = [np.flatnonzero(owner == shard) for shard in range(self.shards)]
        mine, cells = tokens[self.shard], step.cells.copy()
        cells[2] -= self.shard * self.blocks
        cells[2][(cells[2] < 0) | (cells[2] >= self.blocks)] = 0  # in rows of others
        if not len(mine):
            return Share(self.shard, tokens, self._nothing(replace(step, cells=cells)), step.slots)
        entries = np.flatnonzero(owner[step.query_starts[:-1]] == self.shard)
        lengths = np.diff(step.query_starts)[entries]
        return Share(
            self.shard,
            tokens,
            replace(
                step,
                token_ids=step.token_ids[mine],
                positions=step.positions[mine],
                slots=step.slots[mine] - self.shard * slots,
                query_starts=np.concatenate(([0], np.cumsum(lengths))),
                context_lens=step.context_lens[entries],
                rows=step.rows[entries],
                cells=cells,
                num_decodes=int((entries < step.num_decodes).sum()),
                max_query=int(lengths.max()),
                adapter_slots=_any(None if step.adapter_slots is None else step.adapter_slots[mine], step.further),
                states=None if step.states is None else _states(step.states, mine),
            ),
            step.slots,
        )

    def _nothing(self, step: Forward) -> Forward:
        zero, one = np.zeros(1, np.int64), np.ones(1, np.int64)
        return replace(
            step,
            token_ids=zero,
            positions=zero,
            slots=zero,
            query_starts=np.array([0, 1]),
            context_lens=one,
            rows=np.array([self.scratch_row]),
            num_decodes=1,
            max_query=1,
            adapter_slots=np.full(1, -1) if step.further else None,
            states=None if step.states is None else np.zeros((4, 1), np.int64),
        )


def _any(adapter_slots: Ints | None, further: bool) -> Ints | None:
    """None where no token has an adapter, nor could meet one of another shard at an expert."""
    nowhere = adapter_slots is None or (adapter_slots.max() < 0 and not further)
    return None if nowhere else adapter_slots


def _states(states: Ints, mine: Ints) -> Ints:
    """The fields of `StateBatch` of some of a step's tokens. The tokens of a run stay together."""
    first, last, reads, writes = states[:, mine]
    return np.stack((np.searchsorted(mine, first), np.searchsorted(mine, last), reads, writes))


def shares_of(place: Place, kv: KVCache, max_running: int) -> Shares | None:
    """How steps are divided; None where every shard has all tokens."""
    return Shares(place.shard, place.tensor, kv.num_blocks, kv.block_size, max_running) if place.data else None


@dataclass(frozen=True, slots=True)
class Share:
    """One shard's part of a step."""

    shard: int
    tokens: list[Ints]
    """Of each shard, where its tokens are in the step."""
    message: Forward
    """The step of this shard's own tokens, in its own blocks; never empty."""
    slots: Ints
    """Of all tokens of the step, in the blocks of all shards."""

    def batch(self, block_tables: Tensor) -> AttentionBatch:
        batch = self.message.batch(block_tables)
        batch.share = self
        return batch

    def take(self, token_ids: Tensor) -> Tensor:
        mine = self.tokens[self.shard]
        if not len(mine):
            return token_ids.new_zeros(1)
        return token_ids[torch.from_numpy(mine).to(token_ids.device, non_blocking=True)]

    def collect(self, hidden: Tensor, shards: Group) -> Tensor:
        counts = [max(1, len(tokens)) for tokens in self.tokens]
        nothing = [0] * shards.size
        came = shards.exchange(hidden, [len(hidden), *nothing[1:]], nothing if self.shard else counts)
        if self.shard:
            return hidden
        whole = hidden.new_empty(sum(len(tokens) for tokens in self.tokens), hidden.shape[1])
        for tokens, part in zip(self.tokens, torch.split(came, counts), strict=True):
            whole[torch.from_numpy(tokens).to(hidden.device, non_blocking=True)] = part[: len(tokens)]
        return whole
