"""Attention over cached latents (MLA) in plain PyTorch: the definition, and what devices without a kernel run.

Two ways to the same result. *Absorbed*: queries are taken into the space of the latents, where one key serves all
heads, and what they see is taken out of it again; nothing is made per cached token, which is right for few queries.
*Expanded*: every head's keys and values are made from the latents; right for many queries, since heads are smaller than
latents.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor
from torch.nn import functional as F

from penstock.engine.backends.interface import (
    FP8,
    FP8_MAX,
    INT8,
    INT8_MAX,
    AttentionBatch,
    LatentAdditions,
    LatentLayout,
    LatentWeights,
)

_EXPANDED_BYTES = 64 << 20
"""Keys and values that are made at a time, at most."""


def latent_attention(
    q: Tensor,
    kv: Tensor | None,
    layout: LatentLayout,
    weights: LatentWeights,
    cos_sin: Tensor,
    batch: AttentionBatch,
    cache: Tensor,
    scales: Tensor | None,
    added: LatentAdditions | None = None,
    sinks: Tensor | None = None,
    *,
    alone: bool = False,
) -> Tensor:
    """See `Ops`. `alone`: with sinks, tokens that decode one at a time."""
    if sinks is not None:
        alone = alone and batch.num_decodes == q.shape[0]
        return absorbed_attention(q, kv, layout, weights, cos_sin, batch, cache, scales, added, sinks, alone)
    if added is not None:
        return absorbed_attention(q, kv, layout, weights, cos_sin, batch, cache, scales, added)
    plain, rotated = prepare(q, kv, layout, weights, cos_sin, batch, cache, scales)
    out = q.new_empty(q.shape[0], layout.heads, layout.value)
    decodes = batch.num_decodes
    if decodes:
        absorbed = absorb(plain[:decodes], rotated[:decodes], layout, weights)
        seen = _attend_decodes(absorbed, layout, batch, cache, scales)
        out[:decodes] = values_of(seen, layout, weights)
    starts, contexts = batch.query_starts.tolist(), batch.context_lens.tolist()
    for i in range(decodes, len(contexts)):
        new = slice(starts[i], starts[i + 1])
        table = batch.block_tables[batch.rows[i], : -(-contexts[i] // cache.shape[1])]
        latents = gather(cache, scales, table, q.dtype)[: contexts[i]]
        out[new] = _attend_one(plain[new], rotated[new], layout, weights, latents)
    return out.view(q.shape[0], -1)


def absorbed_attention(
    q: Tensor,
    kv: Tensor | None,
    layout: LatentLayout,
    weights: LatentWeights,
    cos_sin: Tensor,
    batch: AttentionBatch,
    cache: Tensor,
    scales: Tensor | None,
    added: LatentAdditions | None,
    sinks: Tensor | None = None,
    alone: bool = False,
) -> Tensor:
    """The same, absorbed for all tokens, perhaps with something added on both sides, or with sinks. `alone`: products
    of one token at a time, so that they do not depend on the others; all tokens decode then."""
    plain, rotated = prepare(q, kv, layout, weights, cos_sin, batch, cache, scales)
    tokens, decodes = q.shape[0], batch.num_decodes
    runs = [slice(i, i + 1) for i in range(tokens)] if alone else [slice(0, tokens)]
    if added is not None:
        added.scale(plain)
    queries = q.new_empty(tokens, layout.heads, layout.latent)
    for run in runs:
        queries[run] = torch.bmm(plain[run].transpose(0, 1), weights.up[:, : layout.plain]).transpose(0, 1)
    if added is not None:
        added.queries(plain, queries)
    absorbed, seen = torch.cat((queries, rotated), -1), torch.empty_like(queries)
    for run in runs if alone else [slice(0, decodes)]:
        if run.stop > run.start:
            lens = batch.context_lens[run]
            some = replace(batch, rows=batch.rows[run], context_lens=lens, max_context=int(lens.max()))
            seen[run] = _attend_decodes(absorbed[run], layout, some, cache, scales, sinks)
    starts, contexts = batch.query_starts.tolist(), batch.context_lens.tolist()
    for i in range(decodes, len(contexts)):
        new = slice(starts[i], starts[i + 1])
        table = batch.block_tables[batch.rows[i], : -(-contexts[i] // cache.shape[1])]
        latents = gather(cache, scales, table, q.dtype)[: contexts[i]]
        seen[new] = _attend_absorbed(absorbed[new], layout, latents, sinks)
    if added is not None:
        added.turn(seen)
    out = q.new_empty(tokens, layout.heads, layout.value)
    for run in runs:
        out[run] = values_of(seen[run], layout, weights)
    if added is not None:
        added.values(seen, out)
    return out.view(tokens, -1)


def prepare(
    q: Tensor,
    kv: Tensor | None,
    layout: LatentLayout,
    weights: LatentWeights,
    cos_sin: Tensor,
    batch: AttentionBatch,
    cache: Tensor,
    scales: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """Store the new tokens; plain and rotated parts of the queries, [T, heads, plain] and [T, heads, rotary]."""
    cos, sin = keep(kv, layout, weights, cos_sin, batch, cache, scales)
    heads = q.view(q.shape[0], layout.heads, layout.query)
    plain, rotary = heads[..., : layout.plain], heads[..., layout.plain :]
    return plain, rotate(rotary, cos.unsqueeze(1), sin.unsqueeze(1), layout.interleaved)


def keep(
    kv: Tensor | None,
    layout: LatentLayout,
    weights: LatentWeights,
    cos_sin: Tensor,
    batch: AttentionBatch,
    cache: Tensor,
    scales: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """Store the new tokens, where there is something to store; what rotates each. What attends to one part of a step
    after the other stores all of it first: a sequence may share blocks with another that fills them in the same
    step."""
    half = layout.rotary // 2
    table = cos_sin[batch.positions]
    cos, sin = table[:, :half], table[:, half:]
    if kv is None:
        return cos, sin
    latent = kv[:, : layout.latent].float()
    latent = latent * torch.rsqrt(latent.pow(2).mean(-1, keepdim=True) + weights.eps)
    latent = (latent * weights.norm.float()).to(kv.dtype)
    key = rotate(kv[:, layout.latent :], cos, sin, layout.interleaved)
    store(torch.cat((latent, key), -1), cache, scales, batch.slots)
    return cos, sin


def rotate(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> Tensor:
    """Rotated pairs, their first numbers before their second ones."""
    wide = x.float()
    low, high = (wide[..., 0::2], wide[..., 1::2]) if interleaved else wide.chunk(2, -1)
    return torch.cat((low * cos - high * sin, high * cos + low * sin), dim=-1).to(x.dtype)


def store(x: Tensor, cache: Tensor, scales: Tensor | None, slots: Tensor) -> None:
    """Write `x` [T, cached] into the cache, as the cache keeps it."""
    if cache.dtype == INT8:
        assert scales is not None
        scale = (x.float().abs().amax(-1) / INT8_MAX).to(scales.dtype)
        scales.view(-1)[slots] = scale
        x = (x.float() / torch.where(scale > 0, scale.float(), 1.0).unsqueeze(-1)).round()
    elif scales is not None:
        x = (x.float() / scales).clamp(-FP8_MAX, FP8_MAX)
    stored, rows = x.to(cache.dtype), cache.view(-1, cache.shape[-1])
    if cache.dtype == FP8:  # indexing knows bytes on every device, FP8 not
        stored, rows = stored.view(torch.uint8), rows.view(torch.uint8)
    rows[slots] = stored


def gather(cache: Tensor, scales: Tensor | None, table: Tensor, dtype: torch.dtype) -> Tensor:
    """Blocks [..., n] as [..., n * block_size, cached], as numbers of `dtype`."""
    table = table.long()
    raw = cache.view(torch.uint8)[table].view(FP8) if cache.dtype == FP8 else cache[table]
    if scales is not None:
        raw = raw.float() * (scales[table].float().unsqueeze(-1) if scales.dim() == 2 else scales)
    return raw.to(dtype).flatten(-3, -2)


def absorb(plain: Tensor, rotated: Tensor, layout: LatentLayout, weights: LatentWeights) -> Tensor:
    """Queries in the space of what is cached: [T, heads, cached]."""
    latent = torch.bmm(plain.transpose(0, 1), weights.up[:, : layout.plain]).transpose(0, 1)
    return torch.cat((latent, rotated), -1)


def values_of(seen: Tensor, layout: LatentLayout, weights: LatentWeights) -> Tensor:
    """Weighted sums of latents [T, heads, latent] as those of values: [T, heads, value]."""
    up = weights.up[:, layout.plain :]
    return torch.bmm(seen.transpose(0, 1), up.transpose(1, 2)).transpose(0, 1)


def attend(q: Tensor, keys: Tensor, values: Tensor, visible: Tensor, scale: float, sinks: Tensor | None) -> Tensor:
    """`sinks` [heads]: `q` is [..., heads, head_dim], `keys` [..., n, head_dim]."""
    if sinks is None:
        return F.scaled_dot_product_attention(q, keys, values, attn_mask=visible, scale=scale)
    scores = (torch.matmul(q.float(), keys.float().transpose(-1, -2)) * scale).masked_fill(~visible, float("-inf"))
    sink = sinks.unsqueeze(-1).expand(*scores.shape[:-1], 1)
    weights = torch.cat((scores, sink), -1).softmax(-1)[..., :-1]
    return torch.matmul(weights, values.float()).to(q.dtype)


def _attend_decodes(
    q: Tensor,
    layout: LatentLayout,
    batch: AttentionBatch,
    cache: Tensor,
    scales: Tensor | None,
    sinks: Tensor | None = None,
) -> Tensor:
    count, block_size = q.shape[0], cache.shape[1]
    width = -(-batch.max_context // block_size)
    tables = batch.block_tables[batch.rows[:count].long(), :width]
    visible = torch.arange(width * block_size, device=q.device) < batch.context_lens[:count].unsqueeze(1)
    # What is invisible holds anything: entries of the table too, and a weight of zero does not silence a NaN.
    tables = tables * visible.view(count, width, block_size).any(-1)
    latents = gather(cache, scales, tables, q.dtype).masked_fill(~visible.unsqueeze(-1), 0)
    values = latents[..., : layout.latent]
    return attend(q, latents, values, visible.unsqueeze(1), layout.scale, sinks)


def _attend_one(
    plain: Tensor, rotated: Tensor, layout: LatentLayout, weights: LatentWeights, latents: Tensor
) -> Tensor:
    """The last tokens of one sequence over all of it: [new, heads, value]."""
    new, context = plain.shape[0], latents.shape[0]
    if not expands(new, context, layout):
        return values_of(_attend_absorbed(absorb(plain, rotated, layout, weights), layout, latents), layout, weights)
    visible = _visible(new, latents)
    q = torch.cat((plain, rotated), -1).transpose(0, 1)
    out = q.new_empty(layout.heads, new, layout.value)
    per_head = context * (layout.query + layout.value) * q.element_size()
    step = max(1, min(layout.heads, _EXPANDED_BYTES // max(1, per_head)))
    for first in range(0, layout.heads, step):
        some = slice(first, min(layout.heads, first + step))
        made = latents[:, : layout.latent] @ weights.up[some].flatten(0, 1).t()
        made = made.view(context, some.stop - some.start, layout.plain + layout.value)
        keys, values = made[..., : layout.plain], made[..., layout.plain :]
        turned = latents[:, None, layout.latent :].expand(-1, keys.shape[1], -1)
        out[some] = F.scaled_dot_product_attention(
            q[some],
            torch.cat((keys, turned), -1).transpose(0, 1),
            values.transpose(0, 1),
            attn_mask=visible,
            scale=layout.scale,
        )
    return out.transpose(0, 1)


def _attend_absorbed(q: Tensor, layout: LatentLayout, latents: Tensor, sinks: Tensor | None = None) -> Tensor:
    """The last tokens of one sequence, in the space of latents: what they have seen [new, heads, latent]."""
    if sinks is not None:
        return attend(
            q, latents, latents[:, : layout.latent], _visible(q.shape[0], latents)[:, None], layout.scale, sinks
        )
    keys, values = latents.expand(layout.heads, -1, -1), latents[:, : layout.latent].expand(layout.heads, -1, -1)
    visible = _visible(q.shape[0], latents)
    seen = F.scaled_dot_product_attention(q.transpose(0, 1), keys, values, attn_mask=visible, scale=layout.scale)
    return seen.transpose(0, 1)


def _visible(new: int, latents: Tensor) -> Tensor:
    """bool [new, context]."""
    context = latents.shape[0]
    return torch.ones(new, context, dtype=torch.bool, device=latents.device).tril(context - new)


def expands(new: int, context: int, layout: LatentLayout) -> bool:
    """Whether making keys and values is less arithmetic than absorbing."""
    made = layout.plain + layout.value
    absorbed = new * context * (layout.cached + layout.latent) + new * made * layout.latent
    return context * made * layout.latent + new * context * (layout.query + layout.value) <= absorbed
