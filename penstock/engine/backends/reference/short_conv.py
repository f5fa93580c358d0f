"""Gated short convolutions in plain PyTorch.

Nothing depends on the values of tensors, so that a CUDA graph can contain it: every token writes, and those that keep
nothing write to slot 0, which stands for none and is never read.
"""

from __future__ import annotations

import torch
from torch import Tensor

from penstock.engine.backends.interface import AttentionBatch, ShortConvWeights


def short_conv(projected: Tensor, weights: ShortConvWeights, batch: AttentionBatch, conv_cache: Tensor) -> Tensor:
    """See `Ops.short_conv`."""
    states = batch.states
    assert states is not None, "a recurrent layer needs to know where its states are"
    width, tokens = len(weights.taps), len(projected)
    gates, gates_out, inputs = projected.chunk(3, -1)
    gated = gates * inputs
    at = torch.arange(tokens, device=projected.device)
    first, reads, writes = states.first.long(), states.reads.long(), states.writes.long()
    mixed = weights.bias + weights.taps[-1] * gated.float()
    steps = [gated]
    for back in range(1, width):
        before = conv_cache[reads, (batch.positions - back) % width]
        known = (reads > 0) & (batch.positions >= back)
        before = torch.where(known.unsqueeze(1), before, 0)
        inside = (at - back >= first).unsqueeze(1)
        step = torch.where(inside, gated[(at - back).clamp_min(0)], before.to(gated.dtype))
        mixed = mixed + weights.taps[width - 1 - back] * step.float()
        steps.append(step)
    for back in range(max(width - 1, 1)):  # what the next token needs
        conv_cache[writes, (batch.positions - back) % width] = steps[back].to(conv_cache.dtype)
    return (gates_out.float() * mixed).to(projected.dtype)
