"""Products of a medium number of tokens against float64, and against the vendor's in speed."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from itertools import product

import torch
from attention_cases import build, layout
from gpu_harness import DEVICE, MODE, QUICK, Row, bandwidth, check, check_equal, poisoned_outputs, rand, time_us
from test_triton_gemv import GemvConfig, linear64, make_weight, timed
from test_triton_gemv import linear as few
from test_triton_layer import make_layer, run_layer
from torch import Tensor

from penstock.engine.backends.cuda.kernels import common, gemv, gemv_shapes
from penstock.engine.backends.cuda.kernels.activation import quantize_fp8
from penstock.engine.backends.cuda.kernels.common import building_kernels
from penstock.engine.backends.cuda.kernels.stream import StreamConfig, _counters, linear
from penstock.engine.backends.cuda.ops import TritonOps

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


SIZES = {"qkv": (6144, 4096), "o": (4096, 4096), "gate_up": (28672, 4096), "down": (4096, 14336)}
Weights = list[tuple[Tensor, Tensor | None]]


def vendor(x: Tensor, x_scale: Tensor | None, weight: Tensor, scale: Tensor | None) -> Tensor:
    if scale is None or x_scale is None:
        return torch.nn.functional.linear(x, weight)
    return torch._scaled_mm(
        x, weight.t(), scale_a=x_scale, scale_b=scale.unsqueeze(0), out_dtype=BF16, use_fast_accum=True
    )


def compared(dtype: torch.dtype, batch: int, configs: list[StreamConfig], only_build: bool) -> Iterator[Row]:
    """Each launch shape beside the vendor's product on the same weights."""
    for name, (n, k) in SIZES.items():
        size = n * k * dtype.itemsize
        copies = 1 if only_build or MODE == "compile" else max(2, min(12, 300_000_000 // size))
        weights: Weights = [make_weight(n, k, dtype) for _ in range(copies)]
        x, x_scale = rand(batch, k, dtype=BF16), None
        if dtype == FP8:
            x, x_scale = quantize_fp8(x)
        label = f"{'fp8' if dtype == FP8 else 'bf16'} b{batch} {name}"
        want = x
        if MODE == "device" and not only_build:
            want = vendor(x, x_scale, *weights[0]).float()
            us = time_us([partial(vendor, x, x_scale, w, s) for w, s in weights], repeats=5)
            yield bandwidth(f"{label} vendor", us, size)
        for config in configs:
            stages = 220_000 // config.per_processor // ((config.block_n + batch) * config.block_bytes)
            shape = replace(config, num_stages=min(config.num_stages, stages))

            def call(w: Tensor, s: Tensor | None, c: StreamConfig = shape) -> Tensor:
                return linear(x, w, config=c, weight_scale=s, x_scale=x_scale, pdl=True)  # noqa: B023

            if only_build or MODE == "compile":
                call(*weights[0])
                continue
            error = float((call(*weights[0]).float() - want).norm() / want.norm())
            us = time_us([partial(call, w, s) for w, s in weights], repeats=5)
            text = f"n{shape.block_n} p{shape.per_processor} w{shape.num_warps} s{shape.num_stages} a{shape.ahead}"
            yield f"{label} {text}", us, f"{size / us / 1e6:.2f} TB/s, differs by {error:.1e}"


def rows_compared(only_build: bool) -> Iterator[Row]:
    for n, k, gated in ((6144, 4096, False), (4096, 4096, False), (14336, 4096, True), (4096, 14336, False)):
        for shape in (None, (2, 4), (2, 8), (4, 4) if not gated else (1, 4)):
            config = None if shape is None else GemvConfig("rows", shape[0], shape[1] * 512, shape[1], 1)
            if only_build:
                weight, scale = make_weight(2 * n if gated else n, k, FP8)
                few(rand(1, k, dtype=BF16), weight, weight_scale=scale, gated=gated, config=config, pdl=True)
                continue
            us, size = timed(n, k, 1, FP8, {"gated": gated}, config, pdl=True)
            yield bandwidth(f"fp8 b1 {n}x{k}{' gated' if gated else ''} {shape or 'as chosen'}", us, size)


def layers_compared(only_build: bool) -> Iterator[Row]:
    ops = TritonOps(DEVICE, pdl=True)
    for name, hidden, ffn, heads, dtype, copies in (
        ("llama-8b fp8", 4096, 14336, layout(32, 8, 128), FP8, 6),
        ("llama-8b bf16", 4096, 14336, layout(32, 8, 128), BF16, 4),
        ("qwen3-0.6b bf16", 1024, 3072, layout(16, 8, 128), BF16, 24),
    ):
        layers = [make_layer(hidden, ffn, heads, dtype) for _ in range(1 if only_build else copies)]
        size = sum(w[0].numel() * w[0].element_size() for w in vars(layers[0]).values() if w is not layers[0].norms)
        case = build([1], [300], heads, BF16, max_context=4096)
        cos_sin, residual = rand(1024, heads.head_dim), rand(1, hidden, dtype=BF16)
        for trial, folds, large in product((False, True) if dtype == FP8 else (False,), (False, True), (False, True)):
            gemv_shapes.TRIAL, gemv.FOLDS_NORM = trial, folds
            common.MOST_OVERLAPPED = 1 << 30 if large else 2048
            calls = [partial(run_layer, ops, layer, residual, case, cos_sin) for layer in layers]
            if only_build:
                calls[0]()
            else:
                us = time_us(calls, repeats=9)
                text = f"norms {'folded' if folds else 'apart'}{', new rows' if trial else ''}"
                yield bandwidth(f"layer {name} b1, {text}{', all early' if large else ''}", us, size)
            gemv_shapes.TRIAL, gemv.FOLDS_NORM, common.MOST_OVERLAPPED = False, False, 2048


def candidates(only_build: bool) -> Iterator[Row]:
    one, two = StreamConfig(128, 128, 1, 8, 8, 8), StreamConfig(128, 128, 2, 8, 4, 4)
    narrow, wide = StreamConfig(64, 128, 2, 4, 6, 8), StreamConfig(256, 128, 1, 8, 5, 4)
    yield from compared(FP8, 64, [one, two, narrow, wide], only_build)
    yield from rows_compared(only_build)
    yield from layers_compared(only_build)
    yield from compared(BF16, 64, [one, two, wide], only_build)
    yield from compared(FP8, 16, [two], only_build)
    yield from compared(FP8, 128, [one], only_build)


def bench_candidates() -> Iterator[Row]:
    if MODE == "device":
        with building_kernels():
            list(candidates(True))
    yield from candidates(False)
