"""Weights asked for ahead: a chain of decoder layers of one token, from end to end in a CUDA graph, with several
amounts at each boundary between kernels."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields, replace
from itertools import product
from typing import Any

import torch
from attention_cases import FP8, Case, build, layout
from gpu_harness import DEVICE, MODE, QUICK, Row, bandwidth, check_equal, rand, time_us
from test_triton_gemv import make_weight
from test_triton_layer import BF16, EPS, Layer, make_layer
from torch import Tensor

from penstock.engine.backends.cuda.kernels import decode
from penstock.engine.backends.cuda.kernels.ahead import Ahead
from penstock.engine.backends.cuda.kernels.gemv import linear
from penstock.engine.backends.cuda.kernels.gemv_shapes import folds_norm
from penstock.engine.backends.cuda.kernels.norm import rms_norm
from penstock.engine.backends.cuda.kernels.rope import rope_and_cache
from penstock.engine.backends.cuda.ops import TritonOps

MIB = 1 << 20


@dataclass(frozen=True)
class Amounts:
    """MiB that are asked for, by whom; and what else differs."""

    early: int = 8
    """Loads of a product that do not wait for its input."""
    all_early: bool = False
    """Large grids start early, too."""
    norm: float = 0
    """Of what the norm's result is multiplied by, by the norm."""
    every: int = 1
    """One of so many pieces."""
    attention: float = 0
    """Of gate and up, by attention."""
    rope: float = 0
    """Of the output's weights, by the kernel that rotates and stores."""

    def __str__(self) -> str:
        changed = [f"{f.name} {getattr(self, f.name)}" for f in fields(self) if getattr(self, f.name) != f.default]
        return ", ".join(changed) or "nothing asked for"


CHOICES: tuple[tuple[str, tuple[object, ...]], ...] = (
    ("early", (16, 32)),
    ("all_early", (True,)),
    ("norm", (3, 6, 12)),
    ("every", (2,)),
    ("norm", (3, 6, 12, 20)),
    ("rope", (4, 8, 16)),
    ("attention", (4, 8, 16)),
    ("every", (1, 2)),
    ("early", (8, 16, 32)),
)


def run_chain(
    ops: TritonOps,
    layers: list[Layer],
    residual: Tensor,
    case: Case,
    cos_sin: Tensor,
    a: Amounts,
) -> None:
    heads = case.layout
    for layer in layers:

        def some(weight: tuple[Tensor, Tensor | None], amount: float, skip: float = 0, gated: bool = False) -> Any:
            if amount <= 0:
                return None
            return Ahead.of(weight[0], int(amount * MIB), skip=int(skip * MIB), gated=gated, every=a.every)

        def multiply(x: Tensor, weight: tuple[Tensor, Tensor | None], **folded: Any) -> Tensor:
            return linear(
                x, weight[0], weight_scale=weight[1], early=a.early, all_early=a.all_early, pdl=ops.pdl, **folded
            )

        qkv = multiply(residual, layer.qkv, norm=layer.norms[0], eps=EPS, ahead=some(layer.qkv, a.norm))
        q = rope_and_cache(
            qkv, heads, cos_sin, case.batch, case.k_cache, case.v_cache, None, None, EPS,
            ahead=some(layer.output, a.rope), pdl=ops.pdl,
        )  # fmt: skip
        x = torch.empty((1, heads.heads * heads.head_dim), dtype=q.dtype, device=q.device)
        shape = decode.choose(1, heads.kv_heads, heads.head_dim, 2, ops.processors)
        decode.decode_attention(
            q, heads, case.batch, case.k_cache, case.v_cache, x, ops._counters_for(heads.kv_heads), shape,
            ahead=some(layer.gate_up, a.attention, gated=True), pdl=ops.pdl,
        )  # fmt: skip
        multiply(x, layer.output, residual=residual, out=residual)
        asked = some(layer.gate_up, a.norm, a.attention, gated=True)
        x = multiply(residual, layer.gate_up, gated=True, norm=layer.norms[1], eps=EPS, ahead=asked)
        multiply(x, layer.down, residual=residual, out=residual)


SHAPES = {
    "llama-8b fp8": (4096, 14336, layout(32, 8, 128), 8, FP8),
    "llama-8b bf16": (4096, 14336, layout(32, 8, 128), 5, BF16),
    "qwen3-0.6b bf16": (1024, 3072, layout(16, 8, 128), 24, BF16),
}


def test_asking_changes_nothing() -> None:
    """The same numbers, whatever is asked for."""
    heads, (hidden, ffn) = layout(4, 2, 64), (64, 96) if QUICK else (512, 1024)
    for dtype in (BF16,) if QUICK else (BF16, FP8):
        layers = [make_layer(hidden, ffn, heads, dtype) for _ in range(1 if QUICK else 2)]
        case = build([1], [40], heads, BF16)
        cos_sin, start = rand(64, 64), rand(1, hidden, dtype=BF16)
        results = []
        for amounts in (Amounts(), Amounts(32, True, 0.1, 2, 0.1, 0.1)):
            residual = start.clone()
            run_chain(TritonOps(DEVICE, pdl=MODE != "interpret"), layers, residual, case, cos_sin, amounts)
            results.append(residual)
        for other in results[1:]:
            check_equal(f"asked for ahead, {dtype}", other, results[0])


def tune_ahead() -> Iterator[Row]:
    """From nothing on, one boundary after another: the amount that took least stays."""
    wanted = os.environ.get("PENSTOCK_AHEAD", "")
    for name, (hidden, ffn, heads, copies, dtype) in SHAPES.items():
        if wanted not in name:
            continue
        layers = [make_layer(hidden, ffn, heads, dtype) for _ in range(1 if MODE == "compile" else copies)]
        size = sum(w[0].numel() * w[0].element_size() for w in vars(layers[0]).values() if w is not layers[0].norms)
        case = build([1], [300], heads, BF16, max_context=8192)
        cos_sin, residual = rand(1024, heads.head_dim), rand(1, hidden, dtype=BF16)
        ops = TritonOps(DEVICE, pdl=True)

        def timed(a: Amounts, made: list[Layer] = layers) -> float:
            count = len(made)

            def call(number: int) -> Callable[[], None]:
                return lambda: run_chain(ops, [made[number]], residual, case, cos_sin, a)  # noqa: B023

            return time_us([call(i % count) for i in range(1 if MODE == "compile" else 24)])

        yield from search(name, timed, size, folds_norm(ffn, hidden, dtype.itemsize))


def search(name: str, timed: Callable[[Amounts], float], size: int, folded: bool) -> Iterator[Row]:
    if MODE == "compile":  # every form of the kernels that the search may come to
        for early, whole, amount in product((8, 16, 32), (False, True), (0, 4)):
            timed(Amounts(early, whole, amount, 1, amount, amount))
        return
    best = Amounts()
    least = timed(best)
    yield bandwidth(f"{name} {best}", least, size)
    for knob, values in CHOICES:
        if folded and knob in ("norm", "all_early"):
            continue
        start = best
        for value in values:
            tried = replace(start, **{knob: value})  # type: ignore[arg-type]
            us = timed(tried)
            yield bandwidth(f"{name} {tried}", us, size)
            if us < least:
                best, least = tried, us
    again = timed(Amounts())
    yield bandwidth(f"{name} again, nothing asked for", again, size)
    yield bandwidth(f"{name} BEST {best}", timed(best), size)


def tune_asked_for() -> Iterator[Row]:
    """Whether a product is shorter at all that finds its weights in the cache: a large product, a norm that asks for so
    many MiB of the weights, three norms meanwhile, the product."""
    x, gain = rand(1, 4096, dtype=BF16), rand(4096, dtype=BF16)
    other, weights = make_weight(28672, 4096, FP8), [make_weight(4096, 4096, FP8) for _ in range(4)]

    def chain(weight: tuple[Tensor, Tensor | None], amount: float, every: int, multiplied: bool) -> None:
        linear(x, other[0], weight_scale=other[1], pdl=True)
        asked = Ahead.of(weight[0], int(amount * MIB), every=every) if amount else None
        y = rms_norm(x, gain, EPS, ahead=asked, pdl=True)
        for _ in range(3):
            y = rms_norm(y, gain, EPS, pdl=True)
        if multiplied:
            linear(y, weight[0], weight_scale=weight[1], pdl=True)

    asked = ((0, 1), (4, 1), (8, 1), (16, 1), (4, 2), (8, 2))
    for multiplied, (amount, every) in [(False, (0, 1)), (False, (16, 1)), *product((True,), asked)]:
        calls = [lambda w=w, a=amount, e=every, m=multiplied: chain(w, a, e, m) for w in weights]
        label = f"{'product' if multiplied else 'no product'} behind {amount} MiB asked for, one of {every}"
        yield bandwidth(label, time_us(calls), 16 * MIB)
