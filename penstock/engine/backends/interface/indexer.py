"""Attention over chosen tokens: an indexer scores what is cached, and a token attends to the few that score best (DSA).

The indexer has queries of its own and one key per token, which is cached beside what attention reads. Where a context
has no more tokens than may be chosen, all of them are, and nothing has to be scored.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

from torch import Tensor

from penstock.engine.backends.interface.attention import LatentAdditions, LatentLayout, LatentWeights
from penstock.engine.backends.interface.batch import AttentionBatch


@dataclass(frozen=True, slots=True)
class IndexLayout:
    """The heads of an indexer: the score of a cached token is the weighted sum of what its key gives in each, where
    that is positive."""

    heads: int
    dim: int
    rotary: int
    """Dimensions of a head that are rotated: the first ones, or the last ones."""
    most: int
    """Tokens that are chosen."""
    interleaved: bool
    """Whether rotation pairs neighbouring dimensions; else dimension i with i + rotary / 2."""
    rotates_last: bool = False


class IndexNorm(NamedTuple):
    """The LayerNorm of index keys."""

    weight: Tensor
    bias: Tensor
    eps: float


class ChosenTokens(NamedTuple):
    """What the new tokens of one sequence attend to."""

    sequence: int
    """Its number in the step."""
    slots: Tensor
    """int64 [new, n]: cache slots, in the order of their positions."""
    valid: Tensor
    """bool [new, n]: whether there is one; a token early in its sequence sees fewer than n."""


Chosen = Any
"""What a backend keeps of its choice, which it alone reads: `ChosenTokens` of the sequences of which something had to
be chosen, in order, or lists on the device. False where nothing had to be, so that all sequences see everything."""


class IndexOps(Protocol):
    """Of layers with an indexer."""

    def store_index_keys(
        self, keys: Tensor, norm: IndexNorm, layout: IndexLayout, cos_sin: Tensor, batch: AttentionBatch, cache: Tensor
    ) -> None:
        """Normalize and rotate the keys [T, dim] of the new tokens, and store them in `cache` [slots, dim]."""
        ...

    def choose_tokens(
        self,
        queries: Tensor,
        weights: Tensor,
        layout: IndexLayout,
        cos_sin: Tensor,
        batch: AttentionBatch,
        cache: Tensor,
        block_size: int,
        *,
        every: bool = False,
    ) -> Chosen:
        """The tokens that the new ones attend to, themselves perhaps not among them.

        `queries` [T, heads * dim] are not rotated yet; `weights`: of each token's heads, float32 [T, heads]. Of equal
        scores that of the earlier token counts more. `every`: also of sequences that have no more tokens than may be
        chosen. The results of a sequence depend on its own tokens of the step alone.
        """
        ...

    def attend_chosen(
        self,
        q: Tensor,
        kv: Tensor | None,
        layout: LatentLayout,
        weights: LatentWeights,
        cos_sin: Tensor,
        batch: AttentionBatch,
        cache: Tensor,
        scales: Tensor | None,
        added: LatentAdditions | None,
        chosen: Chosen,
        sinks: Tensor | None = None,
    ) -> Tensor:
        """`latent_attention` in which the sequences of `chosen` see those tokens only. With `added`, these must be all
        sequences of the step."""
        ...
