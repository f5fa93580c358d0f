"""`Ops` in plain PyTorch: correct on any device and dtype, the definition the fast backends are tested against.

Attention gathers each sequence's blocks into a dense tensor, so it moves more memory than the native kernels;
decodes are padded to the longest context and done in one call.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from penstock.engine.backends.interface import (
    FP8,
    FP8_MAX,
    INT8,
    INT8_MAX,
    AttentionBatch,
    Clip,
    HeadLayout,
    KeySmoothing,
    KVScales,
    Link,
    OverRanks,
    Pointwise,
    Xielu,
)
from penstock.engine.backends.reference import filters, masks
from penstock.engine.backends.reference.mixers import PlainMixers
from penstock.engine.backends.reference.noise import gumbel


def _layer_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    wide = x.float()
    return _rms(wide - wide.mean(-1, keepdim=True), weight, eps, x.dtype)


def _rms(x: Tensor, weight: Tensor, eps: float, dtype: torch.dtype | None = None) -> Tensor:
    wide = x.float()
    wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
    return (wide * weight.float()).to(dtype or x.dtype)


class ReferenceOps(PlainMixers):
    """See `Ops`."""

    wide_stream = True
    samples_any_dtype = False
    batch_invariant = False

    def widen(self, x: Tensor) -> Tensor:
        return x.float()

    def store_rows(self, x: Tensor, table: Tensor, at: Tensor | None = None) -> None:
        if at is None:
            table[: len(x)] = x
        else:
            table[at] = x.to(table.dtype)

    def rms_norm(self, x: Tensor, weight: Tensor | None, eps: float, dtype: torch.dtype | None = None) -> Tensor:
        return x.to(dtype or x.dtype, copy=True) if weight is None else _rms(x, weight, eps, dtype)

    def add_rms_norm(
        self, x: Tensor, residual: Tensor, weight: Tensor | None, eps: float, x_weight: Tensor | None = None
    ) -> Tensor:
        residual.add_(x if x_weight is None else _rms(x, x_weight, eps))
        return self.rms_norm(residual, weight, eps, x.dtype)

    def centre(self, residual: Tensor, *added: Tensor) -> None:
        for x in added:
            residual.add_(x)
        residual.sub_(residual.float().mean(-1, keepdim=True))

    def silu_mul(self, gate_up: Tensor) -> Tensor:
        gate, up = gate_up.chunk(2, dim=-1)
        return F.silu(gate) * up

    def gelu_mul(self, gate_up: Tensor) -> Tensor:
        gate, up = gate_up.chunk(2, dim=-1)
        return F.gelu(gate, approximate="tanh") * up

    def clamped_swiglu(self, gate_up: Tensor, alpha: float, limit: float) -> Tensor:
        gate, up = gate_up.chunk(2, dim=-1)
        gate, up = gate.clamp(max=limit), up.clamp(min=-limit, max=limit)
        return (up + 1) * (gate * torch.sigmoid(gate * alpha))

    def bounded_silu(self, gate_up: Tensor, limit: float) -> Tensor:
        gate, up = gate_up.chunk(2, dim=-1)
        return F.silu(gate).clamp(max=limit) * up.clamp(-limit, limit)

    def pointwise(self, x: Tensor, function: Pointwise) -> Tensor:
        match function:
            case "relu2":
                return F.relu(x).square()
            case "plain_gelu" | "plain_gelu_tanh":
                return F.gelu(x, approximate="none" if function == "plain_gelu" else "tanh")
            case Clip(limit):
                return x.clamp(-limit, limit)
            case Xielu(positive, negative, beta, eps):
                wide = x if x.dtype is torch.float64 else x.float()
                bent = torch.expm1(wide.clamp(max=eps)) - wide
                bent = torch.where(wide > 0, positive * wide.square(), negative * bent)
                return (bent + beta * wide).to(x.dtype)

    def add_row(self, x: Tensor, row: Tensor) -> None:
        x.add_(row)

    def chain(self, links: Sequence[Link]) -> None:
        """See `Ops`: products are separate here."""

    def norm_rows(
        self, qkv: Tensor, layout: HeadLayout, q_norm: Tensor, k_norm: Tensor, eps: float, over_ranks: OverRanks | None
    ) -> Tensor:
        means = mean_squares(qkv, layout)
        if over_ranks is not None:
            means = over_ranks(means)
        q, k, _ = _rows(qkv, layout)
        for part, norm, mean in ((q, q_norm, means[:, :1]), (k, k_norm, means[:, 1:])):
            part.copy_(part.float() * torch.rsqrt(mean + eps) * norm.float())
        return qkv

    def rope_and_cache(
        self,
        qkv: Tensor,
        layout: HeadLayout,
        cos_sin: Tensor,
        batch: AttentionBatch,
        k_cache: Tensor,
        v_cache: Tensor,
        q_norm: Tensor | None,
        k_norm: Tensor | None,
        eps: float,
        kv_scales: KVScales | None = None,
        key_smoothing: KeySmoothing | None = None,
    ) -> Tensor:
        heads, kv_heads, dim = layout.heads, layout.kv_heads, layout.head_dim
        q, k, v = _heads(qkv, layout)
        norm = _layer_norm if layout.centred_norms else _rms
        if layout.normed_values:
            v = _rms(v, v.new_ones(dim), eps)
        if q_norm is not None:
            q = norm(q, q_norm, eps)
        if k_norm is not None:
            k = norm(k, k_norm, eps)
        half = cos_sin.shape[1] // 2
        table = cos_sin[batch.positions].unsqueeze(1)
        cos, sin = table[..., :half], table[..., half:]
        rotate = _rotate_interleaved if layout.interleaved else _rotate
        q, k = (rotate(x, cos, sin) for x in (q, k))
        if key_smoothing is not None:
            q = (q.float() * key_smoothing.scale.repeat_interleave(heads // kv_heads, 0)).to(q.dtype)
            if layout.shared != "both":
                k = (k.float() - key_smoothing.centre) / key_smoothing.scale
        if layout.shared == "both":
            return q
        block_size = k_cache.shape[2]
        block, offset = batch.slots // block_size, batch.slots % block_size
        store(k, k_cache, kv_scales and kv_scales[0], block, offset)
        store(v, v_cache, kv_scales and kv_scales[1], block, offset)
        return q

    def attention(
        self,
        q: Tensor,
        layout: HeadLayout,
        batch: AttentionBatch,
        k_cache: Tensor,
        v_cache: Tensor,
        kv_scales: KVScales | None = None,
        sinks: Tensor | None = None,
    ) -> Tensor:
        out = torch.empty_like(q)
        k_scales, v_scales = kv_scales or (None, None)
        keys, values = CachedBlocks(k_cache, k_scales, q.dtype), CachedBlocks(v_cache, v_scales, q.dtype)
        decodes = batch.num_decodes
        if decodes:
            out[:decodes] = _attend_decodes(q[:decodes], layout, batch, keys, values, sinks)
        starts, contexts = batch.query_starts.tolist(), batch.context_lens.tolist()
        for i in range(decodes, len(contexts)):
            begin, end = starts[i], starts[i + 1]
            table = batch.block_tables[batch.rows[i]]
            out[begin:end] = _attend_one(q[begin:end], layout, contexts[i], table, keys, values, sinks)
        return out.view(q.shape[0], -1)

    def mask_logits(self, logits: Tensor, at: Tensor, bits: Tensor) -> None:
        masks.mask_logits(logits, at, bits)

    def argmax(self, logits: Tensor) -> Tensor:
        return logits.argmax(-1)

    def filter_thresholds(
        self, logits: Tensor, temperatures: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor
    ) -> Tensor:
        return filters.thresholds(logits, temperatures, top_k, top_p, min_p)

    def gumbel_argmax(
        self, logits: Tensor, temperatures: Tensor, keys: Tensor, thresholds: Tensor | None = None
    ) -> Tensor:
        if thresholds is not None:
            logits = filters.drop_below(logits, temperatures, thresholds)
        random = temperatures > 0
        scaled = logits / torch.where(random, temperatures, 1.0).unsqueeze(1)
        noise = gumbel(keys, logits.shape[1]).masked_fill_(~random.unsqueeze(1), 0.0)
        return scaled.add_(noise).argmax(-1)


def _heads(qkv: Tensor, layout: HeadLayout) -> Sequence[Tensor]:
    """Queries, keys and values of each token by heads: views."""
    rows = qkv.view(qkv.shape[0], layout.rows, layout.head_dim)
    if layout.shared == "both":
        return rows, rows[:, :0], rows[:, :0]
    if layout.shared == "values":
        q, k = torch.split(rows, [layout.heads, layout.kv_heads], dim=1)
        return q, k, k
    return torch.split(rows, [layout.heads, layout.kv_heads, layout.kv_heads], dim=1)


def _rows(qkv: Tensor, layout: HeadLayout) -> Sequence[Tensor]:
    """All queries, keys and values of each token: views."""
    q, k = layout.heads * layout.head_dim, layout.kv_heads * layout.head_dim
    return torch.split(qkv, [q, k, k], dim=1)


def mean_squares(qkv: Tensor, layout: HeadLayout) -> Tensor:
    """float32 [T, 2]: of each token's queries, and of its keys."""
    q, k, _ = _rows(qkv, layout)
    return torch.stack([part.float().pow(2).mean(-1) for part in (q, k)], dim=1)


def store(x: Tensor, cache: Tensor, scales: Tensor | None, block: Tensor, offset: Tensor) -> None:
    """Write `x` [T, kv_heads, head_dim] into the cache, as the cache keeps it."""
    if cache.dtype == INT8:
        assert scales is not None
        scale = (x.float().abs().amax(-1) / INT8_MAX).to(scales.dtype)
        scales[block, :, offset] = scale
        divisor = torch.where(scale > 0, scale.float(), 1.0).unsqueeze(-1)
        x = (x.float() / divisor).round()
    elif scales is not None:
        x = (x.float() / scales[:, None]).clamp(-FP8_MAX, FP8_MAX)
    stored = x.to(cache.dtype)
    if cache.dtype == FP8:  # indexing knows bytes on every device, FP8 not
        cache, stored = cache.view(torch.uint8), stored.view(torch.uint8)
    cache[block, :, offset] = stored


@dataclass(frozen=True, slots=True)
class CachedBlocks:
    """Keys or values of a layer, read as numbers of `dtype`."""

    cache: Tensor
    scales: Tensor | None
    dtype: torch.dtype

    def gather(self, table: Tensor) -> Tensor:
        """Blocks [..., n] as [..., kv_heads, n * block_size, head_dim]."""
        table = table.long()
        raw = self.cache.view(torch.uint8)[table].view(FP8) if self.cache.dtype == FP8 else self.cache[table]
        if self.scales is not None:
            scales = self.scales[table] if self.scales.dim() == 3 else self.scales.unsqueeze(1)
            raw = raw.float() * scales.float().unsqueeze(-1)
        blocks = raw.to(self.dtype).transpose(-4, -3)
        return blocks.reshape(*blocks.shape[:-3], -1, blocks.shape[-1])


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotates the first dimensions, as many as the table has; the others stay."""
    wide, half = x.float(), cos.shape[-1]
    low, high, rest = wide[..., :half], wide[..., half : 2 * half], wide[..., 2 * half :]
    return torch.cat((low * cos - high * sin, high * cos + low * sin, rest), dim=-1).to(x.dtype)


def _rotate_interleaved(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    wide, rotary = x.float(), 2 * cos.shape[-1]
    low, high = wide[..., :rotary:2], wide[..., 1:rotary:2]
    turned = torch.stack((low * cos - high * sin, high * cos + low * sin), dim=-1).flatten(-2)
    return torch.cat((turned, wide[..., rotary:]), dim=-1).to(x.dtype)


def _oldest(layout: HeadLayout, position: Tensor) -> Tensor:
    """The first position that a token sees, of a layout with a window; may be negative."""
    assert layout.window is not None
    return position - (position % layout.window if layout.chunked else layout.window - 1)


def _attend_decodes(
    q: Tensor, layout: HeadLayout, batch: AttentionBatch, keys: CachedBlocks, values: CachedBlocks, sinks: Tensor | None
) -> Tensor:
    count, block_size = q.shape[0], keys.cache.shape[2]
    width = -(-batch.max_context // block_size)
    tables = batch.block_tables[batch.rows[:count].long(), :width]
    key_at = torch.arange(width * block_size, device=q.device)
    last = batch.context_lens[:count].unsqueeze(1) - 1
    visible = key_at <= last
    if layout.window is not None:
        visible &= key_at >= _oldest(layout, last)
    # What is invisible holds anything: entries of the table too, and a weight of zero does not silence a NaN.
    tables = tables * visible.view(count, width, block_size).any(-1)
    k, v = (cached.gather(tables).masked_fill(~visible[:, None, :, None], 0) for cached in (keys, values))
    grouped = q.view(count, layout.kv_heads, -1, layout.head_dim)
    sinks = None if sinks is None else sinks.view(layout.kv_heads, -1)
    out = _softmax_attention(grouped, k, v, visible[:, None, None], layout, sinks)
    return out.reshape(count, layout.heads, layout.head_dim)


def _attend_one(
    q: Tensor,
    layout: HeadLayout,
    context: int,
    table: Tensor,
    keys: CachedBlocks,
    values: CachedBlocks,
    sinks: Tensor | None,
) -> Tensor:
    block_size = keys.cache.shape[2]
    behind = 0 if layout.window is None else max(0, context - q.shape[0] - layout.window + 1) // block_size
    table = table[behind : -(-context // block_size)]
    first = behind * block_size
    k, v = keys.gather(table)[:, : context - first], values.gather(table)[:, : context - first]
    group = layout.heads // layout.kv_heads
    k, v = k.repeat_interleave(group, 0), v.repeat_interleave(group, 0)
    key_at = torch.arange(first, context, device=q.device)
    query_at = torch.arange(context - q.shape[0], context, device=q.device).unsqueeze(1)
    visible = key_at <= query_at
    if layout.window is not None:
        visible &= key_at >= _oldest(layout, query_at)
    sinks = None if sinks is None else sinks.view(-1, 1)
    return _softmax_attention(q.transpose(0, 1), k, v, visible, layout, sinks).transpose(0, 1)


def _softmax_attention(
    q: Tensor, k: Tensor, v: Tensor, visible: Tensor, layout: HeadLayout, sinks: Tensor | None
) -> Tensor:
    """`sinks`: broadcast over the scores but their last axis."""
    if layout.softcap is None and sinks is None:
        return F.scaled_dot_product_attention(q, k, v, attn_mask=visible, scale=layout.scale)
    scores = (q.float() @ k.float().transpose(-1, -2)) * layout.scale
    if layout.softcap is not None:
        scores = scores.div_(layout.softcap).tanh_().mul_(layout.softcap)
    scores.masked_fill_(~visible, float("-inf"))
    if sinks is not None:
        sink = sinks.float().expand(*scores.shape[:-1]).unsqueeze(-1)
        weights = torch.cat((scores, sink), -1).softmax(-1)[..., :-1]
    else:
        weights = scores.softmax(-1)
    return (weights @ v.float()).to(q.dtype)
