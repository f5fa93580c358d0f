"""`Ops` on the native CPU library, plus the sampling primitives over logits.

Activations and cache may each be float32, float16 or bfloat16, the cache also int8 or FP8; arithmetic is float32.
Inputs must be contiguous: a wrong layout is refused, never copied silently. `rope_and_cache` rotates the queries inside
`qkv` and returns a view of them, which `attention` reads with its row stride.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from ctypes import byref
from typing import Any

import torch
from torch import Tensor

from penstock.engine.backends.cpu.native import AttentionArgs, Handle, LatentArgs, RopeArgs
from penstock.engine.backends.cpu.recorder import NotRecordableError
from penstock.engine.backends.interface import (
    FP8,
    INT8,
    SCALE_DTYPE,
    AttentionBatch,
    DeltaLayout,
    DeltaWeights,
    HeadLayout,
    KeySmoothing,
    KVScales,
    LatentAdditions,
    LatentLayout,
    LatentWeights,
    MambaLayout,
    MambaWeights,
    OverRanks,
    StateBatch,
)
from penstock.engine.backends.reference import delta, filters
from penstock.engine.backends.reference.latent import with_additions
from penstock.engine.backends.reference.mixers import PlainMixers
from penstock.engine.backends.reference.ops import mean_squares
from penstock.errors import PenstockError

DTYPE_CODES = {torch.float32: 0, torch.float16: 1, torch.bfloat16: 2}
_CACHE_CODES = {**DTYPE_CODES, INT8: 3, FP8: 4}


_BATCH_DTYPES = {
    "positions": torch.int64, "slots": torch.int64, "query_starts": torch.int32, "context_lens": torch.int32,
    "rows": torch.int32, "block_tables": torch.int32,
}  # fmt: skip
_MAX_CACHES = 1024
"""More layers than any model has; caches that are gone are forgotten beyond this."""


class LayoutError(PenstockError):
    """A tensor handed to a native kernel has a dtype, shape or layout the kernel does not read."""


def dtype_code(tensor: Tensor, what: str) -> int:
    """The library's number for a tensor's dtype."""
    code = DTYPE_CODES.get(tensor.dtype)
    if code is None:
        raise LayoutError(f"{what} is {tensor.dtype}; the CPU kernels read float32, float16 and bfloat16")
    return code


def need_contiguous(tensor: Tensor, what: str) -> None:
    """Refuse anything but a dense row-major CPU tensor."""
    if not tensor.is_contiguous() or tensor.is_cuda:
        raise LayoutError(f"{what} must be a contiguous CPU tensor, got strides {tensor.stride()}")


def _need(tensor: Tensor, what: str, dtype: torch.dtype) -> None:
    if tensor.dtype is not dtype:
        raise LayoutError(f"{what} must be {dtype}, got {tensor.dtype}")
    need_contiguous(tensor, what)


class _BatchView:
    """Pointers of a batch's tensors, whose dtypes and layouts were checked."""

    __slots__ = (
        "_tensors", "block_tables", "context_lens", "positions", "query_starts", "rows", "sequences", "slots",
        "table_stride", "tokens",
    )  # fmt: skip

    def __init__(self, batch: AttentionBatch) -> None:
        self._tensors = tuple(getattr(batch, name) for name in _BATCH_DTYPES)
        for (name, dtype), tensor in zip(_BATCH_DTYPES.items(), self._tensors, strict=True):
            _need(tensor, name, dtype)
        self.positions, self.slots, self.query_starts, self.context_lens, self.rows, self.block_tables = (
            tensor.data_ptr() for tensor in self._tensors
        )
        self.tokens: int = batch.positions.shape[0]
        self.sequences: int = batch.context_lens.shape[0]
        self.table_stride: int = batch.block_tables.stride(0)
        if batch.slots.shape[0] != self.tokens:
            raise LayoutError(f"{self.tokens} positions but {batch.slots.shape[0]} slots")
        if batch.query_starts.shape[0] != self.sequences + 1 or batch.rows.shape[0] != self.sequences:
            raise LayoutError(f"{self.sequences} sequences need as many rows and one query start more")

    def is_of(self, batch: AttentionBatch) -> bool:
        positions, slots, query_starts, context_lens, rows, block_tables = self._tensors
        return (
            positions is batch.positions
            and slots is batch.slots
            and query_starts is batch.query_starts
            and context_lens is batch.context_lens
            and rows is batch.rows
            and block_tables is batch.block_tables
        )


class _CacheView:
    """Arguments that stay the same from step to step for one layer's cache."""

    __slots__ = ("attention", "rope", "v_stride")

    def __init__(self, k_cache: Tensor, v_cache: Tensor, layout: HeadLayout, kv_scales: KVScales | None) -> None:
        expected = (k_cache.shape[0], layout.kv_heads, k_cache.shape[2], layout.head_dim)
        for name, cache in (("k_cache", k_cache), ("v_cache", v_cache)):
            if cache.shape != expected or cache.dtype is not k_cache.dtype:
                raise LayoutError(f"{name} must be {list(expected)}, both of one dtype, got {tuple(cache.shape)}")
            if cache.stride(3) != 1 or cache.stride(2) != layout.head_dim or cache.is_cuda:
                raise LayoutError(f"{name}: the tokens of a block must be dense on the CPU, strides {cache.stride()}")
        if k_cache.dtype not in _CACHE_CODES:
            raise LayoutError(f"the CPU kernels read no cache of {k_cache.dtype}")
        k_scales, v_scales = _checked_scales(k_cache, layout, kv_scales)
        self.v_stride = v_cache.stride()
        common = {
            "k_cache": k_cache.data_ptr(), "v_cache": v_cache.data_ptr(), "k_scales": k_scales, "v_scales": v_scales,
            "k_block_stride": k_cache.stride(0), "k_head_stride": k_cache.stride(1),
            "v_block_stride": v_cache.stride(0), "v_head_stride": v_cache.stride(1),
            "heads": layout.heads, "kv_heads": layout.kv_heads, "head_dim": layout.head_dim,
            "block_size": k_cache.shape[2], "cache_dtype": _CACHE_CODES[k_cache.dtype],
        }  # fmt: skip
        self.rope = RopeArgs(
            num_slots=k_cache.shape[0] * k_cache.shape[2], interleaved=layout.interleaved,
            centred=layout.centred_norms, **common,
        )  # fmt: skip
        self.attention = AttentionArgs(
            window=layout.window or 0,
            chunked=layout.chunked,
            scale=layout.scale,
            softcap=layout.softcap or 0.0,
            **common,
        )


def _set_norms(args: RopeArgs, q_norm: Tensor | None, k_norm: Tensor | None, layout: HeadLayout) -> None:
    found = [(norm, heads) for norm, heads in ((q_norm, layout.heads), (k_norm, layout.kv_heads)) if norm is not None]
    norms = [norm for norm, _ in found]
    for norm, heads in found:
        need_contiguous(norm, "q_norm and k_norm")
        shape = (heads, layout.head_dim) if layout.centred_norms else (layout.head_dim,)
        if norm.shape != shape or norm.dtype is not norms[0].dtype:
            raise LayoutError(f"q_norm and k_norm must be one dtype and {shape}, got {norm.dtype} {norm.shape}")
    args.q_norm = None if q_norm is None else q_norm.data_ptr()
    args.k_norm = None if k_norm is None else k_norm.data_ptr()
    args.norm_dtype = dtype_code(norms[0], "q_norm")


def _set_smoothing(args: RopeArgs, smoothing: KeySmoothing, layout: HeadLayout) -> None:
    for name, part in smoothing._asdict().items():
        _need(part, f"the keys' {name}", torch.float32)
        if part.shape != (layout.kv_heads, layout.head_dim):
            raise LayoutError(f"the keys' {name} must be [{layout.kv_heads}, {layout.head_dim}], got {part.shape}")
    args.key_centre, args.key_scale = smoothing.centre.data_ptr(), smoothing.scale.data_ptr()


def _checked_scales(k_cache: Tensor, layout: HeadLayout, kv_scales: KVScales | None) -> tuple[int | None, int | None]:
    """Addresses of the scales; they must be there exactly when the cache needs them."""
    if (kv_scales is not None) != (k_cache.dtype in (INT8, FP8)):
        raise LayoutError(f"a cache of {k_cache.dtype} {'needs' if kv_scales is None else 'has no'} scales")
    if kv_scales is None:
        return None, None
    dtype, shape = (torch.float32, (layout.kv_heads,)) if k_cache.dtype == FP8 else (SCALE_DTYPE, k_cache.shape[:3])
    for name, scales in zip(("key scales", "value scales"), kv_scales, strict=True):
        _need(scales, name, dtype)
        if scales.shape != shape:
            raise LayoutError(f"{name} must be {list(shape)}, got {tuple(scales.shape)}")
    return kv_scales[0].data_ptr(), kv_scales[1].data_ptr()


def _is_wide(stream: Tensor, activations: Tensor) -> bool:
    """Whether the residual stream is in float32 beside narrower activations."""
    if stream.dtype is not activations.dtype and stream.dtype is not torch.float32:
        raise LayoutError(f"a residual stream in {stream.dtype} does not go with activations in {activations.dtype}")
    return stream.dtype is not activations.dtype


class CpuOps(PlainMixers):
    """See `Ops`. One instance per engine: it owns the thread pool."""

    wide_stream = True
    samples_any_dtype = False

    def __init__(self, handle: Handle) -> None:
        self.handle = handle
        self.batch_invariant = False
        self._ctx = handle.pointer
        self._last_batch: _BatchView | None = None
        self._caches: dict[object, _CacheView] = {}

    @property
    def _lib(self) -> Any:
        return self.handle.lib

    def widen(self, x: Tensor) -> Tensor:
        need_contiguous(x, "x")
        out = torch.empty_like(x, dtype=torch.float32)
        self._lib.pk_widen(self._ctx, x.data_ptr(), out.data_ptr(), *x.shape, dtype_code(x, "x"))
        return out

    def store_rows(self, x: Tensor, table: Tensor, at: Tensor | None = None) -> None:
        need_contiguous(x, "x")
        if table.is_cuda or table.stride(1) != 1 or table.shape[1] != x.shape[1]:
            raise LayoutError(f"a table of {tuple(table.shape)} cannot take rows of {x.shape[1]}")
        if at is not None:
            _need(at, "at", torch.int64)
        stopped = self._lib.pk_store_rows(
            self._ctx, x.data_ptr(), None if at is None else at.data_ptr(), table.data_ptr(), *x.shape,
            table.stride(0), table.shape[0], dtype_code(x, "x"), dtype_code(table, "the table"),
        )  # fmt: skip
        if stopped:
            raise LayoutError("a row is outside the table")

    def rms_norm(self, x: Tensor, weight: Tensor | None, eps: float, dtype: torch.dtype | None = None) -> Tensor:
        if x.stride(-1) == 1:
            x = x.contiguous()  # rows of a wider matrix, as latents beside queries are
        need_contiguous(x, "x")
        out = torch.empty_like(x, dtype=dtype)
        self._lib.pk_rms_norm(
            self._ctx, x.data_ptr(), None if weight is None else weight.data_ptr(), out.data_ptr(),
            *_rows(x, weight), eps, dtype_code(out, "the result"), _is_wide(x, out),
            0 if weight is None else dtype_code(weight, "weight"),
        )  # fmt: skip
        return out

    def add_rms_norm(
        self, x: Tensor, residual: Tensor, weight: Tensor | None, eps: float, x_weight: Tensor | None = None
    ) -> Tensor:
        need_contiguous(x, "x")
        need_contiguous(residual, "residual")
        if x.shape != residual.shape:
            raise LayoutError(f"x {tuple(x.shape)} and residual {tuple(residual.shape)} differ")
        either = x_weight if weight is None else weight
        if _kind(x_weight) not in (None, _kind(either)):
            raise LayoutError(f"x_weight must be as weight, {_kind(either)}, got {_kind(x_weight)}")
        out = torch.empty_like(x)
        self._lib.pk_add_rms_norm(
            self._ctx, x.data_ptr(), residual.data_ptr(), None if weight is None else weight.data_ptr(),
            None if x_weight is None else x_weight.data_ptr(), out.data_ptr(),
            *_rows(x, either), eps, dtype_code(x, "x"), _is_wide(residual, x),
            0 if either is None else dtype_code(either, "weight"),
        )  # fmt: skip
        return out

    def centre(self, residual: Tensor, *added: Tensor) -> None:
        need_contiguous(residual, "residual")
        for x in added:
            need_contiguous(x, "what is added to the residual stream")
            if x.shape != residual.shape or x.dtype is not added[0].dtype:
                raise LayoutError(f"{x.dtype} {tuple(x.shape)} cannot be added to a stream of {tuple(residual.shape)}")
        like = added[0] if added else residual
        pointers = [x.data_ptr() for x in added]
        self._lib.pk_centre(
            self._ctx, residual.data_ptr(), *pointers, *[None] * (2 - len(pointers)), *residual.shape,
            dtype_code(like, "x"), _is_wide(residual, like),
        )  # fmt: skip

    def silu_mul(self, gate_up: Tensor) -> Tensor:
        return self._gate_mul(self._lib.pk_silu_mul, gate_up)

    def gelu_mul(self, gate_up: Tensor) -> Tensor:
        return self._gate_mul(self._lib.pk_gelu_mul, gate_up)

    def clamped_swiglu(self, gate_up: Tensor, alpha: float, limit: float) -> Tensor:
        return self._gate_mul(self._lib.pk_clamped_swiglu, gate_up, alpha, limit)

    def _gate_mul(self, kernel: Callable[..., None], gate_up: Tensor, *settings: float) -> Tensor:
        need_contiguous(gate_up, "gate_up")
        rows, width = gate_up.shape
        if width % 2:
            raise LayoutError(f"gate_up must hold two halves, got width {width}")
        out = torch.empty((rows, width // 2), dtype=gate_up.dtype)
        code = dtype_code(gate_up, "gate_up")
        kernel(self._ctx, gate_up.data_ptr(), out.data_ptr(), rows, width // 2, *settings, code)
        return out

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
        heads, kv_heads, dim = layout.heads, layout.kv_heads, layout.head_dim
        tokens, width = qkv.shape
        need_contiguous(qkv, "qkv")
        if width != (heads + 2 * kv_heads) * dim or dim % 2:
            raise LayoutError(f"qkv is {tuple(qkv.shape)}, which does not split into the heads of {layout}")
        view = self._batch_view(batch)
        if view.tokens != tokens:
            raise LayoutError(f"{tokens} tokens, but positions and slots for {view.tokens}")
        _need(cos_sin, "cos_sin", torch.float32)
        if cos_sin.shape[1] % 2 or cos_sin.shape[1] > dim:
            raise LayoutError(f"cos_sin rotates {cos_sin.shape[1]} dimensions of heads that have {dim}")
        args = RopeArgs.from_buffer_copy(self._cache_view(k_cache, v_cache, layout, kv_scales).rope)
        args.qkv, args.dtype, args.tokens = qkv.data_ptr(), dtype_code(qkv, "qkv"), tokens
        args.cos_sin, args.max_positions, args.rotary = cos_sin.data_ptr(), *cos_sin.shape
        args.positions, args.slots = view.positions, view.slots
        args.eps = eps
        if q_norm is not None or k_norm is not None:
            _set_norms(args, q_norm, k_norm, layout)
        if key_smoothing is not None:
            _set_smoothing(args, key_smoothing, layout)
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
            _need(sinks, "sinks", torch.float32)
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
        kv: Tensor,
        layout: LatentLayout,
        weights: LatentWeights,
        cos_sin: Tensor,
        batch: AttentionBatch,
        cache: Tensor,
        scales: Tensor | None = None,
        added: LatentAdditions | None = None,
    ) -> Tensor:
        """Decodes natively. Prompts in PyTorch, whose matrix products suit them, and all tokens with additions."""
        decodes, tokens = batch.num_decodes, q.shape[0]
        if added is not None:
            alone = self.batch_invariant and decodes == tokens
            return with_additions(q, kv, layout, weights, cos_sin, batch, cache, scales, added, alone)
        if not decodes:
            return super().latent_attention(q, kv, layout, weights, cos_sin, batch, cache, scales)
        out = torch.empty((tokens, layout.heads * layout.value), dtype=q.dtype)
        self._decode_latents(q[:decodes], kv[:decodes], layout, weights, cos_sin, batch, cache, scales, out)
        if decodes < tokens:
            prompts = dataclasses.replace(
                batch, positions=batch.positions[decodes:], slots=batch.slots[decodes:], rows=batch.rows[decodes:],
                query_starts=batch.query_starts[decodes:] - decodes, context_lens=batch.context_lens[decodes:],
                num_decodes=0,
            )  # fmt: skip
            some = q[decodes:], kv[decodes:]
            out[decodes:] = super().latent_attention(*some, layout, weights, cos_sin, prompts, cache, scales)
        return out

    def _decode_latents(
        self,
        q: Tensor,
        kv: Tensor,
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
        _need(cos_sin, "cos_sin", torch.float32)
        _need(weights.up, "up", q.dtype)
        if (scales is not None) != (cache.dtype in (INT8, FP8)):
            raise LayoutError(f"a cache of {cache.dtype} {'needs' if scales is None else 'has no'} scales")
        if scales is not None:
            _need(scales, "scales", SCALE_DTYPE if cache.dtype == INT8 else torch.float32)
        if q.stride(1) != 1 or kv.stride(1) != 1 or kv.dtype is not q.dtype:
            raise LayoutError(f"queries {q.dtype} {q.stride()} and latents {kv.dtype} {kv.stride()} must be dense rows")
        if q.shape[1] != layout.heads * layout.query or cache.shape[2] != layout.cached:
            raise LayoutError(f"q is {tuple(q.shape)} and the cache {tuple(cache.shape)}, which do not fit {layout}")
        args = LatentArgs(
            q=q.data_ptr(), kv=kv.data_ptr(), norm=weights.norm.data_ptr(), up=weights.up.data_ptr(),
            out=out.data_ptr(), cache=cache.data_ptr(), scales=None if scales is None else scales.data_ptr(),
            cos_sin=cos_sin.data_ptr(), positions=view.positions, slots=view.slots, context_lens=view.context_lens,
            rows=view.rows, block_tables=view.block_tables, tokens=q.shape[0], q_stride=q.stride(0),
            kv_stride=kv.stride(0), table_stride=view.table_stride, max_positions=cos_sin.shape[0],
            num_slots=cache.shape[0] * cache.shape[1], heads=layout.heads, latent=layout.latent, plain=layout.plain,
            rotary=layout.rotary, value=layout.value, block_size=cache.shape[1], interleaved=layout.interleaved,
            dtype=code, cache_dtype=_CACHE_CODES[cache.dtype], norm_dtype=dtype_code(weights.norm, "norm"),
            scale=layout.scale, eps=weights.eps,
        )  # fmt: skip
        problem = self._lib.pk_latent_attention(self._ctx, byref(args))
        if problem:
            raise LayoutError(
                f"a position is outside the rotary table of {cos_sin.shape[0]} rows"
                if problem == 1
                else f"a slot is outside the cache of {cache.shape[0]} blocks"
            )

    def _batch_view(self, batch: AttentionBatch) -> _BatchView:
        """Checked once per step: every layer of a step hands over the same tensors."""
        view = self._last_batch
        if view is None or not view.is_of(batch):
            view = self._last_batch = _BatchView(batch)
        return view

    def _cache_view(
        self, k_cache: Tensor, v_cache: Tensor, layout: HeadLayout, kv_scales: KVScales | None
    ) -> _CacheView:
        """Checked once per layer and cache."""
        scales = None if kv_scales is None else (kv_scales[0].data_ptr(), kv_scales[1].data_ptr())
        key = (k_cache.data_ptr(), v_cache.data_ptr(), k_cache.shape, k_cache.stride(), k_cache.dtype, layout, scales)
        view = self._caches.get(key)
        if view is None or v_cache.stride() != view.v_stride or v_cache.dtype is not k_cache.dtype:
            if len(self._caches) >= _MAX_CACHES:
                self._caches.clear()
            view = self._caches[key] = _CacheView(k_cache, v_cache, layout, kv_scales)
        return view

    def delta_net(
        self,
        projected: Tensor,
        gates: Tensor,
        layout: DeltaLayout,
        weights: DeltaWeights,
        batch: AttentionBatch,
        conv_cache: Tensor,
        state_cache: Tensor,
    ) -> Tensor:
        if batch.states is None:
            raise NotRecordableError("gated delta nets are not recorded")
        return delta.delta_net(projected, gates, layout, weights, batch, conv_cache, state_cache, self._delta_step)

    def _delta_step(self, heads: delta.Heads, at: Tensor, states: StateBatch, cache: Tensor, out: Tensor) -> None:
        """See `delta.Step`."""
        _need(cache, "states", torch.float32)
        q, k, v, g, beta = (part[at].contiguous() for part in heads)
        decay, reads, writes = g.exp(), states.reads[at].long(), states.writes[at].long()
        mixed = torch.empty_like(v)
        tensors = (q, k, v, decay, beta, cache, reads, writes, mixed)
        self._lib.pk_delta_step(
            self._ctx, *(tensor.data_ptr() for tensor in tensors), len(at), q.shape[1], q.shape[2], v.shape[2]
        )
        out[at] = mixed

    def mamba(
        self,
        projected: Tensor,
        layout: MambaLayout,
        weights: MambaWeights,
        batch: AttentionBatch,
        conv_cache: Tensor,
        state_cache: Tensor,
    ) -> Tensor:
        if batch.states is None:
            raise NotRecordableError("Mamba layers are not recorded")
        return super().mamba(projected, layout, weights, batch, conv_cache, state_cache)

    def mask_logits(self, logits: Tensor, at: Tensor, bits: Tensor) -> None:
        _need(logits, "logits", torch.float32)
        _need(at, "at", torch.int64)
        _need(bits, "bits", torch.int32)
        if bits.shape != (at.shape[0], -(-logits.shape[1] // 32)):
            raise LayoutError(f"bits of shape {tuple(bits.shape)} do not fit logits of shape {tuple(logits.shape)}")
        self._lib.pk_mask_logits(
            self._ctx, logits.data_ptr(), at.data_ptr(), bits.data_ptr(), at.shape[0], logits.shape[1]
        )

    def argmax(self, logits: Tensor) -> Tensor:
        """int64 [rows]: the largest entry of each float32 row (the first of equals)."""
        _need(logits, "logits", torch.float32)
        out = torch.empty(logits.shape[0], dtype=torch.int64)
        self._lib.pk_argmax(self._ctx, logits.data_ptr(), out.data_ptr(), *logits.shape)
        return out

    def logsumexp(self, logits: Tensor) -> Tensor:
        """float32 [rows]: log of the sum of exponentials of each float32 row."""
        _need(logits, "logits", torch.float32)
        out = torch.empty(logits.shape[0], dtype=torch.float32)
        self._lib.pk_logsumexp(self._ctx, logits.data_ptr(), out.data_ptr(), *logits.shape)
        return out

    def filter_thresholds(
        self, logits: Tensor, temperatures: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor
    ) -> Tensor:
        return filters.thresholds(logits, temperatures, top_k, top_p, min_p)

    def gumbel_argmax(
        self, logits: Tensor, temperatures: Tensor, keys: Tensor, thresholds: Tensor | None = None
    ) -> Tensor:
        """int64 [rows]: a draw from softmax(logits / temperature) that depends only on the row and its key.

        `keys` is int64 (read as unsigned) or uint64 [rows]; `temperatures` float32 [rows], zero meaning greedy.
        The noise is defined in csrc/elementwise/gumbel.h.
        """
        _need(logits, "logits", torch.float32)
        _need(temperatures, "temperatures", torch.float32)
        if keys.dtype not in (torch.int64, torch.uint64):
            raise LayoutError(f"keys must be int64 or uint64, got {keys.dtype}")
        need_contiguous(keys, "keys")
        if temperatures.shape[0] != logits.shape[0] or keys.shape[0] != logits.shape[0]:
            raise LayoutError("logits, temperatures and keys must have the same number of rows")
        if thresholds is not None:
            logits = filters.drop_below(logits, temperatures, thresholds)
        out = torch.empty(logits.shape[0], dtype=torch.int64)
        self._lib.pk_gumbel_argmax(
            self._ctx, logits.data_ptr(), temperatures.data_ptr(), keys.data_ptr(), out.data_ptr(), *logits.shape
        )
        return out


def _kind(weight: Tensor | None) -> tuple[torch.Size, torch.dtype] | None:
    return None if weight is None else (weight.shape, weight.dtype)


def _rows(x: Tensor, weight: Tensor | None) -> tuple[int, int]:
    width = x.shape[-1]
    if weight is not None:
        need_contiguous(weight, "weight")
        if weight.shape != (width,):
            raise LayoutError(f"weight must be [{width}], got {tuple(weight.shape)}")
    return x.numel() // width if width else 0, width
