"""Linear layers on FP8 (e4m3) weights as checkpoints store them: a byte per weight, widened when it is multiplied.

Scales are per output, or per output and group of inputs. Few rows are multiplied in float32 by the native kernel, which
is batch-invariant. Many rows go to the vendor's matmul, with the weights of this one layer widened temporarily: each is
used often enough to pay for that.
"""

from __future__ import annotations

from ctypes import byref
from typing import Final

import torch
from torch import Tensor
from torch.nn import functional as F

from penstock.engine.backends.cpu.layout import DTYPE_CODES, LayoutError, dtype_code, need_contiguous
from penstock.engine.backends.cpu.native import Float8Args, Handle

BLOCK: Final = 32
_TILE: Final = 16
_LARGEST: Final = 448.0
_MANY: Final = 64
"""Rows from which on the vendor's matmul is faster, about."""


class Float8Linear:
    """y = x W^T + b with W [out, in] = `weight` * `scale`."""

    def __init__(self, handle: Handle, weight: Tensor, scale: Tensor, bias: Tensor | None = None) -> None:
        """`weight`: float8_e4m3fn [out, in]. `scale`: [out, groups], each for in / groups consecutive inputs."""
        shape = tuple(weight.shape)
        if (
            not self.supports(shape)
            or scale.dim() != 2
            or scale.shape[0] != shape[0]
            or shape[1] % (4 * scale.shape[1])
        ):
            raise LayoutError(f"FP8 weights {shape} with scales {tuple(scale.shape)} are not supported")
        raw = weight.view(torch.uint8)
        if bool(((raw & 0x7F) == 0x7F).any()) or not bool(scale.isfinite().all()):
            raise LayoutError("the weight holds values that are not finite")
        self.out_features, self.in_features = shape
        self.many = 0
        """From this many rows on, the vendor's matmul; 0 means never."""
        tiles = -(-self.out_features // _TILE)
        self.packed = handle.memory.take(tiles * _TILE * self.in_features).view(tiles, self.in_features, _TILE)
        self.packed.copy_(_tiled(raw, tiles))
        self.scales = _tiled(scale.float(), tiles).contiguous()
        self.bias = None if bias is None else bias.detach().float().contiguous()
        self.weight_bytes = self.packed.numel() + 4 * self.scales.numel()
        self._handle = handle

    @staticmethod
    def supports(shape: tuple[int, ...]) -> bool:
        """Whether a weight of this shape can be held: two axes, the input a multiple of 32."""
        return len(shape) == 2 and shape[0] > 0 and shape[1] > 0 and shape[1] % BLOCK == 0

    @classmethod
    def from_float(
        cls, handle: Handle, weight: Tensor, bias: Tensor | None = None, peaks: Tensor | None = None
    ) -> Float8Linear:
        """Round a float weight to nearest, with one scale per output; `peaks`: see `row_peaks`."""
        wide = weight.detach().float()
        peaks = wide.abs().amax(1) if peaks is None else peaks
        scale = (peaks.unsqueeze(1) / _LARGEST).clamp(min=1e-12)
        return cls(handle, (wide / scale).to(torch.float8_e4m3fn), scale, bias)

    def take_many(self) -> Float8Linear:
        """Leave many rows to the vendor's matmul; returns the layer."""
        self.many = _MANY
        return self

    def __call__(self, x: Tensor) -> Tensor:
        """[T, in] to [T, out], in the dtype of `x`."""
        need_contiguous(x, "x")
        if x.dim() != 2 or x.shape[1] != self.in_features:
            raise LayoutError(f"x must be [T, {self.in_features}], got {tuple(x.shape)}")
        if self.many and x.shape[0] >= self.many:
            return F.linear(x, self.widened(x.dtype), None if self.bias is None else self.bias.to(x.dtype))
        out = torch.empty((x.shape[0], self.out_features), dtype=x.dtype)
        args = Float8Args(
            x.data_ptr(), self.packed.data_ptr(), self.scales.data_ptr(),
            None if self.bias is None else self.bias.data_ptr(), out.data_ptr(),
            x.shape[0], self.out_features, self.in_features, self.scales.shape[1],
            dtype_code(x, "x"), DTYPE_CODES[out.dtype],
        )  # fmt: skip
        self._handle.lib.pk_float8(self._handle.pointer, byref(args))
        return out

    def widened(self, dtype: torch.dtype) -> Tensor:
        """The weights as numbers of `dtype` [out, in]."""
        out = torch.empty((self.out_features, self.in_features), dtype=dtype)
        self._handle.lib.pk_float8_widen(
            self._handle.pointer, self.packed.data_ptr(), self.scales.data_ptr(), out.data_ptr(),
            self.out_features, self.in_features, self.scales.shape[1], DTYPE_CODES[dtype],
        )  # fmt: skip
        return out


def _tiled(matrix: Tensor, tiles: int) -> Tensor:
    """[out, n] as [tiles, n, 16], padded with zeros."""
    padded = F.pad(matrix, (0, 0, 0, tiles * _TILE - matrix.shape[0]))
    return padded.view(tiles, _TILE, -1).transpose(1, 2)
