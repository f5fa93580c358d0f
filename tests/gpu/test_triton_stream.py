"""Products of a medium number of tokens against float64, and against the vendor's in speed."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import product

import torch
from gpu_harness import DEVICE, MODE, QUICK, Row, bandwidth, check, check_equal, poisoned_outputs, rand, time_us
from test_triton_gemv import linear64, make_weight
from torch import Tensor

from penstock.engine.backends.cuda.kernels.activation import quantize_fp8
from penstock.engine.backends.cuda.kernels.stream import StreamConfig, _counters, linear

BF16, FP8 = torch.bfloat16, torch.float8_e4m3fn
SHAPES = [(300, 272), (64, 128)] if QUICK else [(6144, 4096), (1000, 576), (4096, 14336), (256, 1536)]
CONFIGS = [StreamConfig(64, 128, 1, 4, 3, 2), StreamConfig(128, 128, 2, 8, 3, 4)]


def test_stream_in_any_batch_and_dtype() -> None:
    for (n, k), dtype, config in product(SHAPES, (BF16, FP8), CONFIGS):
        for batch in (24,) if QUICK else (9, 16, 48, 64, 100):
            x, (weight, scale) = rand(batch, k, dtype=BF16), make_weight(n, k, dtype)
            bias = rand(n, dtype=BF16) if batch == 24 else None
            given, x_scale, exact = x, None, x
            if dtype == FP8:
                given, x_scale = quantize_fp8(x)
                exact = given.float() * x_scale if MODE != "compile" else x
            zeros = _counters(DEVICE)
            for pdl in (False, True) if MODE != "interpret" else (False,):
                results = []
                for _ in range(1 if QUICK else 2):
                    with poisoned_outputs():
                        results.append(
                            linear(
                                given, weight, config=config, bias=bias, weight_scale=scale, x_scale=x_scale,
                                processors=5 if QUICK else 132, pdl=pdl,
                            )
                        )  # fmt: skip
                name = f"stream {batch} x {k} -> {n} {dtype} {config} {pdl}"
                check(name, results[0], linear64(exact, weight, bias, scale))
                check_equal(name, results[-1], results[0])
                check_equal(f"{name}: counters", zeros, torch.zeros_like(zeros))


def bench_stream() -> Iterator[Row]:
    """Beside the vendor's product on the same weights."""
    shapes = {"qkv": (6144, 4096), "o": (4096, 4096), "gate_up": (28672, 4096), "down": (4096, 14336)}
    sweep = [
        StreamConfig(64, 128, 2, 4, 6, 8),
        StreamConfig(128, 128, 1, 8, 8, 8),
        StreamConfig(128, 128, 1, 4, 8, 8),
        StreamConfig(128, 128, 2, 8, 4, 4),
        StreamConfig(128, 128, 2, 8, 4, 0),
        StreamConfig(128, 256, 1, 8, 4, 4),
        StreamConfig(256, 128, 1, 8, 5, 4),
    ]
    for dtype, batch in ((FP8, 64), (BF16, 64), (FP8, 16), (FP8, 128), (BF16, 16), (BF16, 128)):
        label = "fp8" if dtype == FP8 else "bf16"
        for name, (n, k) in shapes.items():
            size = n * k * dtype.itemsize
            copies = 1 if MODE == "compile" else max(2, min(16, 400_000_000 // size))
            weights = [make_weight(n, k, dtype) for _ in range(copies)]
            x, x_scale = rand(batch, k, dtype=BF16), None
            if dtype == FP8:
                x, x_scale = quantize_fp8(x)
            if MODE == "device":

                def vendor(w: Tensor, s: Tensor | None, x: Tensor = x, x_scale: Tensor | None = x_scale) -> Tensor:
                    if s is None or x_scale is None:
                        return torch.nn.functional.linear(x, w)
                    return torch._scaled_mm(
                        x, w.t(), scale_a=x_scale, scale_b=s.unsqueeze(0), out_dtype=BF16, use_fast_accum=True
                    )

                us = time_us([lambda w=w, s=s: vendor(w, s) for w, s in weights], repeats=7)
                yield bandwidth(f"stream {label} b{batch} {name} vendor", us, size)
            for config in sweep:
                stages = 220_000 // config.per_processor // ((config.block_n + batch) * config.block_bytes)
                config = replace(config, num_stages=min(config.num_stages, stages))
                us = time_us(
                    [
                        lambda w=w, s=s, c=config, x=x, y=x_scale: linear(
                            x, w, config=c, weight_scale=s, x_scale=y, pdl=True
                        )
                        for w, s in weights
                    ],
                    repeats=7,
                )
                shape = f"n{config.block_n} k{config.block_bytes} p{config.per_processor} w{config.num_warps}"
                shape += f" s{config.num_stages} a{config.ahead}"
                yield bandwidth(f"stream {label} b{batch} {name} {shape}", us, size)
