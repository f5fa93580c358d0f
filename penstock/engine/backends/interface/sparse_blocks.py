"""Attention to blocks of the context, chosen for every KV head by its keys (MSA): an indexer has an index key for every
token, and a block scores as its best one does.

The block of a token itself, and perhaps some before it, are always among those that are chosen. A token with no more
blocks than may be chosen attends to everything.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple, Protocol

from torch import Tensor

from penstock.engine.backends.interface.attention import HeadLayout
from penstock.engine.backends.interface.batch import AttentionBatch
from penstock.engine.backends.interface.dtypes import KVScales


@dataclass(frozen=True, slots=True)
class SparseBlockLayout:
    """Of an indexer."""

    heads: int
    """Each chooses for as many KV heads."""
    dim: int
    rate: int
    """Tokens of a block."""
    most: int
    """Blocks that are chosen, those at the end among them."""
    local: int
    """Blocks at the end that are always chosen: the token's own, and those before it."""
    eps: float
    """Of the norms of queries and of keys."""

    @property
    def everything(self) -> int:
        """The longest context of which a token sees all, itself included."""
        return self.most * self.rate


class SparseBlockIndex(NamedTuple):
    """What chooses blocks."""

    queries: Tensor
    """[T, heads * dim], neither normalized nor rotated yet."""
    query_norm: Tensor
    layout: SparseBlockLayout
    keys: Tensor
    """Of all tokens: [slots, dim]."""


class SparseBlockOps(Protocol):
    """Of layers with such an indexer."""

    def store_token_keys(
        self,
        keys: Tensor,
        norm: Tensor,
        layout: SparseBlockLayout,
        cos_sin: Tensor,
        batch: AttentionBatch,
        cache: Tensor,
    ) -> None:
        """Normalize and rotate the index keys [T, dim] of the new tokens, and store them in `cache` [slots, dim]."""
        ...

    def attend_sparse_blocks(
        self,
        q: Tensor,
        heads: HeadLayout,
        index: SparseBlockIndex,
        cos_sin: Tensor,
        batch: AttentionBatch,
        k_cache: Tensor,
        v_cache: Tensor,
        kv_scales: KVScales | None = None,
    ) -> Tensor:
        """`attention` to chosen blocks; the new tokens are in all caches already. Of equal scores that of the earlier
        block counts more. What a token sees depends on its own position and scores alone."""
        ...
