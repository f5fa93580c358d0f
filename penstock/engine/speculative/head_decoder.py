"""A drafter that reads the model's hidden states: one layer over pairs of a token and what the model kept before it.

The entry of token j is made of its embedding and the hidden states kept for token j - 1 (`models.tap`); from it follows
token j + 1. The first token has no entry, so the drafter's own keys and values lie one place before the token: entry j
in the slot of token j - 1, in a cache whose block `b` belongs to the same tokens as the target's block `b`.

A draft token has no hidden states of the model yet: the drafter's own take their place. They are written where the
model will write its own when it verifies, so an entry is read in the same way whether it follows a real token or a
draft token, and nothing has to be cleaned up.

Steps in which every token stands alone draw (see `HeadProposer`); the others only read, and write no hidden states.
"""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.nn import functional as F

from penstock.engine.backends.interface import AttentionBatch
from penstock.engine.kv.cache import KVCache
from penstock.engine.models.decoder import Decoder
from penstock.engine.models.layers.linear import Linear


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadDecoder(Decoder):
    """See `Decoder`. `run` is not used: its input is more than a stream."""

    features: Tensor
    """[slots, width]: what the target keeps of every token."""
    block_size: int

    @abstractmethod
    def read(self, embedded: Tensor, features: Tensor, batch: AttentionBatch, kv: KVCache) -> tuple[Tensor, Tensor]:
        """Normalized hidden states for the head, and those that a draft token passes on."""

    def forward(self, token_ids: Tensor, batch: AttentionBatch, kv: KVCache) -> Tensor:
        draws = batch.num_decodes == len(token_ids)
        rows = batch.rows if draws else batch.rows[batch.owners]
        before = (batch.positions - 1).clamp(min=0)
        blocks = batch.block_tables[rows.long(), before // self.block_size].long()
        slots = blocks * self.block_size + before % self.block_size
        # Padding may have a context of nothing but itself; it must not become empty.
        lengths = batch.query_starts[1:] - batch.query_starts[:-1]
        contexts = torch.maximum(batch.context_lens - 1, lengths).clamp(min=1)
        shifted = replace(batch, positions=before, slots=slots, context_lens=contexts, host=None)
        hidden, kept = self.read(F.embedding(token_ids, self.embedding), self.features[slots], shifted, kv)
        if draws:
            # Of several tokens of a sequence the last is the one that a draft token will follow.
            last = torch.ones_like(rows, dtype=torch.bool)
            last[:-1] = rows[1:] != rows[:-1]
            self.features[torch.where(last, batch.slots, 0)] = kept
        return hidden

    def run(self, residual: Tensor, batch: AttentionBatch, kv: KVCache) -> Tensor:
        raise NotImplementedError("a drafter reads hidden states of the model too")


class PartialHead:
    """A head over some tokens of the vocabulary; all others are impossible."""

    def __init__(self, linear: Linear, tokens: Tensor, vocab_size: int) -> None:
        """`tokens`: int64, the token of each row of the linear."""
        self.linear = linear
        self.tokens = tokens
        self.vocab_size = vocab_size
        self.weight_bytes = linear.weight_bytes

    def __call__(self, x: Tensor) -> Tensor:
        scores = self.linear(x)
        logits = scores.new_full((len(scores), self.vocab_size), float("-inf"))
        logits[:, self.tokens] = scores
        return logits
