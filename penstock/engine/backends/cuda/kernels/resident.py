"""Linear layers of one token by programs that stay: y = x W^T, bound by reading the weights once.

There are only as many programs as fit on the device beside those of the next launch, and each takes every so many-th
group of weight rows. Weights pass through a ring of asynchronous copies, so reads stay in flight while a program
multiplies. The ring is filled before the program waits for its inputs: weights are constants, so the kernel before and
this one's first reads overlap. A program reads its input once, so normalizing it there costs next to nothing.

Ordinary arithmetic takes 2.5 instructions for an FP8 weight, which keeps up with the memory but leaves no room. Tensor
cores take a quarter of that, though there is but one token: the threads of a warp hold different columns of the same
two weight rows, and the same columns of the input. Four neighbouring threads make up a row of one operand and a column
of the other, so the sums that are wanted lie on the diagonal of the product, and the rest of it is dropped.

Invariant: inside the loop only constants are loaded where the compiler may move loads in front of the wait. The input
and the residual are loaded under conditions, which it does not move.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from penstock.engine.backends.cuda.kernels.common import (
    INTERPRETED,
    ceil_div,
    launch,
    launch_successor,
    next_power_of_2,
    wait_for_inputs,
)

HALF_PEAK = tl.constexpr(32768.0)
"""Inputs are scaled down to this before they become float16."""


@dataclass(frozen=True, slots=True)
class ResidentConfig:
    """Shape of the launch: pairs of weight rows in a group, and how many groups are copied ahead."""

    pairs: int
    num_warps: int
    ahead: int
    per_processor: int


_DIAGONAL = """
    .reg .u32 lane, group, want;
    .reg .pred even, odd;
    mov.u32 lane, %laneid;
    shr.u32 group, lane, 2;
    and.b32 want, lane, 3;
    shl.b32 want, want, 1;
    setp.eq.u32 even, group, want;
    or.b32 want, want, 1;
    setp.eq.u32 odd, group, want;
    selp.f32 $0, c0, 0f00000000, even;
    selp.f32 $1, c1, 0f00000000, odd;
    selp.f32 $2, c2, 0f00000000, even;
    selp.f32 $3, c3, 0f00000000, odd;
"""


def _multiply(dtype: str, a: tuple[str, str, str, str], b: tuple[str, str]) -> str:
    sums = "{c0, c1, c2, c3}"
    return (
        f"mma.sync.aligned.m16n8k16.row.col.f32.{dtype}.{dtype}.f32 "
        f"{sums}, {{{', '.join(a)}}}, {{{', '.join(b)}}}, {sums};\n"
    )


def _product_of_bytes() -> str:
    code = """{
    .reg .b32 v<2>, z<2>, l<2>, h<2>, a<4>;
    .reg .b16 p<4>, q<4>;
    .reg .f32 c<4>;
    mov.f32 c0, 0f00000000; mov.f32 c1, 0f00000000; mov.f32 c2, 0f00000000; mov.f32 c3, 0f00000000;
"""
    for i in range(2):
        code += f"mov.b64 {{p0, p1, p2, p3}}, ${4 + i};\nmov.b64 {{q0, q1, q2, q3}}, ${6 + i};\n"
        code += f"mov.b64 {{l0, l1}}, ${8 + i};\nmov.b64 {{h0, h1}}, ${10 + i};\n"
        for half, x in enumerate(("l", "h")):
            for at, source in enumerate((f"p{2 * half}", f"q{2 * half}", f"p{2 * half + 1}", f"q{2 * half + 1}")):
                code += f"cvt.rn.f16x2.e4m3x2 a{at}, {source};\n"
            code += _multiply("f16", ("a0", "a1", "a2", "a3"), (f"{x}0", f"{x}1"))
    return code + _DIAGONAL + "}"


def _product_of_words(dtype: str) -> str:
    code = """{
    .reg .b32 v<2>, z<2>, l<2>;
    .reg .f32 c<4>;
    mov.f32 c0, 0f00000000; mov.f32 c1, 0f00000000; mov.f32 c2, 0f00000000; mov.f32 c3, 0f00000000;
"""
    for i in range(2):
        code += f"mov.b64 {{v0, v1}}, ${4 + i};\nmov.b64 {{z0, z1}}, ${6 + i};\nmov.b64 {{l0, l1}}, ${8 + i};\n"
        code += _multiply(dtype, ("v0", "z0", "v1", "z1"), ("l0", "l1"))
    return code + _DIAGONAL + "}"


_BYTES = tl.constexpr(_product_of_bytes())
_BF16 = tl.constexpr(_product_of_words("bf16"))
_F16 = tl.constexpr(_product_of_words("f16"))


@triton.jit
def _word(packed: tl.tensor, at: tl.constexpr, dtype: tl.constexpr) -> tl.tensor:
    """One of the four 16-bit numbers in each 64-bit word, as float32."""
    return ((packed >> (16 * at)) & 0xFFFF).to(tl.uint16).to(dtype, bitcast=True).to(tl.float32)


@triton.jit
def _pack(a: tl.tensor, b: tl.tensor, c: tl.tensor, d: tl.tensor, dtype: tl.constexpr) -> tl.tensor:
    """Four numbers in one 64-bit word, each as 16 bits."""
    low = (
        a.to(dtype).to(tl.uint16, bitcast=True).to(tl.int64)
        | b.to(dtype).to(tl.uint16, bitcast=True).to(tl.int64) << 16
    )
    high = (
        c.to(dtype).to(tl.uint16, bitcast=True).to(tl.int64)
        | d.to(dtype).to(tl.uint16, bitcast=True).to(tl.int64) << 16
    )
    return low | high << 32


@triton.jit
def _products(
    w: tl.tensor, u: tl.tensor, x: tl.tensor, x_high: tl.tensor, BYTES: tl.constexpr, dtype: tl.constexpr
) -> tuple[tl.tensor, tl.tensor]:
    """Of two weight rows in 64-bit words with the input: numbers whose sum over a row is the row's."""
    if INTERPRETED:
        first = tl.zeros(w.shape, tl.float32)
        second = tl.zeros(w.shape, tl.float32)
        for i in tl.static_range(8 if BYTES else 4):
            if BYTES:
                factor = _word(x_high if i >= 4 else x, i % 4, tl.float16)
                a = ((w >> (8 * i)) & 255).to(tl.uint8).to(tl.float8e4nv, bitcast=True).to(tl.float32)
                b = ((u >> (8 * i)) & 255).to(tl.uint8).to(tl.float8e4nv, bitcast=True).to(tl.float32)
            else:
                factor = _word(x, i, dtype)
                a = _word(w, i, dtype)
                b = _word(u, i, dtype)
            first += a * factor
            second += b * factor
    elif BYTES:
        first, second = tl.inline_asm_elementwise(
            _BYTES, "=f,=f,=f,=f,l,l,l,l,l,l,l,l", [w, u, x, x_high], (tl.float32, tl.float32), is_pure=False, pack=2
        )
    elif dtype == tl.bfloat16:
        first, second = tl.inline_asm_elementwise(
            _BF16, "=f,=f,=f,=f,l,l,l,l,l,l", [w, u, x], (tl.float32, tl.float32), is_pure=False, pack=2
        )
    else:
        first, second = tl.inline_asm_elementwise(
            _F16, "=f,=f,=f,=f,l,l,l,l,l,l", [w, u, x], (tl.float32, tl.float32), is_pure=False, pack=2
        )
    return first, second


@triton.jit
def _resident_kernel(
    x_ptr: tl.tensor,
    weight_ptr: tl.tensor,
    out_ptr: tl.tensor,
    bias_ptr: tl.tensor,
    scale_ptr: tl.tensor,
    residual_ptr: tl.tensor,
    norm_ptr: tl.tensor,
    eps: tl.tensor,
    N: tl.constexpr,
    K: tl.constexpr,
    PAIRS: tl.constexpr,
    BLOCK: tl.constexpr,
    PROGRAMS: tl.constexpr,
    AHEAD: tl.constexpr,
    BYTES: tl.constexpr,
    BIAS: tl.constexpr,
    SCALED: tl.constexpr,
    RESIDUAL: tl.constexpr,
    GATED: tl.constexpr,
    NORM: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    program = tl.program_id(0)
    launch_successor(PDL)
    # Everything is read in words of 64 bits: eight weights of a byte, or four of two.
    COUNT: tl.constexpr = K // 8 if BYTES else K // 4
    STEP: tl.constexpr = PAIRS if GATED else 2 * PAIRS
    dtype: tl.constexpr = out_ptr.dtype.element_ty
    kind: tl.constexpr = tl.float16 if BYTES else dtype
    e = tl.arange(0, BLOCK)
    inside = e < COUNT
    x = tl.zeros([BLOCK], tl.int64)
    x_high = x
    factor = 1.0
    for group in tl.range(program, (N + STEP - 1) // STEP, PROGRAMS, num_stages=AHEAD + 1):
        # Rows past the end read the last row: their sums are not stored.
        n = group * STEP + tl.arange(0, PAIRS)
        at = weight_ptr + tl.minimum(n, N - 1).to(tl.int64)[:, None] * COUNT + e[None, :]
        m = n + (N if GATED else PAIRS)
        if GATED:
            other = at + N * COUNT
        else:
            other = weight_ptr + tl.minimum(m, N - 1).to(tl.int64)[:, None] * COUNT + e[None, :]
        if BLOCK == COUNT:
            w = tl.load(at)
            u = tl.load(other)
        else:
            w = tl.load(at, mask=inside[None, :], other=0)
            u = tl.load(other, mask=inside[None, :], other=0)
        LAST: tl.constexpr = 2 * N if GATED else N
        if SCALED:
            scale = tl.load(scale_ptr + n, mask=n < N, other=0.0)
            scale_other = tl.load(scale_ptr + m, mask=m < LAST, other=0.0)
        if BIAS:
            bias = tl.load(bias_ptr + n, mask=n < N, other=0.0)
            bias_other = tl.load(bias_ptr + m, mask=m < LAST, other=0.0)
        if group == program:
            WORDS: tl.constexpr = 2 if BYTES else 1
            if NORM:
                gain = tl.load(norm_ptr + WORDS * e, mask=inside, other=0)
                if BYTES:
                    gain_high = tl.load(norm_ptr + WORDS * e + 1, mask=inside, other=0)
            wait_for_inputs(PDL)
            x = tl.load(x_ptr + WORDS * e, mask=inside, other=0)
            if BYTES:
                x_high = tl.load(x_ptr + WORDS * e + 1, mask=inside, other=0)
            if BYTES or NORM:
                a, b, c, d = _word(x, 0, dtype), _word(x, 1, dtype), _word(x, 2, dtype), _word(x, 3, dtype)
                if BYTES:
                    p, q = _word(x_high, 0, dtype), _word(x_high, 1, dtype)
                    r, s = _word(x_high, 2, dtype), _word(x_high, 3, dtype)
                if NORM:
                    square = a * a + b * b + c * c + d * d
                    if BYTES:
                        square += p * p + q * q + r * r + s * s
                    inverse = tl.rsqrt(tl.sum(square, axis=0) / K + eps)
                    a *= inverse * _word(gain, 0, dtype)
                    b *= inverse * _word(gain, 1, dtype)
                    c *= inverse * _word(gain, 2, dtype)
                    d *= inverse * _word(gain, 3, dtype)
                    if BYTES:
                        p *= inverse * _word(gain_high, 0, dtype)
                        q *= inverse * _word(gain_high, 1, dtype)
                        r *= inverse * _word(gain_high, 2, dtype)
                        s *= inverse * _word(gain_high, 3, dtype)
                if BYTES:
                    peak = tl.maximum(tl.maximum(tl.abs(a), tl.abs(b)), tl.maximum(tl.abs(c), tl.abs(d)))
                    high = tl.maximum(tl.maximum(tl.abs(p), tl.abs(q)), tl.maximum(tl.abs(r), tl.abs(s)))
                    factor = tl.maximum(tl.max(tl.maximum(peak, high), axis=0) / HALF_PEAK, 1.0)
                    small = 1.0 / factor
                    x_high = _pack(p * small, q * small, r * small, s * small, kind)
                    x = _pack(a * small, b * small, c * small, d * small, kind)
                else:
                    x = _pack(a, b, c, d, kind)
        if RESIDUAL:
            held = tl.zeros([PAIRS], dtype)
            held_other = held
            if group >= program:  # always; but the compiler does not know it
                held = tl.load(residual_ptr + n, mask=n < N, other=0.0)
                if not GATED:
                    held_other = tl.load(residual_ptr + m, mask=m < N, other=0.0)
        first, second = _products(w, u, x[None, :], x_high[None, :], BYTES, kind)
        y = tl.sum(first, axis=1) * factor
        z = tl.sum(second, axis=1) * factor
        if SCALED:
            y *= scale
            z *= scale_other
        if BIAS:
            y += bias.to(tl.float32)
            z += bias_other.to(tl.float32)
        if GATED:
            y = y / (1.0 + tl.exp(-y)) * z
        if RESIDUAL:
            y += held.to(tl.float32)
        tl.store(out_ptr + n, y.to(dtype), mask=n < N)
        if not GATED:
            if RESIDUAL:
                z += held_other.to(tl.float32)
            tl.store(out_ptr + m, z.to(dtype), mask=m < N)


@cache
def _processors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 132


def suits(x: Tensor, weight: Tensor) -> bool:
    """Whether the kernel can multiply these: 16-bit inputs, weights of the same kind or FP8, whole 16 bytes."""
    return (
        x.dtype in (torch.bfloat16, torch.float16)
        and weight.dtype in (x.dtype, torch.float8_e4m3fn)
        and weight.shape[1] * weight.element_size() % 16 == 0
        and weight.shape[1] * weight.element_size() >= 512
        and x.data_ptr() % 16 == 0
        and weight.data_ptr() % 16 == 0
    )


def linear(
    x: Tensor,
    weight: Tensor,
    out: Tensor,
    config: ResidentConfig,
    *,
    bias: Tensor | None = None,
    weight_scale: Tensor | None = None,
    norm: Tensor | None = None,
    eps: float = 0.0,
    residual: Tensor | None = None,
    gated: bool = False,
    pdl: bool = False,
) -> Tensor:
    """As `gemv.linear`, for one token and what `suits`."""
    k = x.shape[1]
    n = weight.shape[0] // 2 if gated else weight.shape[0]
    words = k * weight.element_size() // 8
    groups = ceil_div(n, config.pairs if gated else 2 * config.pairs)
    programs = min(config.per_processor * _processors(x.device), groups)
    x = x.view(torch.int64)
    launch(
        _resident_kernel,
        (programs,),
        x,
        weight.view(torch.int64),
        out,
        x if bias is None else bias,
        x if weight_scale is None else weight_scale,
        x if residual is None else residual,
        x if norm is None else norm.view(torch.int64),
        eps,
        N=n,
        K=k,
        PAIRS=config.pairs,
        BLOCK=next_power_of_2(words),
        PROGRAMS=programs,
        AHEAD=config.ahead,
        BYTES=weight.element_size() == 1,
        BIAS=bias is not None,
        SCALED=weight_scale is not None,
        RESIDUAL=residual is not None,
        GATED=gated,
        NORM=norm is not None,
        num_warps=config.num_warps,
        pdl=pdl,
    )
    return out
