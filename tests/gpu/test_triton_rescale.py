"""FP8 products whose scales are applied behind them, against float64, and beside the product with scales in speed."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch
from gpu_harness import MODE, QUICK, Row, bandwidth, check, poisoned_outputs, rand, time_us
from test_triton_elementwise import silu64
from test_triton_gemv import linear64, make_weight
from torch import Tensor

from penstock.engine.backends.cuda.kernels import activation, rescale
from penstock.engine.backends.cuda.linear import Fp8Linear, ScaledTensor, without_scales

BF16, FP8 = torch.bfloat16, torch.float8_e4m3fn
Scales = tuple[Tensor, Tensor]


def scales(tokens: int, n: int) -> Scales:
    return rand(tokens, 1).abs() + 0.1, rand(n).abs() * 0.01 + 1e-3


def test_rescale() -> None:
    for tokens, n in [(3, 48), (2, 1100)] if QUICK else [(9, 4096), (200, 1040)]:
        for biased in (False, True):
            y, (rows, columns) = rand(tokens, n, dtype=BF16, scale=1e4), scales(tokens, n)
            bias = rand(n, dtype=BF16) if biased else None
            want = y.double() * rows.double() * columns.double()
            if bias is not None:
                want = want + bias.double()
            check(f"rescale {tokens} x {n}", rescale.rescale(y, rows, columns, bias), want)


def test_gate_of_unscaled_outputs() -> None:
    for tokens, ffn in [(3, 96)] if QUICK else [(9, 2048), (64, 520)]:
        y, (rows, columns) = rand(tokens, 2 * ffn, dtype=BF16, scale=100), scales(tokens, 2 * ffn)
        with poisoned_outputs():
            out, scale = activation.gate_mul_fp8(y, rows, columns, "silu")
        if MODE != "compile":
            want = silu64(y.double() * rows.double() * columns.double())
            check(f"gate {tokens} x {ffn}", out.float() * scale, want, 5e-2)


def test_linear_of_any_number_of_tokens() -> None:
    if MODE != "device":
        return
    for n, k in ((4096, 14336), (1040, 592)):
        weight, scale = make_weight(n, k, FP8)
        assert scale is not None
        for tokens in (9, 33, 64, 200, 300):
            linear = Fp8Linear(weight, rand(n, dtype=BF16) if tokens == 33 else None, scale)
            x = ScaledTensor(*activation.quantize_fp8(rand(tokens, k, dtype=BF16)))
            want = linear64(x.data.float() * x.scale, weight, linear.bias, scale)
            check(f"{tokens} x {k} -> {n}", linear(x), want)
            gated = linear.gated(x, "silu")
            assert isinstance(gated, ScaledTensor)
            check(f"{tokens} x {k} -> {n}, gated", gated.data.float() * gated.scale, silu64(want), 5e-2)


def bench_rescale() -> Iterator[Row]:
    """Both forms, with the gate where there is one."""
    if MODE != "device":
        return
    for n, k in ((6144, 4096), (4096, 4096), (28672, 4096), (4096, 14336)):
        weights = [make_weight(n, k, FP8) for _ in range(max(2, min(24, 400_000_000 // (n * k))))]
        linears = [Fp8Linear(weight, None, scale) for weight, scale in weights if scale is not None]
        for tokens in (16, 64, 128, 256):
            x = ScaledTensor(*activation.quantize_fp8(rand(tokens, k, dtype=BF16)))
            rows, behind = partial(scaled, x), partial(unscaled, x)
            us = time_us([partial(rows, linear) for linear in linears], repeats=7)
            yield bandwidth(f"fp8 b{tokens} {n}x{k} scales inside", us, n * k)
            us = time_us([partial(behind, linear) for linear in linears], repeats=7)
            yield bandwidth(f"fp8 b{tokens} {n}x{k} scales behind", us, n * k)


def scaled(x: ScaledTensor, linear: Fp8Linear) -> object:
    y = torch._scaled_mm(
        x.data, linear.weight.t(), x.scale, linear.scale.unsqueeze(0), out_dtype=BF16, use_fast_accum=True
    )
    return activation.silu_mul_fp8(y, pdl=True) if linear.weight.shape[0] > 8192 else y


def unscaled(x: ScaledTensor, linear: Fp8Linear) -> object:
    y = without_scales(x, linear.weight)
    if linear.weight.shape[0] > 8192:
        return activation.gate_mul_fp8(y, x.scale, linear.scale, "silu", pdl=True)
    return rescale.rescale(y, x.scale, linear.scale, pdl=True)
