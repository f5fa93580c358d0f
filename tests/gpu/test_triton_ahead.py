"""Weights asked for ahead: a chain of decoder layers of one token, from end to end in a CUDA graph, with several
amounts at each boundary between kernels."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields, replace
from itertools import product

import torch
from attention_cases import FP8, Case, build, layout
from gpu_harness import DEVICE, MODE, QUICK, Row, bandwidth, check_equal, rand, time_us
from test_triton_layer import BF16, EPS, Layer, make_layer
from torch import Tensor

from penstock.engine.backends.cuda.kernels import decode
from penstock.engine.backends.cuda.kernels.ahead import Ahead
from penstock.engine.backends.cuda.kernels.gemv import linear
from penstock.engine.backends.cuda.kernels.gemv_shapes import choose, folds_norm
from penstock.engine.backends.cuda.ops import TritonOps

MIB = 1 << 20


@dataclass(frozen=True)
class Amounts:
    """MiB that are asked for, by whom; and what else differs."""

    large: str = "in order"
    """Grids of many programs: neither they nor what follows starts early; `followed`: what follows does;
    `early`: both do."""
    roll: float = -1
    """Each program asks for the rows of the one that is this far behind it; 0: for its own. Negative: none."""
    attention: float = 0
    """Of gate and up, by attention."""
    norm: float = 0
    """Of what the norm's result is multiplied by, by the norm."""
    qkv: float = 0
    """Of the next product's weights, by each product: here the output's."""
    output: float = 0
    gate_up: float = 0
    down: float = 0
    askers: int = 512
    """The last programs of a product, which ask for the next one's weights."""

    def __str__(self) -> str:
        changed = [f"{f.name} {getattr(self, f.name)}" for f in fields(self) if getattr(self, f.name) != f.default]
        return ", ".join(changed) or "nothing asked for"


CHOICES: dict[str, tuple[object, ...]] = {
    "norm": (4, 12, 24),
    "large": ("followed", "early"),
    "gate_up": (4, 12, 24),
    "attention": (8, 16, 24),
    "qkv": (4, 12),
    "down": (4, 12),
    "output": (4, 12),
    "roll": (0, 4, 12),
    "askers": (132, 2048),
}


def run_chain(
    ops: TritonOps,
    layers: list[Layer],
    residual: Tensor,
    case: Case,
    cos_sin: Tensor,
    a: Amounts,
    count: int | None = None,
) -> None:
    """The layers, or the first `count` of them, one after another; each asks for what is behind it."""
    heads = case.layout
    for number, layer in enumerate(layers[:count]):
        after = layers[(number + 1) % len(layers)]

        def multiply(x: Tensor, weight: tuple[Tensor, Tensor | None], gated: bool = False, **folded: object) -> Tensor:
            rows, k = weight[0].shape
            n = rows // 2 if gated else rows
            shape = choose(n, k, 1, weight[0].element_size(), gated)
            bytes_each = shape.block_n * k * weight[0].element_size() * (2 if gated else 1)
            distance = None if a.roll < 0 else int(a.roll * MIB / bytes_each)
            return linear(
                x, weight[0], weight_scale=weight[1], gated=gated, distance=distance, askers=a.askers, large=a.large,
                pdl=ops.pdl, **folded,  # type: ignore[arg-type]
            )  # fmt: skip

        def some(weight: tuple[Tensor, Tensor | None], amount: float, skip: float = 0, gated: bool = False) -> object:
            if amount <= 0:
                return None
            return Ahead.of(weight[0], int(amount * MIB), skip=int(skip * MIB), gated=gated)

        qkv = multiply(
            residual, layer.qkv, norm=layer.norms[0], eps=EPS,
            first=some(layer.qkv, a.norm, a.down), then=some(layer.output, a.qkv),
        )  # fmt: skip
        q = ops.rope_and_cache(qkv, heads, cos_sin, case.batch, case.k_cache, case.v_cache, None, None, EPS)
        x = torch.empty((1, heads.heads * heads.head_dim), dtype=q.dtype, device=q.device)
        shape = decode.choose(1, heads.kv_heads, heads.head_dim, 2, ops.processors)
        decode.decode_attention(
            q, heads, case.batch, case.k_cache, case.v_cache, x, ops._counters_for(heads.kv_heads), shape,
            ahead=some(layer.gate_up, a.attention, gated=True), pdl=ops.pdl,  # type: ignore[arg-type]
        )  # fmt: skip
        multiply(
            x, layer.output, residual=residual, out=residual,
            then=some(layer.gate_up, a.output, a.attention, gated=True),
        )  # fmt: skip
        x = multiply(
            residual, layer.gate_up, gated=True, norm=layer.norms[1], eps=EPS,
            first=some(layer.gate_up, a.norm, a.attention + a.output, gated=True), then=some(layer.down, a.gate_up),
        )  # fmt: skip
        multiply(x, layer.down, residual=residual, out=residual, then=some(after.qkv, a.down))


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
        every = Amounts("followed", 0.01, 0.1, 0.1, 0.1, 0.1, 0.1, 0.1, 16)
        for amounts in (Amounts(), every, replace(every, roll=0)):
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
                pair = [made[number], made[(number + 1) % count]]
                return lambda: run_chain(ops, pair, residual, case, cos_sin, a, 1)  # noqa: B023

            return time_us([call(i % count) for i in range(1 if MODE == "compile" else 24)])

        yield from search(name, timed, size, folds_norm(ffn, hidden, dtype.itemsize))


def search(name: str, timed: Callable[[Amounts], float], size: int, folded: bool) -> Iterator[Row]:
    if MODE == "compile":  # every form of the kernels that the search may come to
        for large, roll, amount in product(("in order", "followed", "early"), (-1, 0), (0, 4)):
            timed(Amounts(large, roll, amount, amount, amount, amount, amount, amount))
        return
    best = Amounts()
    least = timed(best)
    yield bandwidth(f"{name} {best}", least, size)
    for knob, values in CHOICES.items():
        if folded and knob in ("norm", "large"):
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
