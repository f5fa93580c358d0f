"""`Ops` on the native CPU library, plus the sampling primitives over logits.

Activations and cache may each be float32, float16 or bfloat16; arithmetic is float32. Inputs must be contiguous:
a wrong layout is refused, never copied silently. `rope_and_cache` rotates the queries inside `qkv` and returns a
view of them, which `attention` reads with its row stride.
"""

from __future__ import annotations

from ctypes import byref

import torch
from torch import Tensor

from penstock.engine.kernels.cpu.native import AttentionArgs, Handle, RopeArgs
from penstock.engine.kernels.interface import AttentionBatch, HeadLayout
from penstock.errors import PenstockError

DTYPE_CODES = {torch.float32: 0, torch.float16: 1, torch.bfloat16: 2}


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


def _need_cache(cache: Tensor, what: str, layout: HeadLayout) -> None:
    if cache.shape[1] != layout.kv_heads or cache.shape[3] != layout.head_dim:
        raise LayoutError(
            f"{what} must be [blocks, {layout.kv_heads}, block_size, {layout.head_dim}], got {tuple(cache.shape)}"
        )
    if cache.stride(3) != 1 or cache.stride(2) != layout.head_dim:
        raise LayoutError(f"{what}: the tokens of a block must be dense, got strides {cache.stride()}")


class CpuOps:
    """See `Ops`. One instance per engine: it owns the thread pool."""

    name = "cpu"

    def __init__(self, handle: Handle) -> None:
        self.handle = handle
        self._lib = handle.lib
        self._ctx = handle.pointer

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        need_contiguous(x, "x")
        out = torch.empty_like(x)
        self._lib.pk_rms_norm(
            self._ctx, x.data_ptr(), weight.data_ptr(), out.data_ptr(),
            *_rows(x, weight), eps, dtype_code(x, "x"), dtype_code(weight, "weight"),
        )  # fmt: skip
        return out

    def add_rms_norm(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> Tensor:
        need_contiguous(x, "x")
        need_contiguous(residual, "residual")
        if x.dtype is not residual.dtype or x.shape != residual.shape:
            raise LayoutError(
                f"x {x.dtype} {tuple(x.shape)} and residual {residual.dtype} {tuple(residual.shape)} differ"
            )
        out = torch.empty_like(x)
        self._lib.pk_add_rms_norm(
            self._ctx, x.data_ptr(), residual.data_ptr(), weight.data_ptr(), out.data_ptr(),
            *_rows(x, weight), eps, dtype_code(x, "x"), dtype_code(weight, "weight"),
        )  # fmt: skip
        return out

    def silu_mul(self, gate_up: Tensor) -> Tensor:
        need_contiguous(gate_up, "gate_up")
        rows, width = gate_up.shape
        if width % 2:
            raise LayoutError(f"gate_up must hold two halves, got width {width}")
        out = torch.empty((rows, width // 2), dtype=gate_up.dtype)
        self._lib.pk_silu_mul(
            self._ctx, gate_up.data_ptr(), out.data_ptr(), rows, width // 2, dtype_code(gate_up, "gate_up")
        )
        return out

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
    ) -> Tensor:
        heads, kv_heads, dim = layout.heads, layout.kv_heads, layout.head_dim
        tokens = qkv.shape[0]
        need_contiguous(qkv, "qkv")
        if qkv.shape[1] != (heads + 2 * kv_heads) * dim or dim % 2:
            raise LayoutError(f"qkv is {tuple(qkv.shape)}, which does not split into the heads of {layout}")
        if batch.positions.shape[0] != tokens or batch.slots.shape[0] != tokens:
            raise LayoutError(f"{tokens} tokens, but positions {batch.positions.shape} and slots {batch.slots.shape}")
        _need(cos_sin, "cos_sin", torch.float32)
        _need(batch.positions, "positions", torch.int64)
        _need(batch.slots, "slots", torch.int64)
        _need_cache(k_cache, "k_cache", layout)
        _need_cache(v_cache, "v_cache", layout)
        norms = [norm for norm in (q_norm, k_norm) if norm is not None]
        for norm in norms:
            need_contiguous(norm, "q_norm and k_norm")
            if norm.shape[0] != dim or norm.dtype is not norms[0].dtype:
                raise LayoutError(f"q_norm and k_norm must be one dtype and [{dim}], got {norm.dtype} {norm.shape}")
        args = RopeArgs(
            qkv.data_ptr(), cos_sin.data_ptr(), batch.positions.data_ptr(), batch.slots.data_ptr(),
            k_cache.data_ptr(), v_cache.data_ptr(),
            None if q_norm is None else q_norm.data_ptr(), None if k_norm is None else k_norm.data_ptr(),
            tokens, cos_sin.shape[0], k_cache.shape[0] * k_cache.shape[2],
            k_cache.stride(0), k_cache.stride(1), v_cache.stride(0), v_cache.stride(1),
            heads, kv_heads, dim, k_cache.shape[2],
            dtype_code(qkv, "qkv"), dtype_code(k_cache, "k_cache"),
            dtype_code(norms[0], "q_norm") if norms else 0, eps,
        )  # fmt: skip
        problem = self._lib.pk_rope_and_cache(self._ctx, byref(args))
        if problem:
            raise LayoutError(
                f"a position is outside the rotary table of {cos_sin.shape[0]} rows"
                if problem == 1
                else f"a slot is outside the cache of {k_cache.shape[0]} blocks"
            )
        return qkv[:, : heads * dim].view(tokens, heads, dim)

    def attention(
        self, q: Tensor, layout: HeadLayout, batch: AttentionBatch, k_cache: Tensor, v_cache: Tensor
    ) -> Tensor:
        heads, dim = layout.heads, layout.head_dim
        if q.shape[1:] != (heads, dim) or q.stride(2) != 1 or q.stride(1) != dim:
            raise LayoutError(f"q must be [T, {heads}, {dim}] with dense rows, got {tuple(q.shape)} {q.stride()}")
        if v_cache.dtype is not k_cache.dtype:
            raise LayoutError(f"k_cache is {k_cache.dtype} but v_cache is {v_cache.dtype}")
        _need_cache(k_cache, "k_cache", layout)
        _need_cache(v_cache, "v_cache", layout)
        for name in ("query_starts", "context_lens", "rows", "block_tables"):
            _need(getattr(batch, name), name, torch.int32)
        out = torch.empty((q.shape[0], heads * dim), dtype=q.dtype)
        args = AttentionArgs(
            q.data_ptr(), out.data_ptr(), k_cache.data_ptr(), v_cache.data_ptr(),
            batch.query_starts.data_ptr(), batch.context_lens.data_ptr(), batch.rows.data_ptr(),
            batch.block_tables.data_ptr(), q.stride(0), batch.block_tables.stride(0),
            k_cache.stride(0), k_cache.stride(1), v_cache.stride(0), v_cache.stride(1),
            batch.context_lens.shape[0], heads, layout.kv_heads, dim,
            k_cache.shape[2], layout.window or 0, dtype_code(q, "q"), dtype_code(k_cache, "k_cache"),
            layout.scale,
        )  # fmt: skip
        self._lib.pk_attention(self._ctx, byref(args))
        return out

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

    def gumbel_argmax(self, logits: Tensor, temperatures: Tensor, keys: Tensor) -> Tensor:
        """int64 [rows]: a draw from softmax(logits / temperature) that depends only on the row and its key.

        `keys` is int64 (read as unsigned) or uint64 [rows]; `temperatures` float32 [rows], zero meaning greedy.
        The noise is defined in sampling.cpp.
        """
        _need(logits, "logits", torch.float32)
        _need(temperatures, "temperatures", torch.float32)
        if keys.dtype not in (torch.int64, torch.uint64):
            raise LayoutError(f"keys must be int64 or uint64, got {keys.dtype}")
        need_contiguous(keys, "keys")
        if temperatures.shape[0] != logits.shape[0] or keys.shape[0] != logits.shape[0]:
            raise LayoutError("logits, temperatures and keys must have the same number of rows")
        out = torch.empty(logits.shape[0], dtype=torch.int64)
        self._lib.pk_gumbel_argmax(
            self._ctx, logits.data_ptr(), temperatures.data_ptr(), keys.data_ptr(), out.data_ptr(), *logits.shape
        )
        return out


def _rows(x: Tensor, weight: Tensor) -> tuple[int, int]:
    width = x.shape[-1]
    need_contiguous(weight, "weight")
    if weight.shape != (width,):
        raise LayoutError(f"weight must be [{width}], got {tuple(weight.shape)}")
    return x.numel() // width if width else 0, width
