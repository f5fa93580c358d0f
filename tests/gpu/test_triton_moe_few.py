"""Experts of few tokens: scores and routing in one launch, products without an order of pairs, the sum in the last
program. `tune_` functions say which launch shape reads weights fastest."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

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
    poisoned_outputs,
    rand,
    time_us,
)
from test_triton_moe import block_fp8, make_moe, moe64, wide
from torch import Tensor
from torch.nn import functional as F

from penstock.engine.backends.cuda.expert_stacks import Stack
from penstock.engine.backends.cuda.experts import FusedSharedAndRouted, group, with_shared
from penstock.engine.backends.cuda.kernels import moe, moe_mxfp4, moe_plan, moe_route
from penstock.engine.backends.cuda.kernels.moe import GroupedConfig
from penstock.engine.backends.cuda.kernels.moe_mxfp4 import PlainConfig
from penstock.engine.backends.cuda.kernels.moe_plan import FEW, FewPairs, Plan, plan
from penstock.engine.backends.cuda.kernels.moe_route import Choice
from penstock.engine.backends.cuda.kernels.mxfp4_fragments import Mxfp4Fragments
from penstock.engine.backends.cuda.linear import CudaLinear
from penstock.engine.backends.cuda.ops import TritonOps
from penstock.engine.backends.interface import FP8
from penstock.engine.models.layers.experts import ExpertMlp, ExpertSource, Router
from penstock.engine.models.layers.feed_forward import GatedMlp

BF16 = torch.bfloat16
ops = TritonOps(DEVICE)


def counters() -> Tensor:
    return torch.zeros(1024, dtype=torch.int32, device=DEVICE)


def test_scores_and_routing_in_one_launch_equal_two() -> None:
    cases = ((32, 4, 96, 1, 1), (60, 6, 1100, 3, 2)) if QUICK else ((32, 4, 2880, 1, 1), (60, 6, 2048, 3, 2),
        (512, 10, 2048, 1, 1), (256, 8, 7168, 8, 4), (16, 1, 5120, 1, 1))  # fmt: skip
    for experts, top_k, hidden, groups, top_groups in cases:
        for dtype in (torch.float32, BF16):
            for sigmoid, biased in ((False, False), (True, True)):
                router = rand(experts, hidden, dtype=dtype, scale=3 * hidden**-0.5)
                bias = rand(experts, dtype=dtype) if biased else None
                gate = rand(1, hidden, dtype=dtype, scale=hidden**-0.5) if sigmoid else None
                correction = rand(experts, scale=0.1) if biased else None
                choice = Choice(top_k, True, sigmoid, correction, groups, top_groups, groups > 1, 1.5)
                zeros = counters()
                for tokens in (1, 3) if QUICK else (1, 3, 16):
                    x = rand(tokens, hidden, dtype=dtype)
                    with poisoned_outputs():
                        weights, chosen, gates = moe_route.score_and_route(x, router, bias, choice, zeros, shared=gate)
                    if MODE == "compile":
                        continue
                    scores = x.double() @ router.double().t()
                    scores = (scores if bias is None else scores + bias.double()).to(dtype)
                    want, expected = moe_route.route(scores, choice)
                    # Sums in another order may fall to the other side of a tie.
                    same = (chosen.sort(-1).values == expected.sort(-1).values).all(-1)
                    assert same.float().mean() >= (0.5 if dtype == BF16 else 1.0), (experts, dtype, tokens)
                    got = weights.sort(-1).values[same]
                    check(
                        f"weights {experts} {dtype}", got, want.sort(-1).values[same], 2e-2 if dtype == BF16 else 1e-4
                    )
                    check_equal("counters", zeros, torch.zeros_like(zeros))
                    if gate is not None and gates is not None:
                        check("gates", gates, (x.double() @ gate.double().t()).sigmoid().flatten(), 1e-2)


def test_few_tokens_equal_one_pair_at_a_time() -> None:
    """Tokens that all choose one expert, and tokens that choose different ones."""
    cases = [(6, 2, 64, 48)] if QUICK else [(60, 4, 320, 200), (128, 8, 2048, 768)]
    for experts, top_k, hidden, ffn in cases:
        for dtype in (torch.float32, BF16, FP8):
            mlp = make_moe(experts, top_k, hidden, ffn, dtype)
            grouped = group(mlp)
            assert grouped is not None
            for tokens in (1, 3) if QUICK else (1, 2, 8, 16):
                x = rand(tokens, hidden, dtype=BF16 if dtype == FP8 else dtype)
                weights = rand(tokens, top_k).abs()
                spread = torch.stack([torch.randperm(experts)[:top_k] for _ in range(tokens)]).int()
                for chosen in (spread, spread[:1].expand(tokens, -1).contiguous()):
                    chosen = chosen.to(DEVICE)
                    with poisoned_outputs():
                        got = grouped._products(x, weights, FewPairs(chosen))
                    if MODE != "compile":
                        want = moe64(mlp, x, weights, chosen)
                        name = f"{experts} experts, {tokens} tokens, {dtype}"
                        check(name, got, want, 1e-4 if dtype == torch.float32 else 3e-2)
                        check_equal("counters", grouped.counters, torch.zeros_like(grouped.counters))


def test_few_tokens_on_weights_in_fp8_tiles() -> None:
    experts, top_k, hidden, ffn, tile = (4, 2, 64, 32, (16, 32)) if QUICK else (16, 4, 512, 256, (128, 128))
    mlps = [
        GatedMlp(ops, "silu", block_fp8(2 * ffn, hidden, tile), block_fp8(hidden, ffn, tile)) for _ in range(experts)
    ]
    router = CudaLinear(rand(experts, hidden, dtype=BF16), None)
    grouped = group(ExpertMlp(ops, Router(router, top_k, True), mlps, ExpertSource(mlps.__getitem__, lambda _: None)))
    assert grouped is not None
    x = rand(3, hidden, dtype=BF16, scale=0.1)
    with poisoned_outputs():
        weights, chosen = grouped.choose(x)
        got = grouped._products(x, weights, FewPairs(chosen))
        want = grouped.apply(x, weights, chosen)
    if MODE != "compile":
        check("tiles", got, want.double(), 2e-2)


def test_no_launch_shape_reads_or_writes_outside_its_tensors() -> None:
    """In the interpreter; on a device it only runs."""
    experts, top_k, hidden, ffn, tokens = 3, 2, 96, 64, 5
    dense = group(make_moe(experts, top_k, hidden, ffn, BF16))
    assert dense is not None and isinstance(dense.gate_up, Stack) and isinstance(dense.down, Stack)
    packed = [_random_mxfp4(experts, 2 * ffn, hidden, True), _random_mxfp4(experts, hidden, ffn, False)]
    x, weights = rand(tokens, hidden, dtype=BF16), rand(tokens, top_k).abs()
    chosen = torch.tensor([[0, 2], [2, 0], [2, 1], [0, 2], [1, 2]], dtype=torch.int32, device=DEVICE)
    with checked_addresses(moe, moe_mxfp4, moe_plan, moe_route):
        dense.forward(x)
        for pairs, few in ((0, True), (4, False), (60, False), (600, False)):
            order = FewPairs(chosen) if few else plan(chosen, experts)
            for stacks in ((dense.gate_up.weight, dense.down.weight), packed):
                inner = x
                for gated, stack in ((True, stacks[0]), (False, stacks[1])):
                    options = {"gated": gated, "route_weights": None if gated else weights, "counters": counters()}
                    if isinstance(stack, Tensor):
                        tile = moe.choose(pairs, experts, gated, 2, few)
                        inner = moe.grouped_linear(inner, stack, order, top_k, config=tile, **options)  # type: ignore[arg-type]
                    else:
                        inner = moe_mxfp4.grouped_linear(
                            inner,
                            stack,
                            None,
                            order,
                            top_k,
                            config=PlainConfig(),
                            **options,  # type: ignore[arg-type]
                        )


def _random_mxfp4(experts: int, n: int, k: int, paired: bool) -> Mxfp4Fragments:
    tiles, steps = -(-n // 16), -(-k // 64)
    words = torch.randint(-(2**31), 2**31 - 1, (experts, tiles, steps, 8, 4, 4), dtype=torch.int32, device=DEVICE)
    exponents = torch.full((experts, tiles, -(-steps // 4), 8, 2, 2), 0x78787878, dtype=torch.int32, device=DEVICE)
    return Mxfp4Fragments(words, exponents, torch.ones(experts, n, device=DEVICE), k, paired)


def test_a_shared_expert_in_the_launches_of_the_others() -> None:
    """With and without a gate of its own, wider and narrower than the others; in FP8 too."""
    for dtype, width, gated in ((torch.float32, 80, True), (BF16, 32, False), (FP8, 80, True)):
        mlp = make_moe(6, 2, 64, 48, dtype)
        grouped = group(mlp)
        assert grouped is not None
        shared = make_moe(1, 1, 64, width, dtype).experts[0]
        dense = BF16 if dtype == FP8 else dtype
        gate = CudaLinear(rand(1, 64, dtype=dense), None) if gated else None
        both = with_shared(grouped, shared, gate)
        assert isinstance(both, FusedSharedAndRouted) and both.joined
        for tokens in (1, 3) if QUICK else (1, 7, 16):
            x = rand(tokens, 64, dtype=dense)
            with poisoned_outputs():
                got = both.forward(x)
            if MODE == "compile":
                continue
            first, up = (x.double() @ wide(shared.gate_up).t()).chunk(2, -1)  # type: ignore[arg-type]
            added = (F.silu(first) * up) @ wide(shared.down).t()  # type: ignore[arg-type]
            if gate is not None:
                added *= (x.double() @ gate.weight.double().t()).sigmoid()
            weights, chosen = grouped.choose(x)
            want = moe64(mlp, x, weights, chosen) + added
            check(f"{tokens} tokens {dtype}", got, want, 1e-4 if dtype == torch.float32 else 3e-2)
            check_equal("counters", grouped.counters, torch.zeros_like(grouped.counters))


def test_scores_that_are_not_numbers_harm_no_other_token() -> None:
    """What such a token chooses means nothing; the others are right, and counters are zero again."""
    mlp = make_moe(6, 2, 64, 48, torch.float32)
    grouped = group(mlp)
    assert grouped is not None
    x = rand(4, 64, dtype=torch.float32)
    if MODE != "compile":
        x[1] = float("nan")
    with poisoned_outputs():
        got = grouped.forward(x)
    if MODE == "compile":
        return
    kept = torch.tensor([0, 2, 3], device=DEVICE)
    weights, chosen = moe_route.route(mlp.router.linear(x[kept]), Choice(2, True))
    check("others", got[kept], moe64(mlp, x[kept], weights, chosen), 1e-4)
    check_equal("counters", grouped.counters, torch.zeros_like(grouped.counters))


SHAPES = {
    "deepseek-v2-lite": (64, 6, 2048, 1408),
    "qwen3-next": (512, 10, 2048, 512),
}
"""Experts, choices, hidden size, width of an expert."""


def choices(experts: int, top_k: int, tokens: int) -> list[Tensor]:
    """Several, so that a cache does not serve what the call before has read."""
    rounds = 1 if tokens > FEW else 8
    return [
        torch.stack([torch.randperm(experts)[:top_k] for _ in range(tokens)]).int().to(DEVICE) for _ in range(rounds)
    ]


def schedule(chosen: Tensor, experts: int) -> Plan | FewPairs:
    return FewPairs(chosen) if len(chosen) <= FEW else plan(chosen, experts)


def _tuned(name: str, tokens: int, configs: list[tuple[int, ...]]) -> Iterator[Row]:
    experts, top_k, hidden, ffn = SHAPES[name]
    chosen = choices(experts, top_k, tokens)
    visited = sum(len(one.unique()) for one in chosen) / len(chosen)
    weights, zeros = torch.rand(tokens, top_k, device=DEVICE), counters()
    for gated, n, k in ((True, 2 * ffn, hidden), (False, hidden, ffn)):
        x = rand(tokens if gated else tokens * top_k, k, dtype=BF16)
        stack = rand(experts, n, k, dtype=BF16, scale=0.02)
        for shape in configs:
            calls = [
                partial(
                    moe.grouped_linear, x, stack, schedule(one, experts), top_k, gated=gated,
                    config=GroupedConfig(*shape), route_weights=None if gated else weights, counters=zeros,
                )
                for one in chosen
            ]  # fmt: skip
            label = f"{name} {'gate_up' if gated else 'down'} {tokens} tokens {shape}"
            yield bandwidth(label, time_us(calls, repeats=7), visited * 2.0 * n * k)


def tune_few_dense() -> Iterator[Row]:
    shapes = ((16, 128, 2, 4), (16, 256, 2, 4), (32, 128, 2, 4), (32, 128, 4, 4), (64, 128, 4, 4))
    for name in ("deepseek-v2-lite", "qwen3-next"):
        yield from _tuned(name, 1, [(FEW, *shape) for shape in shapes])


def tune_many_dense() -> Iterator[Row]:
    shapes = ((32, 64, 2), (32, 128, 4), (64, 128, 4), (128, 64, 4))
    for name in ("deepseek-v2-lite", "qwen3-next"):
        yield from _tuned(name, 64, [(16, n, k, w, s) for n, k, w in shapes for s in (3, 5)])
