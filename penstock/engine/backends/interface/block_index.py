"""Attention to chosen blocks of tokens (QSA): an indexer scores every complete block of a few tokens, and a token
attends to the blocks that score best, and to the tokens behind the last complete one.

Every token has an index key. Once a block is complete its keys are averaged, normalized and rotated by the position of
its first token, into one that all later queries are compared with. Where a token has no more complete blocks than may
be chosen, it attends to everything.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple, Protocol

from torch import Tensor

from penstock.engine.backends.interface.attention import HeadLayout
from penstock.engine.backends.interface.batch import AttentionBatch
from penstock.engine.backends.interface.compression import Entries
from penstock.engine.backends.interface.dtypes import KVScales


@dataclass(frozen=True, slots=True)
class BlockIndexLayout:
    """Of an indexer: the score of a block is the sum of what its key gives in each head, where that is positive."""

    heads: int
    dim: int
    rate: int
    """Tokens of a block."""
    most: int
    """Blocks that are chosen."""
    eps: float
    """Of the norms of queries and of keys."""

    @property
    def everything(self) -> int:
        """The longest context of which a token sees all, itself included."""
        return (self.most + 1) * self.rate - 1


class BlockIndex(NamedTuple):
    """What chooses blocks."""

    queries: Tensor
    """[T, heads * dim], neither normalized nor rotated yet."""
    query_norm: Tensor
    layout: BlockIndexLayout
    keys: Entries
    """Of complete blocks."""


class BlockIndexOps(Protocol):
    """Of layers with such an indexer."""

    def store_block_keys(
        self,
        keys: Tensor,
        norm: Tensor,
        layout: BlockIndexLayout,
        cos_sin: Tensor,
        batch: AttentionBatch,
        tokens: Tensor,
        blocks: Entries,
    ) -> None:
        """Store the index keys [T, dim] of the new tokens in `tokens` [slots, dim], and those of the blocks that they
        complete in `blocks`."""
        ...

    def attend_blocks(
        self,
        q: Tensor,
        heads: HeadLayout,
        index: BlockIndex,
        cos_sin: Tensor,
        batch: AttentionBatch,
        k_cache: Tensor,
        v_cache: Tensor,
        kv_scales: KVScales | None = None,
    ) -> Tensor:
        """`attention` to chosen blocks; the new tokens are in all caches already. Of equal scores that of the earlier
        block counts more. What a token sees depends on its own position and scores alone."""
        ...
