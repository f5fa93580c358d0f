"""Attention to a window and to entries that stand for several tokens each (DeepSeek V4).

Every `rate` tokens are made into one entry, a mean of theirs weighted in each dimension by a softmax. A token attends
to the last `window` tokens one by one, itself included, and to the entries of all groups that are complete with it;
where there is an indexer, to those that score best. Keys are values.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple, Protocol

from torch import Tensor

from penstock.engine.backends.interface.batch import AttentionBatch


@dataclass(frozen=True, slots=True)
class CompressionLayout:
    """Of one layer."""

    heads: int
    head_dim: int
    window: int
    """Tokens that a token sees one by one, itself included."""
    scale: float
    eps: float
    """Of the norm of query heads, which has no weights, and of that of entries."""
    rate: int = 0
    """Tokens of an entry; 0: there are none."""
    overlapping: bool = False
    """Whether an entry is made of the tokens of its group and of those of the group before it. A token then has two
    vectors: the first is for the entry behind its own."""


class PoolInputs(NamedTuple):
    """What entries are made of."""

    values: Tensor
    """[T, width]: `width` is the size of an entry, or twice that where groups overlap."""
    gates: Tensor
    """[T, width]: scores of the softmax, without the bias."""
    bias: Tensor
    """float32 [rate, width]: added to the gates, by a token's place in its group."""
    norm: Tensor | None = None
    """The weights of the RMSNorm of an entry; None: it is not normalized."""


class EntryIndex(NamedTuple):
    """What chooses entries: see `IndexLayout`."""

    pool: PoolInputs
    """Its keys are entries of their own, of the same groups."""
    queries: Tensor
    """[T, heads * dim], not rotated yet."""
    weights: Tensor
    """float32 [T, heads]: of each token's heads."""
    heads: int
    most: int
    """Entries that are chosen."""


class Entries(NamedTuple):
    """Of a layer, in blocks: an entry lies in the block that holds the last token of its group."""

    rows: Tensor
    """[num_blocks, entries, width]."""
    scales: Tensor | None
    """Of an FP8 cache float32 [1], of an int8 cache [num_blocks, entries]."""
    block_size: int
    """Tokens of a block."""


class PoolState(NamedTuple):
    """Softmaxes that are not complete, in slots: maximum, sum of weights and weighted sum in each dimension."""

    running: Tensor
    """float32 [slots, 3, width]: of the group that the next token may belong to."""
    before: Tensor | None
    """float32 [slots, 3, width / 2]: where groups overlap, of the first vectors of the complete group before it."""


class CompressionCache(NamedTuple):
    """What a layer keeps."""

    window: Tensor
    """[slots, window, head_dim]: keys; that of position p is row p % window."""
    entries: Entries | None = None
    pool: PoolState | None = None
    index_keys: Entries | None = None
    index_pool: PoolState | None = None


class CompressionOps(Protocol):
    """Of layers that attend to entries."""

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
        """[T, heads * head_dim]: what the new tokens see, turned back by their own positions.

        `q` [T, heads * head_dim] is neither normalized nor rotated, `keys` [T, head_dim] is normalized. `cos_sin` is
        for pairs of neighbours among the last dimensions of a head; an entry stands at the position of its first token.
        `sinks`: see `Ops.attention`. Of entries with equal scores the earlier one counts more.
        """
        ...

    def paged_window_attention(
        self,
        q: Tensor,
        keys: Tensor,
        layout: CompressionLayout,
        sinks: Tensor,
        cos_sin: Tensor,
        batch: AttentionBatch,
        rows: Tensor,
    ) -> Tensor:
        """The same of a layer without entries whose keys lie in blocks: `rows` [num_blocks, block_size, head_dim]."""
        ...
