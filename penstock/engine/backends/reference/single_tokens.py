"""Recurrent layers token by token, for deterministic mode on CPU.

How PyTorch rounds a number depends on where it stands in its tensor, and matrix products on how many rows there are; a
chunk of a prompt adds up in another order than single tokens. So every token passes the layer in a call of its own, of
one shape, whatever else is in the step. Between the tokens of a run its state is in slot 1 of two caches made for it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from penstock.engine.backends.interface import AttentionBatch, StateBatch

Layer = Callable[[list[Tensor], AttentionBatch, Tensor, Tensor], Tensor]
"""From the inputs [T, ...], the batch and the two caches, of inputs to the convolution and of states, to [T, ...]."""


def one_by_one(
    layer: Layer, inputs: list[Tensor], batch: AttentionBatch, conv_cache: Tensor, state_cache: Tensor
) -> Tensor:
    """What `layer` gives for every token alone."""
    states = batch.states
    assert states is not None, "a recurrent layer needs to know where its states are"
    first, reads, writes = states.first.tolist(), states.reads.tolist(), states.writes.tolist()
    conv, state = (cache.new_zeros(2, *cache.shape[1:]) for cache in (conv_cache, state_cache))
    nothing, kept = (torch.full((1,), slot, dtype=states.first.dtype) for slot in (0, 1))
    out: list[Tensor] = []
    for t, (begin, read, write) in enumerate(zip(first, reads, writes, strict=True)):
        if t == begin and read:
            conv[1], state[1] = conv_cache[read], state_cache[read]
        known = kept if read or t > begin else nothing
        alone = StateBatch(first=nothing, last=nothing, reads=known, writes=kept)
        single = replace(batch, positions=batch.positions[t : t + 1], states=alone)
        out.append(layer([part[t : t + 1].clone() for part in inputs], single, conv, state))
        if write:
            conv_cache[write], state_cache[write] = conv[1], state[1]
    return torch.cat(out)
