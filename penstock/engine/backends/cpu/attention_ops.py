"""Rotation, cache and attention on the native CPU library.

`rope_and_cache` rotates the queries inside `qkv` and returns a view of them, which `attention` reads with its row
stride. Views of batches and caches are checked once and kept.
"""

from __future__ import annotations

import dataclasses
from ctypes import byref

import torch
from torch import Tensor

from penstock.engine.backends.cpu.attention_views import BatchView, CacheView, set_norms, set_smoothing
from penstock.engine.backends.cpu.layout import CACHE_CODES, LayoutError, dtype_code, need, need_contiguous
from penstock.engine.backends.cpu.native import AttentionArgs, Handle, LatentArgs, RopeArgs
from penstock.engine.backends.cpu.native_ops import NativeOps
from penstock.engine.backends.interface import (
    FP8,
    INT8,
    SCALE_DTYPE,
    AttentionBatch,
    HeadLayout,
    KeySmoothing,
    KVScales,
    LatentAdditions,
    LatentLayout,
    LatentWeights,
    OverRanks,
)
from penstock.engine.backends.reference.latent import absorbed_attention, keep
from penstock.engine.backends.reference.ops import mean_squares

_MAX_CACHES = 1024
"""More layers than any model has; caches that are gone are forgotten beyond this."""


class AttentionOps(NativeOps):
    """See `Ops`."""

    def __init__(self, handle: Handle) -> None:
        super().__init__(handle)
        self._last_batch: BatchView | None = None
        self._caches: dict[object, CacheView] = {}

    def norm_rows(
        self, qkv: Tensor, layout: HeadLayout, q_norm: Tensor, k_norm: Tensor, eps: float, over_ranks: OverRanks | None
    ) -> Tensor:
        need_contiguous(qkv, "qkv")
        tokens, width = qkv.shape
        queries, keys = layout.heads * layout.head_dim, layout.kv_heads * layout.head_dim
        for norm, size in ((q_norm, queries), (k_norm, keys)):
            need_contiguous(norm, "q_norm and k_norm")
            if norm.shape != (size,) or norm.dtype is not q_norm.dtype:
                raise LayoutError(f"a norm of {size} in {q_norm.dtype} is needed, got {norm.dtype} {norm.shape}")
        means = None if over_ranks is None else over_ranks(mean_squares(qkv, layout))
        self._lib.pk_norm_rows(
            self._ctx, qkv.data_ptr(), q_norm.data_ptr(), k_norm.data_ptr(),
            None if means is None else means.data_ptr(), tokens, width, queries, keys, eps,
            dtype_code(qkv, "qkv"), dtype_code(q_norm, "q_norm"),
        )  # fmt: skip
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
        heads, dim = layout.heads, layout.head_dim
        tokens, width = qkv.shape
        need_contiguous(qkv, "qkv")
        if width != layout.rows * dim or dim % 2:
            raise LayoutError(f"qkv is {tuple(qkv.shape)}, which does not split into the heads of {layout}")
        view = self._batch_view(batch)
        if view.tokens != tokens:
            raise LayoutError(f"{tokens} tokens, but positions and slots for {view.tokens}")
        need(cos_sin, "cos_sin", torch.float32)
        if cos_sin.shape[1] % 2 or cos_sin.shape[1] > dim:
            raise LayoutError(f"cos_sin rotates {cos_sin.shape[1]} dimensions of heads that have {dim}")
        args = RopeArgs.from_buffer_copy(self._cache_view(k_cache, v_cache, layout, kv_scales).rope)
        args.qkv, args.dtype, args.tokens = qkv.data_ptr(), dtype_code(qkv, "qkv"), tokens
        args.cos_sin, args.max_positions, args.rotary = cos_sin.data_ptr(), *cos_sin.shape
        args.positions, args.slots = view.positions, view.slots
        args.eps = eps
        if q_norm is not None or k_norm is not None:
            set_norms(args, q_norm, k_norm, layout)
        if key_smoothing is not None:
            set_smoothing(args, key_smoothing, layout)
        problem = self._lib.pk_rope_and_cache(self._ctx, byref(args))
        if problem:
            raise LayoutError(
                f"a position is outside the rotary table of {cos_sin.shape[0]} rows"
                if problem == 1
                else f"a slot is outside the cache of {k_cache.shape[0]} blocks"
            )
        return qkv.as_strided((tokens, heads, dim), (width, dim, 1))

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
        heads, dim = layout.heads, layout.head_dim
        step, head_step, one = q.stride()
        if q.shape[1:] != (heads, dim) or one != 1 or head_step != dim:
            raise LayoutError(f"q must be [T, {heads}, {dim}] with dense rows, got {tuple(q.shape)} {q.stride()}")
        view = self._batch_view(batch)
        args = AttentionArgs.from_buffer_copy(self._cache_view(k_cache, v_cache, layout, kv_scales).attention)
        out = torch.empty((q.shape[0], heads * dim), dtype=q.dtype)
        args.fixed = self.batch_invariant
        if sinks is not None:
            need(sinks, "sinks", torch.float32)
            if sinks.shape != (heads,):
                raise LayoutError(f"sinks must be [{heads}], got {tuple(sinks.shape)}")
            args.sinks = sinks.data_ptr()
        args.q, args.out, args.q_stride, args.dtype = q.data_ptr(), out.data_ptr(), step, dtype_code(q, "q")
        args.query_starts, args.context_lens, args.rows = view.query_starts, view.context_lens, view.rows
        args.block_tables, args.table_stride, args.sequences = view.block_tables, view.table_stride, view.sequences
        self._lib.pk_attention(self._ctx, byref(args))
        return out

    def latent_attention(
        self,
        q: Tensor,
        kv: Tensor | None,
        layout: LatentLayout,
        weights: LatentWeights,
        cos_sin: Tensor,
        batch: AttentionBatch,
        cache: Tensor,
        scales: Tensor | None = None,
        added: LatentAdditions | None = None,
        sinks: Tensor | None = None,
    ) -> Tensor:
        """Decodes natively. Prompts in PyTorch, whose matrix products suit them, and all tokens with additions or
        sinks."""
        decodes, tokens = batch.num_decodes, q.shape[0]
        if added is not None or sinks is not None:
            alone = self.batch_invariant and decodes == tokens
            return absorbed_attention(q, kv, layout, weights, cos_sin, batch, cache, scales, added, sinks, alone)
        if not decodes:
            return super().latent_attention(q, kv, layout, weights, cos_sin, batch, cache, scales)
        out = torch.empty((tokens, layout.heads * layout.value), dtype=q.dtype)
        prompts = dataclasses.replace(
            batch, positions=batch.positions[decodes:], slots=batch.slots[decodes:], rows=batch.rows[decodes:],
            query_starts=batch.query_starts[decodes:] - decodes, context_lens=batch.context_lens[decodes:],
            num_decodes=0,
        )  # fmt: skip
        first, later = (None, None) if kv is None else (kv[:decodes], kv[decodes:])
        if decodes < tokens:
            keep(later, layout, weights, cos_sin, prompts, cache, scales)
        self._decode_latents(q[:decodes], first, layout, weights, cos_sin, batch, cache, scales, out)
        if decodes < tokens:
            out[decodes:] = super().latent_attention(
                q[decodes:], later, layout, weights, cos_sin, prompts, cache, scales
            )
        return out

    def _decode_latents(
        self,
        q: Tensor,
        kv: Tensor | None,
        layout: LatentLayout,
        weights: LatentWeights,
        cos_sin: Tensor,
        batch: AttentionBatch,
        cache: Tensor,
        scales: Tensor | None,
        out: Tensor,
    ) -> None:
        view, code = self._batch_view(batch), dtype_code(q, "q")
        need_contiguous(cache, "cache")
        need_contiguous(weights.norm, "norm")
        need(cos_sin, "cos_sin", torch.float32)
        need(weights.up, "up", q.dtype)
        if (scales is not None) != (cache.dtype in (INT8, FP8)):
            raise LayoutError(f"a cache of {cache.dtype} {'needs' if scales is None else 'has no'} scales")
        if scales is not None:
            need(scales, "scales", SCALE_DTYPE if cache.dtype == INT8 else torch.float32)
        if q.stride(1) != 1:
            raise LayoutError(f"queries {q.dtype} {q.stride()} must be dense rows")
        if kv is not None and (kv.stride(1) != 1 or kv.dtype is not q.dtype):
            raise LayoutError(f"queries {q.dtype} {q.stride()} and latents {kv.dtype} {kv.stride()} must be dense rows")
        if q.shape[1] != layout.heads * layout.query or cache.shape[2] != layout.cached:
            raise LayoutError(f"q is {tuple(q.shape)} and the cache {tuple(cache.shape)}, which do not fit {layout}")
        args = LatentArgs(
            q=q.data_ptr(), kv=None if kv is None else kv.data_ptr(), norm=weights.norm.data_ptr(),
            up=weights.up.data_ptr(), out=out.data_ptr(), cache=cache.data_ptr(),
            scales=None if scales is None else scales.data_ptr(),
            cos_sin=cos_sin.data_ptr(), positions=view.positions, slots=view.slots, context_lens=view.context_lens,
            rows=view.rows, block_tables=view.block_tables, tokens=q.shape[0], q_stride=q.stride(0),
            kv_stride=0 if kv is None else kv.stride(0), table_stride=view.table_stride,
            max_positions=cos_sin.shape[0], num_slots=cache.shape[0] * cache.shape[1], heads=layout.heads,
            latent=layout.latent, plain=layout.plain, rotary=layout.rotary, value=layout.value,
            block_size=cache.shape[1], interleaved=layout.interleaved, dtype=code,
            cache_dtype=CACHE_CODES[cache.dtype], norm_dtype=dtype_code(weights.norm, "norm"), scale=layout.scale,
            eps=weights.eps,
        )  # fmt: skip
        problem = self._lib.pk_latent_attention(self._ctx, byref(args))
        if problem:
            raise LayoutError(
                f"a position is outside the rotary table of {cos_sin.shape[0]} rows"
                if problem == 1
                else f"a slot is outside the cache of {cache.shape[0]} blocks"
            )

    def _batch_view(self, batch: AttentionBatch) -> BatchView:
        """Checked once per step: every layer of a step hands over the same tensors."""
        view = self._last_batch
        if view is None or not view.is_of(batch):
            view = self._last_batch = BatchView(batch)
        return view

    def _cache_view(
        self, k_cache: Tensor, v_cache: Tensor, layout: HeadLayout, kv_scales: KVScales | None
    ) -> CacheView:
        """Checked once per layer and cache."""
        scales = None if kv_scales is None else (kv_scales[0].data_ptr(), kv_scales[1].data_ptr())
        key = (k_cache.data_ptr(), v_cache.data_ptr(), k_cache.shape, k_cache.stride(), k_cache.dtype, layout, scales)
        view = self._caches.get(key)
        if view is None or v_cache.stride() != view.v_stride or v_cache.dtype is not k_cache.dtype:
            if len(self._caches) >= _MAX_CACHES:
                self._caches.clear()
            view = self._caches[key] = CacheView(k_cache, v_cache, layout, kv_scales)
        return view
