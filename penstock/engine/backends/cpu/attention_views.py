"""Checked arguments of native attention: of a step's batch once per step, of a layer's cache once."""

from __future__ import annotations

import torch
from torch import Tensor

from penstock.engine.backends.cpu.layout import CACHE_CODES, LayoutError, dtype_code, need, need_contiguous
from penstock.engine.backends.cpu.native import AttentionArgs, RopeArgs
from penstock.engine.backends.interface import (
    FP8,
    INT8,
    SCALE_DTYPE,
    AttentionBatch,
    HeadLayout,
    KeySmoothing,
    KVScales,
)

_BATCH_DTYPES = {
    "positions": torch.int64, "slots": torch.int64, "query_starts": torch.int32, "context_lens": torch.int32,
    "rows": torch.int32, "block_tables": torch.int32,
}  # fmt: skip


class BatchView:
    """Pointers of a batch's tensors, whose dtypes and layouts were checked."""

    __slots__ = (
        "_tensors", "block_tables", "context_lens", "positions", "query_starts", "rows", "sequences", "slots",
        "table_stride", "tokens",
    )  # fmt: skip

    def __init__(self, batch: AttentionBatch) -> None:
        self._tensors = tuple(getattr(batch, name) for name in _BATCH_DTYPES)
        for (name, dtype), tensor in zip(_BATCH_DTYPES.items(), self._tensors, strict=True):
            need(tensor, name, dtype)
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


class CacheView:
    """Arguments that stay the same from step to step for one layer's cache."""

    __slots__ = ("attention", "rope", "v_stride")

    def __init__(self, k_cache: Tensor, v_cache: Tensor, layout: HeadLayout, kv_scales: KVScales | None) -> None:
        expected = (k_cache.shape[0], layout.kv_heads, k_cache.shape[2], layout.head_dim)
        for name, cache in (("k_cache", k_cache), ("v_cache", v_cache)):
            if cache.shape != expected or cache.dtype is not k_cache.dtype:
                raise LayoutError(f"{name} must be {list(expected)}, both of one dtype, got {tuple(cache.shape)}")
            if cache.stride(3) != 1 or cache.stride(2) != layout.head_dim or cache.is_cuda:
                raise LayoutError(f"{name}: the tokens of a block must be dense on the CPU, strides {cache.stride()}")
        if k_cache.dtype not in CACHE_CODES:
            raise LayoutError(f"the CPU kernels read no cache of {k_cache.dtype}")
        k_scales, v_scales = _checked_scales(k_cache, layout, kv_scales)
        self.v_stride = v_cache.stride()
        common = {
            "k_cache": k_cache.data_ptr(), "v_cache": v_cache.data_ptr(), "k_scales": k_scales, "v_scales": v_scales,
            "k_block_stride": k_cache.stride(0), "k_head_stride": k_cache.stride(1),
            "v_block_stride": v_cache.stride(0), "v_head_stride": v_cache.stride(1),
            "heads": layout.heads, "kv_heads": layout.kv_heads, "head_dim": layout.head_dim,
            "block_size": k_cache.shape[2], "cache_dtype": CACHE_CODES[k_cache.dtype],
        }  # fmt: skip
        self.rope = RopeArgs(
            num_slots=k_cache.shape[0] * k_cache.shape[2], interleaved=layout.interleaved,
            centred=layout.centred_norms, normed_values=layout.normed_values,
            shared=("", "values", "both").index(layout.shared), **common,
        )  # fmt: skip
        self.attention = AttentionArgs(
            window=layout.window or 0,
            chunked=layout.chunked,
            scale=layout.scale,
            softcap=layout.softcap or 0.0,
            **common,
        )


def set_norms(args: RopeArgs, q_norm: Tensor | None, k_norm: Tensor | None, layout: HeadLayout) -> None:
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


def set_smoothing(args: RopeArgs, smoothing: KeySmoothing, layout: HeadLayout) -> None:
    for name, part in smoothing._asdict().items():
        need(part, f"the keys' {name}", torch.float32)
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
        need(scales, name, dtype)
        if scales.shape != shape:
            raise LayoutError(f"{name} must be {list(shape)}, got {tuple(scales.shape)}")
    return kv_scales[0].data_ptr(), kv_scales[1].data_ptr()
