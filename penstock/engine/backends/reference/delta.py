"""The gated delta net in plain PyTorch: one token at a time for decodes, chunks of tokens for prompts.

Decodes of many sequences are one batch. A longer run goes through the chunked form: within a chunk the updates of the
state are a triangular system, between chunks there is one update of the state, so that most of the work is matrix
products. Both forms compute the same sums in another order.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from penstock.engine.backends.interface import AttentionBatch, DeltaLayout, DeltaWeights, HeadLayout, StateBatch

CHUNK = 64
"""Tokens of one triangular system."""
_BLOCK = 16
"""Tokens whose products are taken channel by channel, where channels decay on their own."""
_SHORT = 8
"""Runs of at most this many tokens go through the state one by one."""


class Heads(NamedTuple):
    """What the recurrence reads of T tokens, float32."""

    q: Tensor
    """[T, v_heads, k_dim], scaled; so is `k`."""
    k: Tensor
    v: Tensor
    """[T, v_heads, v_dim]."""
    g: Tensor
    """Logarithm of the decay: [T, v_heads, 1], or [T, v_heads, k_dim] where every channel has its own."""
    beta: Tensor
    """[T, v_heads]: the update rate."""

    def of(self, begin: int, end: int) -> Heads:
        return Heads(*(part[begin:end] for part in self))


Step = Callable[[Heads, Tensor, StateBatch, Tensor, Tensor], None]
"""One token of each of many sequences: what it reads, which tokens, their states, the cache, and what it gives."""


def delta_net(
    projected: Tensor,
    gates: Tensor,
    layout: DeltaLayout,
    weights: DeltaWeights,
    batch: AttentionBatch,
    conv_cache: Tensor,
    state_cache: Tensor,
    step: Step | None = None,
) -> Tensor:
    """See `Ops.delta_net`. `step`: in place of `_step`."""
    states = batch.states
    assert states is not None, "a recurrent layer needs to know where its states are"
    tokens = len(projected)
    inputs, z, b, a = split(projected, gates, layout)
    mixed = convolve(inputs, weights.conv, batch.positions, states, conv_cache)
    heads = _heads(mixed, b, a, layout, weights)
    out = torch.empty(tokens, layout.v_heads, layout.v_dim, device=projected.device)
    first, last = states.first.tolist(), states.last.tolist()
    single = [t for t in range(tokens) if first[t] == last[t] == t]
    if single:
        (step or _step)(heads, torch.tensor(single, device=out.device), states, state_cache, out)
    writes = states.writes.tolist()
    begin = 0
    while begin < tokens:
        end = last[begin] + 1
        if first[begin] == begin and end > begin + 1:
            _run(heads.of(begin, end), int(states.reads[begin]), writes[begin:end], state_cache, out[begin:end])
        begin = max(end, begin + 1)
    normed = out * torch.rsqrt(out.pow(2).mean(-1, keepdim=True) + weights.eps) * weights.norm
    z = z.view_as(out).float()
    gated = normed * (z.sigmoid() if layout.sigmoid_gate else F.silu(z))
    return gated.view(tokens, -1).to(projected.dtype)


def split_gate(qkv: Tensor, layout: HeadLayout) -> tuple[Tensor, Tensor]:
    """See `Ops.split_gate`."""
    tokens, size = len(qkv), layout.heads * layout.head_dim
    pairs = qkv[:, : 2 * size].reshape(tokens, layout.heads, 2, layout.head_dim)
    query, gate = (part.reshape(tokens, size) for part in pairs.unbind(2))
    return torch.cat((query, qkv[:, 2 * size :]), -1), gate


def split(projected: Tensor, gates: Tensor, layout: DeltaLayout) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Inputs of the convolution [T, channels], output gates [T, v_heads * v_dim], update rates and decays."""
    tokens, groups, ratio = len(projected), layout.k_heads, layout.v_heads // layout.k_heads
    if not layout.grouped:
        b, a = torch.split(gates, [layout.v_heads, layout.decays], -1)
        return projected[:, : layout.channels], projected[:, layout.channels :].contiguous(), b, a
    sizes = [layout.k_dim, layout.k_dim, ratio * layout.v_dim, ratio * layout.v_dim]
    parts = torch.split(projected.reshape(tokens, groups, -1), sizes, -1)
    q, k, v, z = (part.reshape(tokens, -1) for part in parts)
    b, a = (part.reshape(tokens, -1) for part in gates.reshape(tokens, groups, -1).chunk(2, -1))
    return torch.cat((q, k, v), -1), z, b, a


def convolve(
    inputs: Tensor, weight: Tensor, positions: Tensor, states: StateBatch, cache: Tensor, bias: Tensor | None = None
) -> Tensor:
    """The convolution and silu of every token, float32; the last inputs of tokens that write a state are kept."""
    width, tokens = weight.shape[1], len(inputs)
    at = torch.arange(tokens, device=inputs.device)
    first, reads, writes = states.first.long(), states.reads.long(), states.writes.long()
    taps: list[Tensor] = []
    for back in range(width - 1, -1, -1):
        inside = (at - back >= first).unsqueeze(1)
        before = cache[reads, (positions - back) % width]
        known = ((reads > 0) & (positions >= back)).unsqueeze(1)
        taps.append(torch.where(inside, inputs[(at - back).clamp_min(0)], torch.where(known, before, 0)))
    windows = torch.stack(taps, -1)
    kept = torch.nonzero(writes > 0).squeeze(1)
    for back in range(width - 1):  # what the next token needs
        there = kept[positions[kept] >= back]
        place = (positions[there] - back) % width
        cache[writes[there], place] = windows[there, :, width - 1 - back].to(cache.dtype)
    mixed = (windows.float() * weight).sum(-1)
    return F.silu(mixed if bias is None else mixed + bias)


def _heads(mixed: Tensor, b: Tensor, a: Tensor, layout: DeltaLayout, weights: DeltaWeights) -> Heads:
    keys, ratio = layout.k_heads * layout.k_dim, layout.v_heads // layout.k_heads
    q, k = (part.reshape(-1, layout.k_heads, layout.k_dim) for part in mixed[:, : 2 * keys].chunk(2, -1))
    q, k = (part * torch.rsqrt(part.pow(2).sum(-1, keepdim=True) + 1e-6) for part in (q, k))
    q, k = (part.repeat_interleave(ratio, 1) for part in (q * layout.k_dim**-0.5, k))
    v = mixed[:, 2 * keys :].reshape(-1, layout.v_heads, layout.v_dim)
    slopes = (a.float() + weights.decay_bias).view(len(a), layout.v_heads, -1)
    rates = weights.decay.unsqueeze(-1)
    g = layout.lowest * torch.sigmoid(-rates * slopes) if layout.lowest else rates * F.softplus(slopes)
    return Heads(q, k, v, g, b.float().sigmoid())


def _step(heads: Heads, at: Tensor, states: StateBatch, cache: Tensor, out: Tensor) -> None:
    """One token of each of many sequences."""
    reads, writes = states.reads[at].long(), states.writes[at].long()
    state = cache[reads]
    state[reads == 0] = 0.0
    q, k, v, g, beta = (part[at] for part in heads)
    state, out[at] = _advance(state, q, k, v, g, beta)
    kept = torch.nonzero(writes > 0).squeeze(1)
    cache[writes[kept]] = state[kept]


def _advance(state: Tensor, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor) -> tuple[Tensor, Tensor]:
    """States [..., heads, k_dim, v_dim] behind one token each, and what they give."""
    state = state * g.exp().unsqueeze(-1)
    change = (v - (k.unsqueeze(-2) @ state).squeeze(-2)) * beta.unsqueeze(-1)
    state = state + k.unsqueeze(-1) * change.unsqueeze(-2)
    return state, (q.unsqueeze(-2) @ state).squeeze(-2)


def _run(heads: Heads, read: int, writes: list[int], cache: Tensor, out: Tensor) -> None:
    """Several tokens of one sequence."""
    state = cache[read].clone() if read else torch.zeros_like(cache[0])
    tokens = len(writes)
    if tokens <= _SHORT:
        for t, slot in enumerate(writes):
            state, out[t] = _advance(state, *(part[t] for part in heads))
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
    """A chunk of tokens by matrix products: the state behind it, and what its tokens give [T, heads, v_dim]."""
    q, k, v, g, beta = (part.transpose(0, 1) for part in heads)  # [heads, T, ...]
    total = g.cumsum(1)
    scaled = k * beta.unsqueeze(-1)
    both = torch.cat((v * beta.unsqueeze(-1), scaled * total.exp()), -1)
    if total.shape[-1] == 1:
        decay = (total - total.transpose(-1, -2)).tril().exp().tril()
        system, scores = ((part @ k.transpose(-1, -2)) * decay for part in (scaled, q))
    else:
        system, scores = _decayed_products(torch.stack((scaled, q)), k, total)
    solved = torch.linalg.solve_triangular(system, both, upper=False, unitriangular=True)
    values, keys = torch.split(solved, [v.shape[-1], k.shape[-1]], -1)
    values = values - keys @ state
    out = (q * total.exp()) @ state + scores @ values
    late = (total[:, -1:] - total).exp()
    state = state * total[:, -1].exp().unsqueeze(-1) + (k * late).transpose(-1, -2) @ values
    return state, out.transpose(0, 1)


def _decayed_products(rows: Tensor, k: Tensor, total: Tensor) -> Tensor:
    """rows_i . k_j with each channel times exp(total_i - total_j), and zero for j > i: [parts, heads, T, T].

    Taking the exponential of a difference apart would overflow where keys decay fast. In blocks of few tokens it is
    taken whole; a block and the tokens before it meet at the block's beginning, on either side of which it is at most
    one."""
    tokens = k.shape[1]
    found = rows.new_zeros(*rows.shape[:-1], tokens)
    for begin in range(0, tokens, _BLOCK):
        here = slice(begin, min(begin + _BLOCK, tokens))
        lag = (total[:, here].unsqueeze(2) - total[:, here].unsqueeze(1)).clamp_max(0).exp()
        inside = (rows[:, :, here].unsqueeze(3) * k[:, here].unsqueeze(1) * lag).sum(-1)
        found[:, :, here, here] = inside.tril()
        if begin:
            middle = total[:, begin - 1 : begin]
            late = rows[:, :, here] * (total[:, here] - middle).exp()
            early = k[:, :begin] * (middle - total[:, :begin]).exp()
            found[:, :, here, :begin] = late @ early.transpose(-1, -2)
    return found
