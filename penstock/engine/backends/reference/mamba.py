"""Mamba-2 in plain PyTorch: one token at a time for decodes, chunks of tokens for prompts.

Decodes of many sequences are one batch. A longer run goes through the chunked form: within a chunk tokens see each
other as in attention without a softmax, between chunks there is one update of the state, so that most of the work is
matrix products. Both forms compute the same sums in another order.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from penstock.engine.backends.interface import AttentionBatch, MambaLayout, MambaWeights, StateBatch
from penstock.engine.backends.reference.delta import convolve

CHUNK = 64
"""Tokens that see each other by matrix products."""
_SHORT = 8
"""Runs of at most this many tokens go through the state one by one."""


class Heads(NamedTuple):
    """What the recurrence reads of T tokens, float32."""

    x: Tensor
    """[T, heads, head_dim]."""
    b: Tensor
    """[T, groups, state]; so is `c`."""
    c: Tensor
    dt: Tensor
    """[T, heads]: time steps; `g`: logarithms of the decays."""
    g: Tensor

    def of(self, begin: int, end: int) -> Heads:
        return Heads(*(part[begin:end] for part in self))


def mamba(
    projected: Tensor,
    layout: MambaLayout,
    weights: MambaWeights,
    batch: AttentionBatch,
    conv_cache: Tensor,
    state_cache: Tensor,
) -> Tensor:
    """See `Ops.mamba`."""
    states = batch.states
    assert states is not None, "a recurrent layer needs to know where its states are"
    tokens = len(projected)
    z, inputs, dt = torch.split(projected, [layout.inner, layout.channels, layout.heads], -1)
    mixed = convolve(inputs, weights.conv, batch.positions, states, conv_cache, weights.conv_bias)
    heads = _heads(mixed, dt, layout, weights)
    out = torch.empty(tokens, layout.heads, layout.head_dim, device=projected.device)
    first, last, writes = states.first.tolist(), states.last.tolist(), states.writes.tolist()
    single = [t for t in range(tokens) if first[t] == last[t] == t]
    if single:
        _step(heads, torch.tensor(single, device=out.device), states, state_cache, out)
    begin = 0
    while begin < tokens:
        end = last[begin] + 1
        if first[begin] == begin and end > begin + 1:
            _run(heads.of(begin, end), int(states.reads[begin]), writes[begin:end], state_cache, out[begin:end])
        begin = max(end, begin + 1)
    out += weights.skip.unsqueeze(-1) * heads.x
    return gated_norm(out.view(tokens, -1), z, layout, weights).to(projected.dtype)


def gated_norm(y: Tensor, z: Tensor, layout: MambaLayout, weights: MambaWeights) -> Tensor:
    """What a layer gives, times silu of its gate and normalized, in the order that the layout says; float32."""
    gate = F.silu(weights.gate_scale * z.float())
    if not layout.norm_groups:
        return y * gate
    if layout.gate_first:
        y = y * gate
    parts = y.reshape(len(y), layout.norm_groups, -1)
    normed = parts * torch.rsqrt(parts.pow(2).mean(-1, keepdim=True) + weights.eps)
    normed = normed.reshape(y.shape) * weights.norm
    return normed if layout.gate_first else normed * gate


def _heads(mixed: Tensor, dt: Tensor, layout: MambaLayout, weights: MambaWeights) -> Heads:
    shared = layout.groups * layout.state
    x, b, c = torch.split(mixed, [layout.inner, shared, shared], -1)
    b, c = (part.reshape(-1, layout.groups, layout.state) for part in (b, c))
    steps = F.softplus(weights.dt_scale * dt.float() + weights.dt_bias).clamp(*weights.dt_range)
    return Heads(x.reshape(-1, layout.heads, layout.head_dim), b, c, steps, steps * weights.decay)


def _step(heads: Heads, at: Tensor, states: StateBatch, cache: Tensor, out: Tensor) -> None:
    """One token of each of many sequences."""
    reads, writes = states.reads[at].long(), states.writes[at].long()
    state = cache[reads]
    state[reads == 0] = 0.0
    state, out[at] = _advance(state, Heads(*(part[at] for part in heads)))
    kept = torch.nonzero(writes > 0).squeeze(1)
    cache[writes[kept]] = state[kept]


def _advance(state: Tensor, heads: Heads) -> tuple[Tensor, Tensor]:
    """States [..., heads, head_dim, state] behind one token each, and what they give."""
    ratio = heads.x.shape[-2] // heads.b.shape[-2]
    b, c = (part.repeat_interleave(ratio, -2) for part in (heads.b, heads.c))
    state = state * heads.g.exp()[..., None, None]
    state = state + (heads.x * heads.dt.unsqueeze(-1)).unsqueeze(-1) * b.unsqueeze(-2)
    return state, (state @ c.unsqueeze(-1)).squeeze(-1)


def _run(heads: Heads, read: int, writes: list[int], cache: Tensor, out: Tensor) -> None:
    """Several tokens of one sequence."""
    state = cache[read].clone() if read else torch.zeros_like(cache[0])
    tokens = len(writes)
    if tokens <= _SHORT:
        for t, slot in enumerate(writes):
            state, out[t] = _advance(state, Heads(*(part[t] for part in heads)))
            if slot:
                cache[slot] = state
        return
    kept = [t + 1 for t, slot in enumerate(writes) if slot]
    begin = 0
    while begin < tokens:
        end = min(begin + CHUNK, tokens, *(at for at in kept if at > begin))
        state, out[begin:end] = _chunk(heads.of(begin, end), state)
        if writes[end - 1]:
            cache[writes[end - 1]] = state
        begin = end


def _chunk(heads: Heads, state: Tensor) -> tuple[Tensor, Tensor]:
    """A chunk of tokens by matrix products: the state behind it, and what its tokens give [T, heads, head_dim]."""
    x, b, c, dt, g = (part.transpose(0, 1) for part in heads)  # [heads or groups, T, ...]
    ratio = len(x) // len(b)
    total = g.cumsum(-1)
    # Above the diagonal differences may be as large as they like: they are masked before they are raised.
    lag = (total.unsqueeze(-1) - total.unsqueeze(-2)).tril().exp().tril()
    scores = (c @ b.transpose(-1, -2)).repeat_interleave(ratio, 0) * lag
    b, c = (part.repeat_interleave(ratio, 0) for part in (b, c))
    values = x * dt.unsqueeze(-1)
    out = scores @ values + (c @ state.transpose(-1, -2)) * total.exp().unsqueeze(-1)
    late = (total[..., -1:] - total).exp().unsqueeze(-1)
    state = state * total[..., -1].exp()[..., None, None] + (values * late).transpose(-1, -2) @ b
    return state, out.transpose(0, 1)
