"""Norms, gates and the residual stream on the native CPU library: `Ops` that work row by row."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

import torch
from torch import Tensor
from torch.nn import functional as F

from penstock.engine.backends.cpu.layout import LayoutError, dtype_code, need, need_contiguous
from penstock.engine.backends.cpu.native_ops import NativeOps
from penstock.engine.backends.interface import Clip, Pointwise, Xielu
from penstock.engine.backends.reference.values import by_heads

_POINTWISE: Final = {"relu2": 0, "plain_gelu": 1, "plain_gelu_tanh": 2}
"""As elementwise/pointwise.cpp counts them."""


class ElementwiseOps(NativeOps):
    """See `Ops`."""

    def sigmoid(self, x: Tensor) -> Tensor:
        # PyTorch computes the last few numbers of a tensor in another way than those before them.
        return torch.cat([row.sigmoid() for row in torch.split(x, 1)]) if self.batch_invariant else x.sigmoid()

    def sqrt_softplus(self, x: Tensor) -> Tensor:
        return self._softplus(x).sqrt()

    def _softplus(self, x: Tensor) -> Tensor:
        return torch.cat([F.softplus(row) for row in torch.split(x, 1)]) if self.batch_invariant else F.softplus(x)

    def sigmoid_mul(self, x: Tensor, gate: Tensor) -> Tensor:
        return by_heads(x, self.sigmoid(gate))

    def softplus_mul(self, x: Tensor, gate: Tensor) -> Tensor:
        factors = self._softplus(gate.float()).to(x.dtype).unsqueeze(-1)
        return (x.view(*gate.shape, -1) * factors).view(x.shape)

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
            need(at, "at", torch.int64)
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

    def bounded_silu(self, gate_up: Tensor, limit: float) -> Tensor:
        return self._gate_mul(self._lib.pk_bounded_silu, gate_up, limit)

    def pointwise(self, x: Tensor, function: Pointwise) -> Tensor:
        need_contiguous(x, "x")
        numbers: tuple[float, ...] = ()
        if isinstance(function, Xielu):
            numbers, code = (function.positive, function.negative, function.beta, function.eps), 3
        elif isinstance(function, Clip):
            numbers, code = (function.limit,), 4
        else:
            code = _POINTWISE[function]
        numbers += (0.0,) * (4 - len(numbers))
        self._lib.pk_pointwise(self._ctx, x.data_ptr(), *x.shape, code, *numbers, dtype_code(x, "x"))
        return x

    def add_row(self, x: Tensor, row: Tensor) -> None:
        need_contiguous(x, "x")
        if row.shape != x.shape[1:]:
            raise LayoutError(f"a row of {tuple(row.shape)} cannot be added to rows of {x.shape[1]}")
        self._lib.pk_add_row(
            self._ctx, x.data_ptr(), row.data_ptr(), *x.shape, dtype_code(x, "x"), dtype_code(row, "row")
        )

    def _gate_mul(self, kernel: Callable[..., None], gate_up: Tensor, *settings: float) -> Tensor:
        need_contiguous(gate_up, "gate_up")
        rows, width = gate_up.shape
        if width % 2:
            raise LayoutError(f"gate_up must hold two halves, got width {width}")
        out = torch.empty((rows, width // 2), dtype=gate_up.dtype)
        code = dtype_code(gate_up, "gate_up")
        kernel(self._ctx, gate_up.data_ptr(), out.data_ptr(), rows, width // 2, *settings, code)
        return out


def _is_wide(stream: Tensor, activations: Tensor) -> bool:
    """Whether the residual stream is in float32 beside narrower activations."""
    if stream.dtype is not activations.dtype and stream.dtype is not torch.float32:
        raise LayoutError(f"a residual stream in {stream.dtype} does not go with activations in {activations.dtype}")
    return stream.dtype is not activations.dtype


def _kind(weight: Tensor | None) -> tuple[torch.Size, torch.dtype] | None:
    return None if weight is None else (weight.shape, weight.dtype)


def _rows(x: Tensor, weight: Tensor | None) -> tuple[int, int]:
    width = x.shape[-1]
    if weight is not None:
        need_contiguous(weight, "weight")
        if weight.shape != (width,):
            raise LayoutError(f"weight must be [{width}], got {tuple(weight.shape)}")
    return x.numel() // width if width else 0, width
