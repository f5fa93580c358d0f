"""Linear layers on quantized weights, for CPUs where bytes or integer arithmetic are cheaper than floats.

Weights are per-group: blocks of 32 along the input, int8 with a scale, or 4 bits with a scale and a minimum.
Activations are rounded when the layer is applied: per row and block to int8, or to int16 split into two int8; for many
rows to float16. That rounding is the only approximation beyond the weights' own. `first_rows` says from how many rows
on each form is used. The packed layout depends on the instruction set: never store it.
"""

from __future__ import annotations

from collections.abc import Callable
from ctypes import byref
from functools import cached_property
from typing import Final, Literal

import torch
from torch import Tensor

from penstock.engine.backends.cpu.layout import DTYPE_CODES, LayoutError, dtype_code, need_contiguous
from penstock.engine.backends.cpu.linear_forms import FirstRows
from penstock.engine.backends.cpu.native import Handle, LinearArgs
from penstock.engine.backends.interface import Activation

GgufKind = Literal["Q4_0", "Q4_1", "Q8_0"]
BLOCK: Final = 32
_GGUF: Final = {"Q4_0": (2, 18), "Q4_1": (3, 20), "Q8_0": (8, 34)}
"""GGUF's number of each block type, and the bytes of one block."""

_GATES: Final[dict[Activation, int]] = {"silu": 1, "gelu_tanh": 2}
"""As `Gate` in gate.h."""
_MATRIX_ROWS: Final = 256
"""From about this many rows on, weights widened to bfloat16 beat per-group integers on tiles; `Tuner` measures it."""


class QuantLinear:
    """y = x W^T + b with W [out, in] quantized. Build it with `from_float` or `from_gguf`."""

    def __init__(self, handle: Handle, packed: Tensor, shape: tuple[int, int], bits: int, bias: Tensor | None) -> None:
        self.out_features, self.in_features = shape
        if bias is not None and tuple(bias.shape) != (self.out_features,):
            raise LayoutError(f"bias must be [{self.out_features}], got {tuple(bias.shape)}")
        self.bits = bits
        self.activation_parts = 2
        """int8 parts of a rounded activation: 2 is int16 split into two int8, 1 is int8 and half the arithmetic."""
        self.packed = packed
        self.per_channel: Tensor | None = None
        """The weights in per-channel int8, where a second copy is kept (see `keep_per_channel`)."""
        self.per_channel_inputs: Tensor | None = None
        """float32 [in]: factor of the inputs for that copy, the inverse of the factor of its weights."""
        self.observer: Callable[[Tensor], None] | None = None
        """Is called with the inputs of every call, if set."""
        self.first_rows = FirstRows()
        if bits == 16:
            self.first_rows["bfloat16"] = 1
        elif handle.has_matrix:
            self.first_rows["per_group"] = 1
            self.first_rows["bfloat16"] = _MATRIX_ROWS
        self.out_dtype: torch.dtype | None = None
        """Of the outputs; None: as the inputs."""
        self.bias = None if bias is None else bias.detach().float().contiguous()
        self.weight_bytes = packed.numel()
        self._handle = handle

    def keep_per_channel(self) -> None:
        """Keep per-channel int8 beside the few bits: a byte more per weight, and the fastest form for several rows."""
        if self.per_channel is None and self._handle.has_per_channel and self.bits < 16:
            shape = self.out_features, self.in_features
            self.per_channel = self._handle.memory.take(self._handle.lib.pk_linear_per_channel_bytes(*shape))
            self._pack_per_channel(None)
            self.first_rows["per_channel"] = 1

    def scale_per_channel(self, scale: Tensor) -> None:
        """Activation-aware scaling: round the per-channel weights times `scale` (positive, [in]), finer where it is
        larger; inputs are divided by it."""
        scale = scale.float().contiguous()
        if self.per_channel is None or scale.shape != (self.in_features,):
            raise LayoutError(f"no per-channel weights that could be scaled by {tuple(scale.shape)}")
        self._pack_per_channel(scale)
        self.per_channel_inputs = 1 / scale

    def _pack_per_channel(self, scale: Tensor | None) -> None:
        assert self.per_channel is not None
        self._handle.lib.pk_linear_pack_per_channel(
            self._handle.pointer, self.packed.data_ptr(), None if scale is None else scale.data_ptr(),
            self.per_channel.data_ptr(), self.out_features, self.in_features, self.bits,
        )  # fmt: skip

    @cached_property
    def fits_float16(self) -> bool:
        """Whether products can be done in float16: the CPU has the vectors, and the weights stay in their range."""
        shape = self.out_features, self.in_features
        return bool(self._handle.lib.pk_linear_fits_float16(self.packed.data_ptr(), *shape, self.bits))

    def narrowed(self, columns: int) -> QuantLinear:
        """The first `columns` outputs, without their bias, on the same memory."""
        shape = min(columns, self.out_features), self.in_features
        part = QuantLinear(self._handle, self.packed, shape, self.bits, None)
        part.activation_parts, part.per_channel = self.activation_parts, self.per_channel
        part.per_channel_inputs = self.per_channel_inputs
        part.first_rows.copy_from(self.first_rows)
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
        """[T, in] to [T, out / 2]: act(first half of the outputs) * second half."""
        if self.out_features % 2:
            raise LayoutError(f"{self.out_features} outputs are not two halves")
        return self._apply(x, None, self.out_features // 2, gate=_GATES[activation])

    def sample(self, x: Tensor, temperatures: Tensor, keys: Tensor, logits: Tensor) -> Tensor:
        """int64 [T]: tokens as `Ops.gumbel_argmax` samples them from the outputs. Sampling is fused into the product
        where the form allows it; elsewhere the outputs are written to `logits`, float32 [T, out], first."""
        rows = x.shape[0]
        for what, tensor, dtype, shape in (
            ("temperatures", temperatures, torch.float32, (rows,)),
            ("keys", keys, torch.int64, (rows,)),
            ("logits", logits, torch.float32, (rows, self.out_features)),
        ):
            need_contiguous(tensor, what)
            if tensor.dtype is not dtype or tuple(tensor.shape) != shape:
                raise LayoutError(f"{what} must be {dtype} {list(shape)}, got {tensor.dtype} {list(tensor.shape)}")
        tokens = torch.empty(rows, dtype=torch.int64)
        self._handle.lib.pk_linear_sample(
            self._handle.pointer, byref(self._args(x, logits, gate=0)),
            temperatures.data_ptr(), keys.data_ptr(), tokens.data_ptr(),
        )  # fmt: skip
        return tokens

    def _apply(self, x: Tensor, out_dtype: torch.dtype | None, width: int, gate: int) -> Tensor:
        if self.observer is not None:
            self.observer(x)
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
            self.bits, dtype_code(x, "x"), DTYPE_CODES[out.dtype], self.activation_parts,
            None if self.per_channel is None else self.per_channel.data_ptr(),
            None if self.per_channel_inputs is None else self.per_channel_inputs.data_ptr(),
            self.first_rows.array, gate,
        )  # fmt: skip


def _checked(shape: tuple[int, ...]) -> tuple[int, int]:
    if not QuantLinear.supports(shape):
        raise LayoutError(f"a quantized weight must be [out, in] with in a multiple of {BLOCK}, got {shape}")
    return shape[0], shape[1]


def _allocate(handle: Handle, shape: tuple[int, int], bits: int) -> Tensor:
    return handle.memory.take(handle.lib.pk_linear_bytes(*shape, bits))
