"""Linear layers on MXFP4 weights as checkpoints store them: four bits per weight, widened when it is multiplied.

Few rows are multiplied in float32 by the native kernel, which is batch-invariant. Many rows go to the vendor's matmul,
with the weights of this one layer widened temporarily: each is used often enough to pay for that.
"""

from __future__ import annotations

from ctypes import byref
from typing import Final

import torch
from torch import Tensor
from torch.nn import functional as F

from penstock.engine.backends.cpu.layout import DTYPE_CODES, LayoutError, dtype_code, need_contiguous
from penstock.engine.backends.cpu.native import Handle, Mxfp4Args
from penstock.engine.loading.mxfp4 import BLOCK, Mxfp4, stored_mxfp4
from penstock.engine.models.layers.linear import Linear
from penstock.engine.models.weights import Quantizer, Weights

_TILE: Final = 16
_MANY: Final = 64
"""Rows from which on the vendor's matmul is faster, about."""


class Mxfp4Linear:
    """y = x W^T + b."""

    def __init__(self, handle: Handle, weight: Mxfp4, bias: Tensor | None = None, *, many: bool = True) -> None:
        """`many`: whether many rows are left to the vendor's matmul."""
        self.out_features, self.in_features = weight.shape
        if self.in_features % BLOCK or not self.out_features:
            raise LayoutError(f"MXFP4 weights {weight.shape} are not supported")
        tiles = -(-self.out_features // _TILE)
        self.packed, self.exponents = (_tiled(handle, part, tiles) for part in (weight.blocks, weight.scales))
        self.many = _MANY if many else 0
        self.bias = None if bias is None else bias.detach().float().contiguous()
        self.weight_bytes = self.packed.numel() + self.exponents.numel()
        self._handle = handle

    def __call__(self, x: Tensor) -> Tensor:
        """[T, in] to [T, out], in the dtype of `x`."""
        need_contiguous(x, "x")
        if x.dim() != 2 or x.shape[1] != self.in_features:
            raise LayoutError(f"x must be [T, {self.in_features}], got {tuple(x.shape)}")
        if self.many and x.shape[0] >= self.many:
            return F.linear(x, self.widened(x.dtype), None if self.bias is None else self.bias.to(x.dtype))
        out = torch.empty((x.shape[0], self.out_features), dtype=x.dtype)
        args = Mxfp4Args(
            x.data_ptr(), self.packed.data_ptr(), self.exponents.data_ptr(),
            None if self.bias is None else self.bias.data_ptr(), out.data_ptr(),
            x.shape[0], self.out_features, self.in_features, dtype_code(x, "x"), DTYPE_CODES[out.dtype],
        )  # fmt: skip
        self._handle.lib.pk_mxfp4(self._handle.pointer, byref(args))
        return out

    def widened(self, dtype: torch.dtype) -> Tensor:
        """The weights as numbers of `dtype` [out, in]."""
        out = torch.empty((self.out_features, self.in_features), dtype=dtype)
        self._handle.lib.pk_mxfp4_widen(
            self._handle.pointer, self.packed.data_ptr(), self.exponents.data_ptr(), out.data_ptr(),
            self.out_features, self.in_features, DTYPE_CODES[dtype],
        )  # fmt: skip
        return out


def _tiled(handle: Handle, matrix: Tensor, tiles: int) -> Tensor:
    """uint8 [out, n] as [tiles, n, 16], padded with zeros."""
    packed = handle.memory.take(tiles * _TILE * matrix.shape[1]).view(tiles, matrix.shape[1], _TILE)
    padded = F.pad(matrix, (0, 0, 0, tiles * _TILE - matrix.shape[0]))
    return packed.copy_(padded.view(tiles, _TILE, -1).transpose(1, 2))


class Mxfp4Quantizer:
    """See `Quantizer`. Matrices that are not in MXFP4 go to `rest`."""

    def __init__(self, handle: Handle, rest: Quantizer | None, *, many: bool) -> None:
        """`many`: see `Mxfp4Linear`."""
        self._handle = handle
        self.rest = rest
        self._many = many

    def __call__(self, weights: Weights, names: dict[str, int], inputs: int, bias: Tensor | None) -> Linear | None:
        stored = stored_mxfp4(weights, names, inputs, "cpu")
        if stored is not None:
            return Mxfp4Linear(self._handle, stored, bias, many=self._many)
        return None if self.rest is None else self.rest(weights, names, inputs, bias)
