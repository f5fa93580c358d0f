"""What a layer is told of the last few tokens by their ids (n-gram embeddings).

A token and those before it, up to `size` of them, are hashed once for every length and head; each hash is a row of one
large table. The rows of a token side by side make a value for all residual streams and a key for each, which is
compared with the stream: how much they agree gates the value. A short convolution over the gated values, whose taps lie
as far apart as the longest n-gram, is added to them. No n-gram reaches behind a token that ends a text.

A sequence keeps the ids of its last tokens, and what its convolution has read of them. The table stays in host memory,
as a view of the checkpoint's file: of its rows, which may be a large part of all weights, a token reads a few.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from penstock.engine.backends.interface import AttentionBatch, StateBatch
from penstock.engine.kv.kinds import StateTensors
from penstock.engine.models.layers.experts import StepTokens
from penstock.engine.models.layers.gated_streams import by_token, grouped_norm
from penstock.engine.models.layers.linear import Linear
from penstock.engine.models.model_config import NgramConfig

_LEAST_GATE = 1e-6


def kept_kind(config: NgramConfig, channels: int, made: torch.dtype) -> StateTensors:
    """What is kept of a sequence. `channels`: of the convolution; `made`: the type of the activations."""
    return StateTensors((((config.before,), torch.int64), ((config.reach, channels), made)))


@dataclass(frozen=True, slots=True)
class NgramTable:
    """Looks up the rows of n-grams."""

    parts: Sequence[Tensor]
    """Runs of rows [n, width], on the host, each but the last of as many."""
    factors: Tensor
    """int64 [size]; so are the others."""
    sizes: Tensor
    """[heads of all lengths]: rows of each head."""
    offsets: Tensor
    heads: int
    """Of one length."""
    end: int
    """The id of the token that ends a text."""

    def __call__(self, ids: Tensor, before: Sequence[Tensor], dtype: torch.dtype) -> Tensor:
        """[T, heads * width] of tokens `ids` [T]; `before`: the tokens one, two, ... before each, `end` where there is
        none."""
        mixed, blocks, open_ = ids * self.factors[0], [], torch.ones_like(ids, dtype=torch.bool)
        for length, token in enumerate(before, 2):
            mixed = mixed ^ (torch.where(open_, token, self.end) * self.factors[length - 1])
            open_ = open_ & (token != self.end)
            own = slice((length - 2) * self.heads, (length - 1) * self.heads)
            blocks.append(torch.remainder(mixed.unsqueeze(1), self.sizes[own]) + self.offsets[own])
        return self._rows(torch.cat(blocks, 1)).to(dtype).flatten(1)

    def _rows(self, rows: Tensor) -> Tensor:
        """[T, heads, width], on the device of `rows`."""
        if len(self.parts) == 1:
            return F.embedding(rows.to(self.parts[0].device), self.parts[0]).to(rows.device)
        size, at = len(self.parts[0]), rows.flatten().cpu()
        found = self.parts[0].new_empty(len(at), self.parts[0].shape[1])
        which = at // size
        for part in sorted(set(which.tolist())):
            here = which == part
            found[here] = self.parts[part][at[here] - part * size]
        return found.view(*rows.shape, -1).to(rows.device)


@dataclass(frozen=True, slots=True)
class NgramInput:
    """One layer's part."""

    table: NgramTable
    tokens: StepTokens
    key: Linear
    value: Linear
    key_norm: Tensor
    """float32 [count * hidden]; so are the other norms."""
    query_norm: Tensor
    conv_norm: Tensor
    conv: Tensor
    """float32 [count * hidden, taps]: the last column belongs to the token itself."""
    config: NgramConfig
    hidden: int
    eps: float
    dtype: torch.dtype
    """Of the activations."""
    alone: Callable[[], bool]
    """Whether every token is computed by itself."""

    @property
    def weight_bytes(self) -> int:
        return self.key.weight_bytes + self.value.weight_bytes

    def cache_kind(self) -> StateTensors:
        return kept_kind(self.config, self.conv.shape[0], self.dtype)

    def add(self, streams: Tensor, batch: AttentionBatch, cache: list[Tensor]) -> None:
        """In place. `cache`: of `cache_kind`."""
        states = batch.states
        assert states is not None, "a layer with n-grams needs to know where its states are"
        ids, (kept_ids, kept_inputs) = self.tokens.of(len(streams)).long(), cache
        history = _History(ids, batch.positions, states, kept_ids, self.table.end)
        before = [history.before(back) for back in range(1, self.config.before + 1)]
        told = self.table(ids, before, self.dtype)
        alone = self.alone()
        values = by_token(self._values, told, streams, alone=alone)
        inputs = by_token(self._inputs, values, alone=alone)
        convolved = self._convolved(inputs, batch.positions, states, kept_inputs)
        history.keep(self.config.before)
        streams += (values + by_token(F.silu, convolved, alone=alone)).to(streams.dtype)

    def _values(self, told: Tensor, streams: Tensor) -> Tensor:
        """float32 [T, count * hidden]: what is added to the streams, but for the convolution."""
        shape = len(streams), -1, self.hidden
        keys = grouped_norm(self.key(told), self.key_norm, self.hidden, self.eps).view(shape)
        queries = grouped_norm(streams, self.query_norm, self.hidden, self.eps).view(shape)
        agreed = (keys * queries).sum(-1, keepdim=True) / math.sqrt(self.hidden)
        gate = agreed.abs().clamp_min(_LEAST_GATE).sqrt() * agreed.sign()
        return (gate.sigmoid() * self.value(told).float().unsqueeze(1)).flatten(1)

    def _inputs(self, values: Tensor) -> Tensor:
        """Of the convolution."""
        return grouped_norm(values, self.conv_norm, self.hidden, self.eps).to(self.dtype)

    def _convolved(self, inputs: Tensor, positions: Tensor, states: StateBatch, kept: Tensor) -> Tensor:
        history = _History(inputs, positions, states, kept, 0)
        taps = self.conv.shape[1]
        mixed = inputs.float() * self.conv[:, -1]
        for tap in range(1, taps):
            mixed += history.before(tap * self.config.size).float() * self.conv[:, taps - 1 - tap]
        history.keep(self.config.reach)
        return mixed


class _History:
    """What tokens see of those before them, and what states keep of them: what belongs to position p is in row p % n of
    a state of n rows."""

    def __init__(self, new: Tensor, positions: Tensor, states: StateBatch, kept: Tensor, nothing: int) -> None:
        self.new, self.positions, self.kept, self.nothing = new, positions, kept, nothing
        self.first, self.reads, self.writes = states.first.long(), states.reads.long(), states.writes.long()
        self.every = torch.arange(len(new), device=new.device)

    def before(self, back: int, tokens: Tensor | None = None) -> Tensor:
        """Of every token, or of some, what belongs to the one so many before it."""
        at = self.every if tokens is None else tokens
        found = self.new[(at - back).clamp_min(0)]
        older = torch.nonzero(at - back < self.first[at]).squeeze(1)
        positions, reads = self.positions[at[older]], self.reads[at[older]]
        known = (reads > 0) & (positions >= back)
        kept = self.kept[reads, (positions - back) % self.kept.shape[1]].to(found.dtype)
        found[older] = torch.where(known.view(-1, *(1,) * (found.dim() - 1)), kept, self.nothing)
        return found

    def keep(self, count: int) -> None:
        """Writes the states behind the tokens that have one. Nothing is read of states afterwards."""
        tokens = torch.nonzero(self.writes > 0).squeeze(1)
        found = [self.before(back, tokens) for back in range(count)]
        for back, rows in enumerate(found):
            there = self.positions[tokens] >= back
            places = (self.positions[tokens] - back) % count
            self.kept[self.writes[tokens[there]], places[there]] = rows[there].to(self.kept.dtype)
