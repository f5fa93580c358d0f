"""Linear layers on quantized weights, for CPUs where bytes or integer arithmetic are cheaper than floats.

Weights are blocks of 32 along the input: int8 with a scale, or 4 bits with a scale and a minimum. Activations are
rounded when the layer is applied: to one or two int8 digits per row and block, or, for many rows, to float16. That
rounding is the only approximation beyond the weights' own. The packed layout suits this machine: never store it.
"""

from __future__ import annotations

from collections.abc import Callable
from ctypes import byref
from functools import cached_property
from typing import Final, Literal

import torch
from torch import Tensor

from penstock.engine.backends.cpu.native import Handle, LinearArgs
from penstock.engine.backends.cpu.ops import DTYPE_CODES, LayoutError, dtype_code, need_contiguous
from penstock.engine.backends.interface import Activation

GgufKind = Literal["Q4_0", "Q4_1", "Q8_0"]
BLOCK: Final = 32
_GGUF: Final = {"Q4_0": (2, 18), "Q4_1": (3, 20), "Q8_0": (8, 34)}
"""GGUF's number of each block type, and the bytes of one block."""

_GATES: Final[dict[Activation, int]] = {"silu": 1, "gelu_tanh": 2}
"""As `Gate` in gate.h."""
_MATRIX_ROWS: Final = 256
"""From this many rows on, widened weights on matrix tiles beat blocks there, about; `Tuner` measures it."""


class QuantLinear:
    """y = x W^T + b with W [out, in] quantized. Build it with `from_float` or `from_gguf`."""

    def __init__(self, handle: Handle, packed: Tensor, shape: tuple[int, int], bits: int, bias: Tensor | None) -> None:
        self.out_features, self.in_features = shape
        if bias is not None and tuple(bias.shape) != (self.out_features,):
            raise LayoutError(f"bias must be [{self.out_features}], got {tuple(bias.shape)}")
        self.bits = bits
        self.digits = 2
        """int8 digits that an activation is rounded to: 2 keeps about 16 bits, 1 halves the arithmetic."""
        self.packed = packed
        self.columns: Tensor | None = None
        """The weights in int8 with one scale per output, where they are kept in that form too (see `keep_columns`)."""
        self.column_shrink: Tensor | None = None
        """float32 [in]: what inputs are multiplied by for that form; its weights are as much larger."""
        self.column_rows = 0
        """From this many rows on, that form on matrix tiles; 0 means never."""
        self.watcher: Callable[[Tensor], None] | None = None
        """Is shown the inputs of every call, when there is one."""
        self.block_rows = 1 if handle.has_matrix and bits < 16 else 0
        """From this many rows on, blocks on matrix tiles, where the CPU has them; 0 means never."""
        self.matrix_rows = 1 if bits == 16 else _MATRIX_ROWS if handle.has_matrix else 0
        """From this many rows on, bfloat16 weights on matrix tiles, widened where they are few-bit; 0 means never."""
        self.half_rows = 0
        """From this many rows on, products in float16 vectors (see `has_half`); 0 means never."""
        self.out_dtype: torch.dtype | None = None
        """Of the outputs; None: as the inputs."""
        self.bias = None if bias is None else bias.detach().float().contiguous()
        self.weight_bytes = packed.numel()
        self._handle = handle

    def keep_columns(self) -> None:
        """Keep int8 by columns beside the few bits: a byte more per weight, and the fastest form for several rows."""
        if self.columns is None and self._handle.has_matrix and self.bits < 16:
            shape = self.out_features, self.in_features
            self.columns = self._handle.memory.take(self._handle.lib.pk_linear_column_bytes(*shape))
            self._pack_columns(None)
            self.column_rows = 1

    def stretch_columns(self, stretch: Tensor) -> None:
        """Round the weights of that form times `stretch` (positive, [in]): finer where it is larger."""
        stretch = stretch.float().contiguous()
        if self.columns is None or stretch.shape != (self.in_features,):
            raise LayoutError(f"no form by columns to be stretched by {tuple(stretch.shape)}")
        self._pack_columns(stretch)
        self.column_shrink = 1 / stretch

    def _pack_columns(self, stretch: Tensor | None) -> None:
        assert self.columns is not None
        self._handle.lib.pk_linear_columns(
            self._handle.pointer, self.packed.data_ptr(), None if stretch is None else stretch.data_ptr(),
            self.columns.data_ptr(), self.out_features, self.in_features, self.bits,
        )  # fmt: skip

    @cached_property
    def has_half(self) -> bool:
        """Whether products can be done in float16: the CPU has the vectors, and the weights stay in their range."""
        shape = self.out_features, self.in_features
        return bool(self._handle.lib.pk_linear_has_half(self.packed.data_ptr(), *shape, self.bits))

    def narrowed(self, columns: int) -> QuantLinear:
        """The first `columns` outputs, without their bias, on the same memory."""
        shape = min(columns, self.out_features), self.in_features
        part = QuantLinear(self._handle, self.packed, shape, self.bits, None)
        part.digits, part.columns, part.column_shrink = self.digits, self.columns, self.column_shrink
        return part

    @staticmethod
    def supports(shape: tuple[int, ...]) -> bool:
        """Whether a weight of this shape can be held: two axes, the input a multiple of 32."""
        return len(shape) == 2 and shape[0] > 0 and shape[1] > 0 and shape[1] % BLOCK == 0

    @classmethod
    def from_float(cls, handle: Handle, weight: Tensor, bias: Tensor | None = None, *, bits: int = 8) -> QuantLinear:
        """Round a float weight to the nearest representable one, block by block.

        A weight that was dequantized from Q8_0 (bits=8) or Q4_1 (bits=4) comes back to the values it had. 16 means
        bfloat16 laid out for matrix tiles, where the CPU has them; activations must be bfloat16 then.
        """
        if bits not in ((4, 8, 16) if handle.has_matrix else (4, 8)):
            raise LayoutError(f"weights of {bits} bits are not supported here")
        shape = _checked(tuple(weight.shape))
        source = weight.detach().float().contiguous()
        packed = _allocate(handle, shape, bits)
        if handle.lib.pk_linear_pack_floats(handle.pointer, source.data_ptr(), packed.data_ptr(), *shape, bits):
            raise LayoutError("the weight holds values that are not finite, or too large for a float16 scale")
        return cls(handle, packed, shape, bits, bias)

    @classmethod
    def from_gguf(
        cls, handle: Handle, kind: GgufKind, raw: Tensor, shape: tuple[int, int], bias: Tensor | None = None
    ) -> QuantLinear:
        """Rearrange GGUF blocks (uint8, row after row, as in the file); every weight keeps its exact value."""
        if kind not in _GGUF:
            raise LayoutError(f"GGUF type {kind} is not supported; use one of {', '.join(_GGUF)}")
        shape = _checked(shape)
        number, block_bytes = _GGUF[kind]
        need_contiguous(raw, "raw blocks")
        expected = shape[0] * shape[1] // BLOCK * block_bytes
        if raw.dtype is not torch.uint8 or raw.numel() != expected:
            raise LayoutError(f"{kind} of shape {shape} is {expected} bytes of uint8, got {raw.numel()} of {raw.dtype}")
        bits = 8 if kind == "Q8_0" else 4
        packed = _allocate(handle, shape, bits)
        if handle.lib.pk_linear_pack_gguf(handle.pointer, raw.data_ptr(), packed.data_ptr(), *shape, number):
            raise LayoutError(f"the {kind} tensor holds a scale that is not finite: the file is damaged")
        return cls(handle, packed, shape, bits, bias)

    def __call__(self, x: Tensor, out_dtype: torch.dtype | None = None) -> Tensor:
        """[T, in] to [T, out], in the dtype of `x` unless an `out_dtype` says otherwise."""
        return self._apply(x, out_dtype, self.out_features, gate=0)

    def gated(self, x: Tensor, activation: Activation) -> Tensor:
        """[T, in] to [T, out / 2]: act(first half of the outputs) * second half, which need not be written anywhere."""
        if self.out_features % 2:
            raise LayoutError(f"{self.out_features} outputs are not two halves")
        return self._apply(x, None, self.out_features // 2, gate=_GATES[activation])

    def draw(self, x: Tensor, temperatures: Tensor, keys: Tensor, logits: Tensor) -> Tensor:
        """int64 [T]: what `Ops.gumbel_argmax` draws from the outputs. Those need not be written anywhere, or else to
        `logits`, float32 [T, out]."""
        rows = x.shape[0]
        for what, tensor, dtype, shape in (
            ("temperatures", temperatures, torch.float32, (rows,)),
            ("keys", keys, torch.int64, (rows,)),
            ("logits", logits, torch.float32, (rows, self.out_features)),
        ):
            need_contiguous(tensor, what)
            if tensor.dtype is not dtype or tuple(tensor.shape) != shape:
                raise LayoutError(f"{what} must be {dtype} {list(shape)}, got {tensor.dtype} {list(tensor.shape)}")
        drawn = torch.empty(rows, dtype=torch.int64)
        self._handle.lib.pk_linear_draw(
            self._handle.pointer, byref(self._args(x, logits, gate=0)),
            temperatures.data_ptr(), keys.data_ptr(), drawn.data_ptr(),
        )  # fmt: skip
        return drawn

    def _apply(self, x: Tensor, out_dtype: torch.dtype | None, width: int, gate: int) -> Tensor:
        if self.watcher is not None:
            self.watcher(x)
        out = torch.empty((x.shape[0], width), dtype=out_dtype or self.out_dtype or x.dtype)
        self._handle.lib.pk_linear(self._handle.pointer, byref(self._args(x, out, gate)))
        return out

    def _args(self, x: Tensor, out: Tensor, gate: int) -> LinearArgs:
        need_contiguous(x, "x")
        if x.dim() != 2 or x.shape[1] != self.in_features:
            raise LayoutError(f"x must be [T, {self.in_features}], got {tuple(x.shape)}")
        return LinearArgs(
            x.data_ptr(), self.packed.data_ptr(), None if self.bias is None else self.bias.data_ptr(),
            out.data_ptr(), x.shape[0], self.out_features, self.in_features,
            self.bits, dtype_code(x, "x"), DTYPE_CODES[out.dtype], self.digits,
            None if self.columns is None else self.columns.data_ptr(),
            None if self.column_shrink is None else self.column_shrink.data_ptr(),
            self.column_rows, self.block_rows, self.matrix_rows, self.half_rows, gate,
        )  # fmt: skip


def _checked(shape: tuple[int, ...]) -> tuple[int, int]:
    if not QuantLinear.supports(shape):
        raise LayoutError(f"a quantized weight must be [out, in] with in a multiple of {BLOCK}, got {shape}")
    return shape[0], shape[1]


def _allocate(handle: Handle, shape: tuple[int, int], bits: int) -> Tensor:
    return handle.memory.take(handle.lib.pk_linear_bytes(*shape, bits))
