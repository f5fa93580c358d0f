"""Tokens to the shards of their experts and back, where every shard has tokens of its own.

A token goes once to each shard that holds one of its experts, with its weights for them; that shard adds up its part,
and the token's own shard adds up the parts. How many go where is exchanged first, so nothing is padded or dropped:
a shard sends another at most its own tokens, and they are at most the step's.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from penstock.engine.backends.interface import ActivationOps
from penstock.engine.models.layers.experts import Experts, ExpertSlots
from penstock.engine.models.layers.linear import Linear
from penstock.engine.models.transformers.cuts import Exchange
from penstock.engine.parallel.groups import Group


class ExchangedExperts:
    """A feed-forward of experts over all shards, for the tokens of this one. All shards call it together."""

    def __init__(self, feed_forward: Experts, group: Group) -> None:
        self.feed_forward = feed_forward
        self.group = group

    @property
    def ops(self) -> ActivationOps:
        return self.feed_forward.ops

    @property
    def linears(self) -> tuple[Linear, ...]:
        return self.feed_forward.linears

    @property
    def weight_bytes(self) -> int:
        return self.feed_forward.weight_bytes

    @property
    def _slots(self) -> ExpertSlots:
        slots = self.feed_forward.slots
        assert slots is not None
        return slots

    def forward(self, x: Tensor, inputs: Tensor | None = None) -> Tensor:
        """`inputs`: see `Experts`."""
        weights, chosen = self.feed_forward.choose(x)
        x = x if inputs is None else inputs
        slots, size, group = self._slots.of(chosen), self._slots.size, self.group
        # [shards, tokens]: who visits whom, so that the visits below are in order of shards.
        visits = (slots // size).unsqueeze(0) == torch.arange(group.size, device=x.device).view(-1, 1, 1)
        to, token = visits.any(-1).nonzero(as_tuple=True)
        counts = torch.bincount(to, minlength=group.size)
        sizes, sent = group.exchange_counts(counts), counts.tolist()
        # Weights travel as the integers that they are stored in, beside the slots.
        own = [self._slots.on(to.unsqueeze(1), slots[token]).int(), weights[token].view(torch.int32)]
        adapters: Tensor | None = getattr(self.feed_forward, "adapters", None)
        if adapters is not None:  # which adapter a token has goes with it
            own.append(adapters[token].unsqueeze(1).int())
        notes = torch.cat(own, dim=1)
        rows, notes = group.exchange(x[token], sent, sizes), group.exchange(notes, sent, sizes)
        top_k = chosen.shape[1]
        theirs = notes[:, top_k : 2 * top_k].contiguous().view(torch.float32)
        of: Any = () if adapters is None else (notes[:, 2 * top_k],)
        computed = self.feed_forward.apply(rows, theirs, notes[:, :top_k].contiguous(), *of)
        total = torch.zeros_like(x)
        # A token comes back at most once from each shard: one shard at a time, the additions are in order.
        came = group.exchange(computed, sizes, sent)
        for part, index in zip(torch.split(came, sent), torch.split(token, sent), strict=True):
            total[index] += part
        return total


def exchanged_between(group: Group) -> Exchange:
    """The same for experts that the `transformers` library runs."""

    def exchange(
        x: Tensor, chosen: Tensor, weights: Tensor, owners: Tensor, own: Callable[[Tensor, Tensor, Tensor], Tensor]
    ) -> Tensor:
        visits = owners.unsqueeze(0) == torch.arange(group.size, device=x.device).view(-1, 1, 1)
        to, token = visits.any(-1).nonzero(as_tuple=True)
        counts = torch.bincount(to, minlength=group.size)
        sizes, sent = group.exchange_counts(counts), counts.tolist()
        notes = torch.cat((chosen[token].int(), weights[token].float().view(torch.int32)), dim=1)
        rows, notes = group.exchange(x[token], sent, sizes), group.exchange(notes, sent, sizes)
        top_k = chosen.shape[1]
        theirs = notes[:, top_k:].contiguous().view(torch.float32).to(weights.dtype)
        computed = own(rows, notes[:, :top_k].to(chosen.dtype), theirs)
        total = torch.zeros_like(x)
        came = group.exchange(computed, sizes, sent)
        for part, index in zip(torch.split(came, sent), torch.split(token, sent), strict=True):
            total[index] += part
        return total

    return exchange
