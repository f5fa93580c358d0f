"""Batch-invariant dense linears on the native library.

The vendor's matmul chooses its kernel by the number of rows; this one has a single order of summation. Weights are
float32 whatever the activations are.
"""

from __future__ import annotations

from ctypes import byref

import torch
from torch import Tensor

from penstock.engine.backends.cpu.layout import DTYPE_CODES, LayoutError, dtype_code, need_contiguous
from penstock.engine.backends.cpu.native import DenseArgs, Handle

_TILE = 16


class DenseLinear:
    """y = x W^T + b with W [out, in]."""

    def __init__(self, handle: Handle, weight: Tensor, bias: Tensor | None) -> None:
        self.out_features, self.in_features = weight.shape
        columns = -(-self.out_features // _TILE) * _TILE
        padded = torch.zeros(columns, self.in_features)
        padded[: self.out_features] = weight
        self.packed = padded.view(-1, _TILE, self.in_features).transpose(1, 2).contiguous()
        self.bias = None if bias is None else bias.detach().float().contiguous()
        self.weight_bytes = self.packed.numel() * 4
        self._handle = handle

    def __call__(self, x: Tensor) -> Tensor:
        need_contiguous(x, "x")
        if x.dim() != 2 or x.shape[1] != self.in_features:
            raise LayoutError(f"x must be [T, {self.in_features}], got {tuple(x.shape)}")
        out = torch.empty((x.shape[0], self.out_features), dtype=x.dtype)
        args = DenseArgs(
            x.data_ptr(), self.packed.data_ptr(), None if self.bias is None else self.bias.data_ptr(), out.data_ptr(),
            x.shape[0], self.out_features, self.in_features, dtype_code(x, "x"), DTYPE_CODES[out.dtype],
        )  # fmt: skip
        self._handle.lib.pk_dense(self._handle.pointer, byref(args))
        return out
