"""Experts whose weights are integers in groups, run as stored, against float64; and deterministic mode for experts in
every form: a token's result does not depend on the others."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from functools import partial

import torch
from gpu_harness import (
    DEVICE,
    MODE,
    QUICK,
    Row,
    arithmetic,
    bandwidth,
    check,
    check_equal,
    checked_addresses,
    poisoned_outputs,
    rand,
    time_us,
)
from test_triton_gpt_oss import make_moe as make_gpt_oss
from test_triton_int4 import make
from test_triton_moe import SHAPES, block_fp8, make_moe
from torch import Tensor
from torch.nn import functional as F

from penstock.engine.backends.activation import Activation, has_gate
from penstock.engine.backends.cuda.expert_integers import IntegerStack
from penstock.engine.backends.cuda.expert_stacks import Stack
from penstock.engine.backends.cuda.experts import FusedSharedAndRouted, GroupedExpertMlp, group, with_shared
from penstock.engine.backends.cuda.grouped_linear import GroupedLinear, Int8Linear
from penstock.engine.backends.cuda.kernels import matmul, moe, moe_groups, moe_plan, moe_route
from penstock.engine.backends.cuda.kernels.moe_groups import GroupsConfig
from penstock.engine.backends.cuda.kernels.moe_plan import FewPairs, plan
from penstock.engine.backends.cuda.linear import CudaLinear
from penstock.engine.backends.cuda.ops import TritonOps
from penstock.engine.backends.interface import FP8
from penstock.engine.models.layers.composed import PermutedLinear, StackedLinear
from penstock.engine.models.layers.experts import ExpertMlp, ExpertSlots, ExpertSource, Router
from penstock.engine.models.layers.feed_forward import GatedMlp
from penstock.engine.models.layers.linear import Linear

BF16, F16 = torch.bfloat16, torch.float16
ops = TritonOps(DEVICE)
fixed_ops = TritonOps(DEVICE)
fixed_ops.batch_invariant = True


def mixture(mlps: list[GatedMlp], top_k: int, hidden: int, dtype: torch.dtype) -> ExpertMlp:
    router = CudaLinear(rand(len(mlps), hidden, dtype=dtype, scale=3 * hidden**-0.5), None)
    return ExpertMlp(ops, Router(router, top_k, True), mlps, ExpertSource(mlps.__getitem__, lambda _: None))


def integers(
    experts: int,
    top_k: int,
    hidden: int,
    ffn: int,
    dtype: torch.dtype,
    bits: int,
    size: int,
    *,
    minimum: bool = True,
    biased: bool = False,
    ordered: bool = False,
    activation: Activation = "silu",
) -> tuple[ExpertMlp, list[tuple[Tensor, Tensor]]]:
    """Experts, and what their matrices stand for in float64."""
    wide: list[Tensor] = []

    def linear(out: int, inputs: int) -> Linear:
        weight, dense = make(out, inputs, bits, size, minimum)
        bias = rand(out, dtype=dtype) if biased else None
        made = GroupedLinear(weight, bias)
        if not ordered:
            wide.append(dense)
            return made
        order = torch.arange(inputs) if MODE == "compile" else torch.randperm(inputs, device=DEVICE)
        back = torch.empty_like(dense)
        if MODE != "compile":
            back[:, order] = dense
        wide.append(back)
        return PermutedLinear(made, order)

    rows = 2 * ffn if has_gate(activation) else ffn
    mlps = [GatedMlp(ops, activation, linear(rows, hidden), linear(hidden, ffn)) for _ in range(experts)]
    return mixture(mlps, top_k, hidden, dtype), list(zip(wide[::2], wide[1::2], strict=True))


def want64(
    mlp: ExpertMlp, wide: list[tuple[Tensor, Tensor]], x: Tensor, weights: Tensor, chosen: Tensor, early: bool = False
) -> Tensor:
    out = torch.zeros_like(x, dtype=torch.float64)
    for token in range(x.shape[0]):
        for weight, expert in zip(weights[token].double(), chosen[token].tolist(), strict=True):
            gate_up, down = wide[expert]
            bias = [getattr(getattr(one, "inner", one), "bias", None) for one in mlp.experts[expert].linears]
            y = gate_up @ (x[token].double() * weight if early else x[token].double())
            y = y if bias[0] is None else y + bias[0].double()
            if has_gate(mlp.experts[expert].activation):
                gate, up = y.chunk(2)
                y = down @ (F.silu(gate) * up)
            else:
                y = down @ F.relu(y).square()
            out[token] += (y if bias[1] is None else y + bias[1].double()) * (1.0 if early else weight)
    return out


def grouped(mlp: ExpertMlp) -> GroupedExpertMlp:
    found = group(mlp)
    assert found is not None
    return found


def routing(experts: int, top_k: int, tokens: int) -> Iterator[Tensor]:
    """Tokens that choose different experts, and tokens that all choose the same."""
    spread = torch.stack([torch.randperm(experts)[:top_k] for _ in range(tokens)]).int()
    yield spread.to(DEVICE)
    yield spread[:1].expand(tokens, -1).contiguous().to(DEVICE)


def test_integer_experts_equal_one_pair_at_a_time() -> None:
    """In every launch shape, with and without minima and biases, columns in any order, weights before the experts."""
    experts, top_k, hidden, ffn, tokens = (5, 2, 64, 64, 3) if QUICK else (12, 4, 256, 128, 7)
    for bits, size, dtype, odd in (
        (4, 32, BF16, True),
        (4, 64 if QUICK else 128, F16, False),
        (8, 64, BF16, False),
        (4, 32, torch.float32, False),
    ):
        mlp, wide = integers(
            experts, top_k, hidden, ffn, dtype, bits, size, minimum=bits == 4 or odd, biased=odd, ordered=odd
        )
        if odd:
            mlp = dataclasses.replace(mlp, router=dataclasses.replace(mlp.router, weight_inputs=True))
        ours = grouped(mlp)
        x, weights = rand(tokens, hidden, dtype=dtype), rand(tokens, top_k).abs()
        shapes = [None, GroupsConfig(16, 32, 2, 3)]
        if dtype != torch.float32:
            shapes.append(GroupsConfig(64, 32, 4, 3) if odd else GroupsConfig(128, 64, 8, 3))
        for chosen in routing(experts, top_k, tokens):
            want = None if MODE == "compile" else want64(mlp, wide, x, weights, chosen, odd)
            for shape in shapes:
                with poisoned_outputs():
                    got = product(ours, x, weights, chosen, shape)
                if want is not None:
                    name = f"int{bits} groups of {size}, {dtype}, {odd}, {shape}"
                    check(name, got, want, 1e-4 if dtype == torch.float32 else 3e-2)
                    check_equal("counters", ours.counters, torch.zeros_like(ours.counters))


def product(ours: GroupedExpertMlp, x: Tensor, weights: Tensor, chosen: Tensor, shape: GroupsConfig | None) -> Tensor:
    """As `GroupedExpertMlp.apply` in one launch shape; None: without an order of pairs."""
    if shape is None:
        return ours._products(x, weights, FewPairs(chosen))
    assert isinstance(ours.gate_up, IntegerStack) and isinstance(ours.down, IntegerStack)
    top_k, order, early = chosen.shape[1], plan(chosen, ours.gate_up.experts), ours.router.weight_inputs
    inner = moe_groups.grouped_linear(
        x, ours.gate_up.stack, ours.gate_up.bias, order, top_k, gated=True,
        route_weights=weights if early else None, activation=ours.activation, config=shape,
    )  # fmt: skip
    pairs = moe_groups.grouped_linear(
        inner, ours.down.stack, ours.down.bias, order, top_k, gated=False,
        route_weights=None if early else weights, config=shape,
    )  # fmt: skip
    return moe.combine(pairs, top_k)


def test_integer_experts_of_any_number_of_tokens() -> None:
    """The launch shapes that are chosen for them."""
    experts, top_k, hidden, ffn = (4, 2, 64, 64) if QUICK else (16, 4, 512, 256)
    mlp, wide = integers(experts, top_k, hidden, ffn, BF16, 4, 64)
    ours = grouped(mlp)
    for tokens in (1, 20) if QUICK else (1, 9, 20, 80, 600):
        x = rand(tokens, hidden, dtype=BF16)
        with poisoned_outputs():
            got = ours.forward(x)
        if MODE != "compile":
            keep = slice(0, 24)  # one by one in float64
            weights, chosen = ours.choose(x)
            check(f"{tokens} tokens", got[keep], want64(mlp, wide, x[keep], weights[keep], chosen[keep]), 3e-2)


def test_integer_experts_without_gates() -> None:
    experts, top_k, hidden, ffn = (5, 2, 64, 32) if QUICK else (16, 4, 512, 256)
    mlp, wide = integers(experts, top_k, hidden, ffn, BF16, 4, 32, activation="relu2")
    ours = grouped(mlp)
    assert isinstance(ours.gate_up, IntegerStack)
    for tokens in (3, 20):
        x = rand(tokens, hidden, dtype=BF16, scale=0.5)
        weights, chosen = rand(tokens, top_k).abs(), next(routing(experts, top_k, tokens))
        with poisoned_outputs():
            got = ours._products(x, weights, FewPairs(chosen)) if tokens == 3 else ours.apply(x, weights, chosen)
        if MODE != "compile":
            check(f"{tokens} tokens", got, want64(mlp, wide, x, weights, chosen), 3e-2)


def test_int8_experts_with_a_scale_per_row() -> None:
    """As with int8 activations; those of experts are not rounded."""
    experts, top_k, hidden, ffn = (5, 2, 64, 48) if QUICK else (16, 4, 512, 256)
    wide = []

    def linear(out: int, inputs: int) -> Linear:
        quants = torch.empty(out, inputs, dtype=torch.int8) if MODE == "compile" else torch.randint(
            -127, 128, (out, inputs), dtype=torch.int8, device=DEVICE
        )  # fmt: skip
        scale = rand(out).abs() * inputs**-0.5 / 64
        wide.append(quants.double() * scale.double()[:, None])
        return Int8Linear(quants, None, scale)

    mlps = [GatedMlp(ops, "silu", linear(2 * ffn, hidden), linear(hidden, ffn)) for _ in range(experts)]
    mlp = mixture(mlps, top_k, hidden, BF16)
    ours = grouped(mlp)
    assert isinstance(ours.gate_up, Stack)
    for tokens in (1, 20) if QUICK else (1, 8, 300):
        x = rand(tokens, hidden, dtype=BF16)
        with poisoned_outputs():
            got = ours.forward(x)
        if MODE != "compile":
            want = want64(mlp, list(zip(wide[::2], wide[1::2], strict=True)), x, *ours.choose(x))
            check(f"{tokens} tokens", got, want, 3e-2)


def test_integer_experts_move() -> None:
    """Shards hold some experts, of which one is replaced; groups of different sizes are cut."""
    experts, hidden, ffn = 5, 64, 64
    mlp, wide = integers(experts, 2, hidden, ffn, BF16, 4, 32)
    coarse, dense = integers(1, 1, hidden, ffn, BF16, 4, 64)
    mlp.experts[3], wide[3] = coarse.experts[0], dense[0]
    table = ((0, 1, 2), (3, 4, 0))
    x = rand(19, hidden, dtype=BF16)
    weights, chosen = grouped(mlp).choose(x)
    total = torch.zeros(19, hidden, dtype=torch.float64, device=DEVICE)
    for shard, held in enumerate(table):
        slots = ExpertSlots(table, shard, experts, torch.device(DEVICE))
        mine = [mlp.experts[expert] for expert in held]
        ours = grouped(ExpertMlp(ops, mlp.router, mine, mlp.source, slots))
        ours.replace(0, mlp.experts[4])
        ours.replace(0, mine[0])
        with poisoned_outputs():
            total += ours.forward(x).double()
    if MODE != "compile":
        check("sum over shards", total, want64(mlp, wide, x, weights, chosen), 3e-2)


def test_integer_experts_of_different_bits() -> None:
    """Gate in 4 bits with up in 8, in groups of different sizes; and an expert in other bits than the rest."""
    hidden, ffn, wide, mlps = 64, 32, [], []
    for expert in range(4):
        (gate, gate64), (up, up64) = make(ffn, hidden, 4, 64), make(ffn, hidden, 8 if expert % 2 else 4, 32, False)
        down, down64 = make(hidden, ffn, 8 if expert == 2 else 4, 32)
        parts = StackedLinear([GroupedLinear(gate, None), GroupedLinear(up, None)])
        mlps.append(GatedMlp(ops, "silu", parts, GroupedLinear(down, None)))
        wide.append((torch.cat((gate64, up64)), down64))
    mlp = mixture(mlps, 2, hidden, BF16)
    ours = grouped(mlp)
    assert isinstance(ours.gate_up, IntegerStack) and ours.gate_up.stack.bits == 8
    ours.replace(1, mlps[0])
    ours.replace(1, mlps[1])
    x = rand(20, hidden, dtype=BF16)
    weights, chosen = rand(20, 2).abs(), next(routing(4, 2, 20))
    with poisoned_outputs():
        got = ours.apply(x, weights, chosen)
    if MODE != "compile":
        check("different bits", got, want64(mlp, wide, x, weights, chosen), 3e-2)


def test_a_shared_expert_in_integers() -> None:
    """Two launches of its own for few tokens."""
    mlp, _ = integers(4, 2, 64, 32, BF16, 4, 32)
    other, wide = integers(1, 1, 64, 96, BF16, 4, 32)
    both, routed = with_shared(grouped(mlp), other.experts[0], None), grouped(mlp)
    assert isinstance(both, FusedSharedAndRouted)
    for tokens in (3, 20):
        x = rand(tokens, 64, dtype=BF16)
        with poisoned_outputs():
            got = both.forward(x.clone())
        if MODE != "compile":
            one = torch.ones(tokens, 1, device=DEVICE)
            want = routed.forward(x).double() + want64(other, wide, x, one, torch.zeros_like(one, dtype=torch.int32))
            check(f"{tokens} tokens", got, want, 3e-2)


def test_no_launch_shape_of_integers_reads_or_writes_outside_its_tensors() -> None:
    if MODE != "interpret":
        return
    for bits, size, few in ((4, 32, True), (8, 32, False)):
        mlp, _ = integers(4, 2, 64, 32, BF16, bits, size, ordered=few)
        ours = grouped(mlp)
        x, weights = rand(3, 64, dtype=BF16), rand(3, 2).abs()
        chosen = torch.tensor([[0, 3], [3, 1], [2, 0]], dtype=torch.int32)
        with checked_addresses(moe, moe_groups, moe_plan, moe_route):
            _ = ours._products(x, weights, FewPairs(chosen)) if few else ours.apply(x, weights, chosen)


def in_every_form() -> Iterator[tuple[str, ExpertMlp]]:
    experts, top_k, hidden, ffn = (6, 2, 64, 32) if QUICK else (16, 4, 512, 256)
    for dtype in (BF16, FP8):
        yield str(dtype), make_moe(experts, top_k, hidden, ffn, dtype)
    tile = (16, 32) if QUICK else (128, 128)
    mlps = [
        GatedMlp(ops, "silu", block_fp8(2 * ffn, hidden, tile), block_fp8(hidden, ffn, tile)) for _ in range(experts)
    ]
    yield "FP8 in tiles", mixture(mlps, top_k, hidden, BF16)
    yield "mxfp4", make_gpt_oss(experts, top_k, hidden, ffn, BF16)


def test_experts_in_deterministic_mode_ignore_the_other_tokens() -> None:
    tokens = 21 if QUICK else 300
    for name, mlp in in_every_form():
        ours = dataclasses.replace(grouped(mlp), ops=fixed_ops)
        usual = grouped(mlp)
        dtype = mlp.router.linear.weight.dtype  # type: ignore[attr-defined]
        hidden = mlp.router.linear.weight.shape[1]  # type: ignore[attr-defined]
        x = rand(tokens, hidden, dtype=dtype)
        weights, chosen = usual.choose(x)
        with poisoned_outputs():
            whole = ours.apply(x, weights, chosen)
        assert not ours.takes_few(x[:1])
        if MODE == "compile":
            continue
        check(name, whole, usual.apply(x, weights, chosen).double(), 1e-4 if dtype == torch.float32 else 2e-2)
        for begin, rows in ((0, 1), (5, 1), (3, 2), (1, 8), (2, 17), (4, tokens - 4)):
            part = slice(begin, begin + rows)
            with poisoned_outputs():
                some = ours.apply(x[part], weights[part], chosen[part])
            assert torch.equal(some, whole[part]), (name, begin, rows)


def test_linears_in_few_bits_ignore_how_many_rows_there_are() -> None:
    n, k = (48, 96) if QUICK else (1000, 768)
    tile = (16, 32) if QUICK else (100, 128)
    linears: list[tuple[str, Linear]] = [
        (f"int{bits}", GroupedLinear(make(n, k, bits, 32)[0], rand(n, dtype=BF16), fixed=True)) for bits in (4, 8)
    ]
    weight = rand(n, k, dtype=BF16, scale=k**-0.5)
    rows = CudaLinear(weight.to(FP8), None, rand(n)) if MODE == "compile" else CudaLinear.fp8(weight, None)
    tiles = block_fp8(n, k, tile)
    for scaled, of in ((rows, None), (tiles, tiles.tile)):
        linears.append((f"fp8 {of}", matmul.BatchInvariantLinear(scaled.weight, None, scaled.scale, of)))
    references = [None, None, rows, tiles]
    for (name, linear), reference in zip(linears, references, strict=True):
        x = rand(70, k, dtype=BF16)
        with poisoned_outputs():
            whole = linear(x)
        if MODE == "compile":
            continue
        if isinstance(linear, GroupedLinear):
            usual = GroupedLinear(linear.weight, linear.bias)(x)
        elif reference is rows:
            usual = x.double() @ (rows.weight.double() * rows.scale.double()[:, None]).t()  # type: ignore[union-attr]
        else:
            usual = tiles(x)
        check(name, whole, usual.double(), 2e-2)
        for begin, count in ((0, 1), (5, 1), (31, 2), (1, 8), (3, 64), (69, 1)):
            with poisoned_outputs():
                part = linear(x[begin : begin + count].contiguous())
            assert torch.equal(part, whole[begin : begin + count]), (name, begin, count)


def bench_integer_experts() -> Iterator[Row]:
    """Few tokens: bytes of the weights of the experts visited. Many: operations of the pairs."""
    for name, (experts, top_k, hidden, ffn) in SHAPES.items():
        for bits in (4, 8):
            ours = grouped(integers(experts, top_k, hidden, ffn, BF16, bits, 128, minimum=bits == 4)[0])
            for tokens in (1, 8, 64, 256, 2048):
                x = rand(tokens, hidden, dtype=BF16)
                us = time_us([lambda g=ours, x=x: g.forward(x)])
                title = f"{name} experts int{bits}, {tokens} tokens"
                if tokens > 256:
                    yield arithmetic(title, us, 2.0 * tokens * top_k * 3 * hidden * ffn)
                elif MODE == "compile":
                    yield bandwidth(title, 0.0, 0.0)
                else:
                    visited = len(ours.choose(x)[1].unique())
                    yield bandwidth(title, us, ours.weight_bytes / experts * visited)


def bench_fixed_experts() -> Iterator[Row]:
    """Deterministic mode against the usual launch shapes."""
    experts, top_k, hidden, ffn = SHAPES["qwen3-30b-a3b"]
    usual = grouped(make_moe(experts, top_k, hidden, ffn, BF16))
    fixed = dataclasses.replace(usual, ops=fixed_ops)
    for tokens in (1, 64, 2048):
        x = rand(tokens, hidden, dtype=BF16)
        weights, chosen = usual.choose(x)
        us = time_us([lambda x=x, w=weights, c=chosen: fixed.apply(x, w, c)])
        plain = time_us([lambda x=x: usual.forward(x)])
        name, us, rate = arithmetic(f"fixed experts, {tokens} tokens", us, 2.0 * tokens * top_k * 3 * hidden * ffn)
        yield name, us, f"{rate}, {us / plain if plain else 0:.2f}x the usual"


def tune_integer_experts() -> Iterator[Row]:
    experts, top_k, hidden, ffn = SHAPES["qwen3-30b-a3b"]
    ours = grouped(integers(experts, top_k, hidden, ffn, BF16, 4, 128)[0])
    assert isinstance(ours.gate_up, IntegerStack) and isinstance(ours.down, IntegerStack)
    for tokens in (1, 8, 64, 2048):
        x, inner = rand(tokens, hidden, dtype=BF16), rand(tokens * top_k, ffn, dtype=BF16)
        weights, chosen = ours.choose(x)
        few = tokens <= 16
        schedule = FewPairs(chosen) if few else plan(chosen, experts)
        heights = (8, 16) if few else (16, 64, 128)
        for m in heights:
            for n, warps, stages in ((16, 1, 4), (16, 2, 4), (32, 2, 4), (32, 4, 3), (64, 4, 3), (128, 8, 3)):
                config = GroupsConfig(m, n, warps, stages)
                for part, of, rows, gate in (("gate_up", ours.gate_up, x, True), ("down", ours.down, inner, False)):
                    if few and tokens > m:
                        continue

                    call = partial(
                        moe_groups.grouped_linear, rows, of.stack, None, schedule, top_k, gated=gate,
                        route_weights=None if gate else weights, counters=ours.counters, config=config,
                    )  # fmt: skip
                    yield arithmetic(
                        f"{part} {tokens} tokens m{m} n{n} w{warps} s{stages}",
                        time_us([call]),
                        2.0 * tokens * top_k * hidden * ffn * (2 if gate else 1),
                    )
