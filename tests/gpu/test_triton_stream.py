"""FP8 products with few outputs and many inputs, against float64, and against the vendor's in speed."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch
from gpu_harness import MODE, QUICK, Row, bandwidth, check, check_equal, poisoned_outputs, rand, time_us
from test_triton_gemv import linear64
from torch import Tensor

from penstock.engine.backends.cuda.kernels import stream
from penstock.engine.backends.cuda.kernels.activation import quantize_fp8

FP8 = torch.float8_e4m3fn
SHAPES = [(300, 272), (64, 128)] if QUICK else [(4096, 14336), (1000, 576), (5120, 8192), (256, 1536)]


def make(n: int, k: int) -> tuple[Tensor, Tensor]:
    if MODE == "compile":
        return torch.empty(n, k, dtype=FP8), torch.empty(n)
    return rand(n, k, scale=50).to(FP8), rand(n).abs() * 0.01 + 1e-3


def test_stream_in_any_batch() -> None:
    for n, k in SHAPES:
        weight, scale = make(n, k)
        counters = stream.make_counters(weight)
        for batch in (24,) if QUICK else (9, 16, 48, 64):
            x, x_scale = quantize_fp8(rand(batch, k, dtype=torch.bfloat16))
            bias = rand(n, dtype=torch.bfloat16) if batch % 16 == 8 else None
            exact = x if MODE == "compile" else x.float() * x_scale
            for pdl in (False, True) if MODE != "interpret" else (False,):
                name = f"stream {batch} x {k} -> {n} {pdl}"
                with poisoned_outputs():
                    results = [stream.linear(x, x_scale, weight, scale, counters, bias, pdl=pdl) for _ in range(2)]
                check(name, results[0], linear64(exact, weight, bias, scale))
                check_equal(name, results[1], results[0])
                check_equal(f"{name}: counters", counters, torch.zeros_like(counters))


def bench_stream() -> Iterator[Row]:
    """The last matrix of an 8B feed-forward."""
    n, k = 4096, 14336
    weights = [make(n, k) for _ in range(1 if MODE == "compile" else 6)]
    for batch in (16, 64):
        x, x_scale = quantize_fp8(rand(batch, k, dtype=torch.bfloat16))
        if MODE == "device":

            def vendor(weight: Tensor, scale: Tensor, x: Tensor = x, x_scale: Tensor = x_scale) -> Tensor:
                return torch._scaled_mm(
                    x, weight.t(), scale_a=x_scale, scale_b=scale.unsqueeze(0), out_dtype=torch.bfloat16,
                    use_fast_accum=True,
                )  # fmt: skip

            yield bandwidth(f"fp8 b{batch} {n}x{k} vendor", time_us([partial(vendor, *w) for w in weights]), n * k)
        counters = stream.make_counters(weights[0][0])
        us = time_us([partial(stream.linear, x, x_scale, *w, counters, pdl=True) for w in weights])
        yield bandwidth(f"fp8 b{batch} {n}x{k} stream", us, n * k)
