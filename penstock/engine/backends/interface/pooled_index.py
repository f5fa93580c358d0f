"""Choosing tokens in pools (GLM-5-Next): an indexer scores every complete pool of a few tokens, and a token attends to
those of the pools that score best, and to the tokens behind the last complete one.

Every token has an index key. Once a pool is complete its keys are added up into one, weighted in each dimension by a
softmax over its tokens, with which all later queries are compared. Nothing is rotated. Where a token sees no more
complete pools than may be chosen, it attends to everything.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from penstock.engine.backends.interface.batch import AttentionBatch
from penstock.engine.backends.interface.compression import Entries, PoolInputs, PoolState
from penstock.engine.backends.interface.indexer import Chosen


@dataclass(frozen=True, slots=True)
class PooledIndexLayout:
    """Of an indexer: the score of a pool is the weighted sum of what its key gives in each head, where that is
    positive."""

    heads: int
    dim: int
    rate: int
    """Tokens of a pool."""
    most: int
    """Pools that are chosen."""

    @property
    def everything(self) -> int:
        """The longest context of which a token sees all, itself included."""
        return (self.most + 1) * self.rate - 1


class PooledIndexOps(Protocol):
    """Of layers with such an indexer."""

    def store_pools(self, inputs: PoolInputs, batch: AttentionBatch, pools: Entries, state: PoolState) -> None:
        """Store the keys of the pools that the new tokens complete in `pools`, and what is known of the others."""
        ...

    def store_paged_pools(self, inputs: PoolInputs, batch: AttentionBatch, pools: Entries, rows: Tensor) -> None:
        """The same where what pools are made of lies in blocks: `rows` [num_blocks, block_size, 2 * dim], values and
        gates of every token."""
        ...

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
        """As `choose_tokens`, the tokens of the best pools and those behind the last complete one. `queries`
        [T, heads * dim]; of equal scores that of the earlier pool counts more."""
        ...
