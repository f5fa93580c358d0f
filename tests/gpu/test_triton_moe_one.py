"""Experts of one token: programs that own weight rows, a shared expert in the same launches, norm and residual too."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from unittest.mock import patch

import torch
from gpu_harness import (
    DEVICE,
    MODE,
    QUICK,
    Row,
    bandwidth,
    check,
    check_equal,
    checked_addresses,
    integers,
    poisoned_outputs,
    rand,
    time_us,
)
from test_triton_moe import make_moe, moe64, wide
from torch import Tensor
from torch.nn import functional as F

from penstock.engine.backends.cuda.experts import FusedSharedAndRouted, GroupedExpertMlp, group, with_shared
from penstock.engine.backends.cuda.kernels import moe_one, moe_route
from penstock.engine.backends.cuda.kernels.moe_one import Matrices, OneConfig, Visits
from penstock.engine.backends.cuda.kernels.moe_route import Choice
from penstock.engine.backends.cuda.linear import CudaLinear
from penstock.engine.backends.interface import FP8

BF16 = torch.bfloat16
EPS = 1e-5


def counters() -> Tensor:
    return torch.zeros(1024, dtype=torch.int32, device=DEVICE)


def test_one_token_with_norm_and_residual_equals_its_parts() -> None:
    """With and without a shared expert and its gate; widths that are no multiple of anything."""
    small, odd = (6, 2, 64, 48, 80), (5, 3, 72, 20, 12)
    cases = [(small, torch.float32, True), (small, FP8, True), (odd, torch.float32, False)]
    if QUICK:
        cases += [(odd, BF16, False)]
    else:
        cases += [((64, 6, 2048, 1408, 2816), BF16, False), ((128, 8, 2048, 768, 0), BF16, False)]
    for (experts, top_k, hidden, ffn, width), dtype, gated in cases:
        mlp = make_moe(experts, top_k, hidden, ffn, dtype)
        grouped = group(mlp)
        assert grouped is not None and grouped.fuses
        dense = BF16 if dtype == FP8 else dtype
        both: GroupedExpertMlp | FusedSharedAndRouted = grouped
        shared = gate = None
        if width:
            shared = make_moe(1, 1, hidden, width, dtype).experts[0]
            gate = CudaLinear(rand(1, hidden, dtype=dense, scale=hidden**-0.5), None) if gated else None
            joined = with_shared(grouped, shared, gate)
            assert isinstance(joined, FusedSharedAndRouted) and joined.fuses
            both = joined
        x, gains = rand(1, hidden, dtype=dense), rand(hidden, dtype=dense)
        residual = x.clone()
        with poisoned_outputs():
            got = both.forward(x)
            fused = both.fused(residual, gains, EPS)
        if MODE == "compile":
            continue
        normed, router = torch.empty_like(x), mlp.router.linear.weight  # type: ignore[attr-defined]
        # By the same sums: others may choose another expert.
        choices = [
            moe_route.score_and_route(x, router, None, grouped.choice, grouped.counters, **norm)[:2]  # type: ignore[arg-type]
            for norm in ({}, {"norm": gains, "eps": EPS, "normed": normed})
        ]
        check("normed", normed, F.rms_norm(x.double(), (hidden,), gains.double(), EPS))
        for name, result, source, (weights, chosen) in zip(
            ("forward", "fused"), (got, fused), (x, normed), choices, strict=True
        ):
            want = moe64(mlp, source, weights, chosen)
            if shared is not None:
                first, up = (source.double() @ wide(shared.gate_up).t()).chunk(2, -1)  # type: ignore[arg-type]
                added = (F.silu(first) * up) @ wide(shared.down).t()  # type: ignore[arg-type]
                if gate is not None:
                    added *= (source.double() @ gate.weight.double().t()).sigmoid()
                want += added
            if name == "fused":
                want += x.double()
            label = f"{name}, {experts} experts of {ffn} and {width}, {dtype}"
            check(label, result, want, 1e-4 if dtype == torch.float32 else 3e-2)
        assert fused.data_ptr() == residual.data_ptr()
        check_equal("counters", grouped.counters, torch.zeros_like(grouped.counters))


def test_weights_on_the_inputs_of_experts() -> None:
    experts, hidden, ffn = 4, 64, 48
    mlp = make_moe(experts, 1, hidden, ffn, torch.float32)
    grouped = group(mlp)
    assert grouped is not None
    x, chosen = rand(1, hidden), torch.tensor([[2]], dtype=torch.int32, device=DEVICE)
    weights = rand(1, 1).abs()
    visits = Visits(chosen, weights, on_inputs=True)
    up, down = (Matrices(stack.weight, None) for stack in (grouped.gate_up, grouped.down))  # type: ignore[union-attr]
    with poisoned_outputs():
        got = moe_one.down(moe_one.gate_up(x, up, visits, "silu"), down, visits)
    if MODE != "compile":
        check("weighted inputs", got, moe64(mlp, x * weights, torch.ones_like(weights), chosen), 1e-4)


def test_a_norm_before_the_scores() -> None:
    """The scores of the normalized token, and that token for what follows."""
    cases = [(6, 2, 72, torch.float32), (6, 2, 72, BF16)]
    if not QUICK:
        cases = [(64, 6, 2048, BF16), (256, 8, 7168, BF16), (60, 4, 1100, torch.float32)]
    for experts, top_k, hidden, dtype in cases:
        router, gains = rand(experts, hidden, dtype=dtype, scale=3 * hidden**-0.5), rand(hidden, dtype=dtype)
        gate = rand(1, hidden, dtype=dtype, scale=hidden**-0.5)
        zeros, choice = counters(), Choice(top_k, True)
        for tokens in (1, 3):
            x = rand(tokens, hidden, dtype=dtype)
            with poisoned_outputs():
                normed = torch.empty_like(x)
                weights, chosen, gates = moe_route.score_and_route(
                    x, router, None, choice, zeros, shared=gate, norm=gains, eps=EPS, normed=normed
                )
            if MODE == "compile":
                continue
            want = F.rms_norm(x.float(), (hidden,), gains.float(), EPS)
            check("normed", normed, want, 1e-5 if dtype == torch.float32 else None)
            theirs, expected, their_gates = moe_route.score_and_route(normed, router, None, choice, zeros, shared=gate)
            assert gates is not None and their_gates is not None
            check_equal("experts", chosen, expected)
            check("weights", weights, theirs.double(), 1e-5)
            check("gates", gates, their_gates.double(), 1e-5)
            check_equal("counters", zeros, torch.zeros_like(zeros))


def test_the_first_product_makes_the_choice() -> None:
    """As `route` does, the first of those that score alike too."""
    for experts, top_k in ((6, 2), (5, 5)) if QUICK else ((60, 6),):
        up, x = Matrices(rand(experts, 8, 64), None), rand(1, 64)
        for sigmoid, normalize, tied in ((False, True, False), (True, True, True), (False, False, True)):
            logits = rand(1, experts)
            if tied and MODE != "compile":
                logits = logits.round()
            choice = Choice(top_k, normalize, sigmoid, scale=1.5, total_eps=0.3 if tied else 1e-6)
            with poisoned_outputs():
                weights = torch.empty(1, top_k, device=DEVICE)
                chosen = torch.empty(1, top_k, dtype=torch.int32, device=DEVICE)
                moe_one.gate_up(x, up, Visits(chosen, weights, False, logits, choice), "silu")
            want, expected = moe_route.route(logits, choice)
            check_equal("experts", chosen, expected)
            check("weights", weights, want.double(), 1e-5)


def test_experts_wider_than_a_launch_has_threads_for() -> None:
    """Rows of 16,385 inputs take more steps than a thread has loads under way."""
    width, visits = 16385, Visits(integers([1], torch.int32).view(1, 1), rand(1, 1), on_inputs=False)
    inner, weight = rand(width), rand(2, 3, width)
    with poisoned_outputs():
        got = moe_one.down(inner, Matrices(weight, None), visits)
    check("wide experts", got, (weight[1].double() @ inner.double()).view(1, -1) * visits.weights.double(), 1e-4)


def test_the_second_product_survives_wrong_guesses() -> None:
    """In the interpreter: until a program waits, the choices are others, some of them no experts; or one of them is
    right. The weights of an expert that was guessed and not chosen are not numbers."""
    if MODE != "interpret":
        return
    experts, rows, width = 7, 5, 600
    for config in (None, OneConfig(2, 256, 1, loads=3), OneConfig(1, 256, 1, loads=9)):
        for kept, guesses in ((None, [6, -9, 1 << 30]), (None, [4, 4, 4]), (1, [6, 0, 4])):
            chosen, weights = integers([2, 0, 5], torch.int32).view(1, 3), rand(1, 3)
            visits, true = Visits(chosen, weights, on_inputs=False), chosen.clone()
            wrong = torch.tensor([guesses], dtype=torch.int32)
            assert [i for i in range(3) if wrong[0, i] == true[0, i]] == ([] if kept is None else [kept])
            inner, weight, residual = rand(3 * width), rand(experts, rows, width), rand(1, rows)
            weight[[6, 4]] = float("nan")
            want = residual.double()
            for i, expert in enumerate(true[0].tolist()):
                part = weight[expert].double() @ inner.view(3, width)[i].double()
                want = want + part * weights[0, i].double()
            with (
                patch.object(moe_one, "launch_successor", lambda _, wrong=wrong, chosen=chosen: chosen.copy_(wrong)),
                patch.object(moe_one, "wait_for_inputs", lambda _, true=true, chosen=chosen: chosen.copy_(true)),
            ):
                got = moe_one.down(inner, Matrices(weight, None), visits, residual=residual, config=config)
            check(f"guesses {guesses} {config}", got, want, 1e-4)


def test_one_token_reads_and_writes_nothing_outside_its_tensors() -> None:
    """In the interpreter. A score that is no number chooses an expert all the same."""
    if MODE != "interpret":
        return
    for experts, top_k, hidden, ffn in ((3, 2, 96, 64), (5, 3, 72, 20)):
        grouped = group(make_moe(experts, top_k, hidden, ffn, BF16))
        assert grouped is not None
        with checked_addresses(moe_one, moe_route):
            grouped.forward(rand(1, hidden, dtype=BF16))
            grouped.fused(rand(1, hidden, dtype=BF16), rand(hidden, dtype=BF16), EPS)
            grouped.forward(torch.full((1, hidden), float("nan"), dtype=BF16, device=DEVICE))


SHAPES = {"deepseek-v2-lite": (64, 6, 2048, 1408, 2816), "qwen3-30b-a3b": (128, 8, 2048, 768, 0)}
"""Experts, choices, hidden size, width of an expert and of the shared one."""


def _calls(
    name: str, up: OneConfig | None = None, down: OneConfig | None = None, pdl: bool = True
) -> tuple[list[partial[Tensor]], list[partial[Tensor]], int, int]:
    """Both products on choices that differ, so that the cache does not serve them; and the bytes that each reads."""
    experts, top_k, hidden, ffn, width = SHAPES[name]
    shared = [rand(2 * width, hidden, dtype=BF16), rand(hidden, width, dtype=BF16)] if width else [None, None]
    first = Matrices(rand(experts, 2 * ffn, hidden, dtype=BF16, scale=0.02), None, shared[0])
    second = Matrices(rand(experts, hidden, ffn, dtype=BF16, scale=0.02), None, shared[1])
    weights, x = torch.rand(1, top_k, device=DEVICE), rand(1, hidden, dtype=BF16)
    inner = rand(top_k * ffn + width, dtype=BF16)
    ups, downs = [], []
    for _ in range(8):
        chosen = torch.randperm(experts)[:top_k].int().view(1, -1).to(DEVICE)
        visits = Visits(chosen, weights, False)
        ups.append(partial(moe_one.gate_up, x, first, visits, "silu", config=up, pdl=pdl))
        downs.append(partial(moe_one.down, inner, second, visits, config=down, pdl=pdl))
    size = 2 * hidden * (top_k * ffn + width)
    return ups, downs, 2 * size, size


def bench_one_token() -> Iterator[Row]:
    """Both products, one by one and in turns; the shared expert's weights may come from the cache."""
    for name in SHAPES:
        ups, downs, up_size, down_size = _calls(name)
        yield bandwidth(f"one token {name} gate_up", time_us(ups), up_size)
        yield bandwidth(f"one token {name} down", time_us(downs), down_size)
        both = [call for pair in zip(ups, downs, strict=True) for call in pair]
        yield bandwidth(f"one token {name} both", 2 * time_us(both), up_size + down_size)


def tune_one_token() -> Iterator[Row]:
    name = "deepseek-v2-lite"
    for n, k in ((2, 1024), (4, 1024)):
        ups, _, size, _ = _calls(name, up=OneConfig(n, k, k // 256))
        yield bandwidth(f"one token {name} gate_up {n} x {k}", time_us(ups, repeats=7), size)
    for n, k, loads in ((1, 512, 3), (1, 512, 6), (2, 512, 3), (2, 512, 6), (1, 256, 6)):
        _, downs, _, size = _calls(name, down=OneConfig(n, k, k // 256, loads))
        yield bandwidth(f"one token {name} down {n} x {k}, {loads} loads", time_us(downs, repeats=7), size)
