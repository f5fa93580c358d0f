"""Routing, sorting by expert and the grouped products against float64, one pair at a time; soft caps and GELU."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from functools import partial

import torch
from gpu_harness import (
    DEVICE,
    MODE,
    QUICK,
    TOLERANCE,
    Row,
    arithmetic,
    bandwidth,
    check,
    check_equal,
    poisoned_outputs,
    rand,
    rng,
    time_us,
)
from torch import Tensor
from torch.nn import functional as F

from penstock.engine.backends.cuda.block_fp8_linear import BlockFp8Linear
from penstock.engine.backends.cuda.experts import FusedSharedAndRouted, choice_of, group, with_shared
from penstock.engine.backends.cuda.kernels import moe, moe_plan, moe_route
from penstock.engine.backends.cuda.kernels.moe import GroupedConfig
from penstock.engine.backends.cuda.kernels.moe_route import Choice
from penstock.engine.backends.cuda.linear import CudaLinear
from penstock.engine.backends.cuda.ops import TritonOps
from penstock.engine.backends.interface import FP8
from penstock.engine.models.layers.experts import ExpertMlp, ExpertSlots, ExpertSource, Router
from penstock.engine.models.layers.feed_forward import GatedMlp

BF16 = torch.bfloat16
ops = TritonOps(DEVICE)


def make_moe(
    experts: int, top_k: int, hidden: int, ffn: int, dtype: torch.dtype, normalize: bool = True, gelu: bool = False
) -> ExpertMlp:
    dense = BF16 if dtype == FP8 else dtype

    def linear(out: int, inputs: int) -> CudaLinear:
        weight = rand(out, inputs, dtype=dense, scale=inputs**-0.5)
        if MODE == "compile":
            return CudaLinear(weight.to(dtype), None, torch.empty(out) if dtype == FP8 else None)
        return CudaLinear.fp8(weight, None) if dtype == FP8 else CudaLinear(weight, None)

    activation = "gelu_tanh" if gelu else "silu"
    mlps = [
        GatedMlp(ops, activation, linear(2 * ffn, hidden), linear(hidden, ffn))  # type: ignore[arg-type]
        for _ in range(experts)
    ]
    # As wide a spread of scores as trained routers have: some experts get most tokens, some none.
    router = CudaLinear(rand(experts, hidden, dtype=dense, scale=3 * hidden**-0.5), None)
    return ExpertMlp(ops, Router(router, top_k, normalize), mlps, ExpertSource(mlps.__getitem__, lambda _: None))


def wide(linear: CudaLinear) -> Tensor:
    weight = linear.weight.double()
    return weight if linear.scale is None else weight * linear.scale.double()[:, None]


def moe64(mlp: ExpertMlp, x: Tensor, weights: Tensor, chosen: Tensor) -> Tensor:
    out = torch.zeros_like(x, dtype=torch.float64)
    for token in range(x.shape[0]):
        for weight, expert in zip(weights[token].double(), chosen[token].tolist(), strict=True):
            one = mlp.experts[expert]
            up_gate = wide(one.gate_up) @ x[token].double()
            gate, up = up_gate.chunk(2)
            act = F.silu(gate) if one.activation == "silu" else F.gelu(gate, approximate="tanh")
            out[token] += weight * (wide(one.down) @ (act * up))
    return out


def test_routing_takes_the_best_experts() -> None:
    for experts, top_k in ((8, 2), (128, 8), (60, 4), (5, 1)):
        for normalize in (True, False):
            logits = rand(rng.randrange(1, 9 if QUICK else 200), experts, dtype=BF16, scale=2)
            with poisoned_outputs():
                weights, chosen = moe_route.route(logits, Choice(top_k, normalize))
            if MODE == "compile":
                continue
            probabilities = logits.double().softmax(-1)
            best = probabilities.sort(-1, descending=True).values[:, :top_k]
            # Equal scores may be taken in any order: compare what was taken, not which.
            check_equal("distinct", chosen.sort(-1).values.diff().le(0).any(), torch.tensor(False, device=DEVICE))
            check(f"scores {experts}", probabilities.gather(1, chosen.long()), best, 1e-6)
            check(f"weights {experts}", weights, best / best.sum(-1, keepdim=True) if normalize else best, 1e-5)


def test_routing_by_sigmoid_groups_and_correction_equals_the_router() -> None:
    """As DeepSeek V2 and V3, Kimi K2 and others choose; the correction decides who is chosen, and is in no weight."""
    for experts, top_k, groups, top_groups in (
        (32, 4, 8, 4),
        (60, 6, 3, 2),
        (256, 8, 8, 4),
        (160, 6, 8, 3),
        (12, 3, 1, 1),
    ):
        for scoring, best_two, biased, normalize in (
            ("sigmoid", True, True, True),
            ("softmax", False, False, False),
            ("sigmoid", False, False, True),
            ("softmax", True, True, False),
        ):
            logits = rand(rng.randrange(1, 5 if QUICK else 200), experts, dtype=torch.float32, scale=2)
            bias = rand(experts, dtype=torch.float32, scale=0.1) if biased else None
            score = "best_two" if best_two else "best"
            with poisoned_outputs():
                more = 0.3 if biased else 1e-20
                choice = Choice(top_k, normalize, scoring == "sigmoid", bias, groups, top_groups, best_two, 2.5, more)
                weights, chosen = moe_route.route(logits, choice)
            if MODE == "compile":
                continue
            router = Router(
                lambda x: x, top_k, normalize, scoring, bias, groups, top_groups, score, 2.5,  # type: ignore[arg-type]
                total_eps=more,
            )  # fmt: skip
            want, expected = router(logits)
            name = f"{experts} {scoring} {score}"
            check_equal(f"experts {name}", chosen.long().sort(-1).values, expected.sort(-1).values)
            check(f"weights {name}", weights.sort(-1).values, want.sort(-1).values, 1e-5)


def test_weights_on_inputs_equal_one_expert_at_a_time() -> None:
    """As Llama 4: sigmoids of the best logits, though the largest ones are all one, times what the experts read."""
    for experts, top_k in ((16, 1), (8, 2)):
        mlp = make_moe(experts, top_k, 64, 48, torch.float32)
        router = dataclasses.replace(mlp.router, normalize=False, scoring="sigmoid", weight_inputs=True)
        mlp = dataclasses.replace(mlp, router=router)
        grouped = group(mlp)
        assert grouped is not None
        x = rand(3 if QUICK else 77, 64, dtype=torch.float32, scale=4)
        with poisoned_outputs():
            got = grouped.forward(x)
        if MODE == "compile":
            continue
        weights, chosen = router(x)
        want = torch.zeros_like(x, dtype=torch.float64)
        for token in range(len(x)):
            for weight, expert in zip(weights[token], chosen[token].tolist(), strict=True):
                row = x[token : token + 1].double() * weight.double()
                want[token] += moe64(mlp, row, torch.ones(1, 1), torch.tensor([[expert]]))[0]
        check(f"weighted inputs {experts} {top_k}", got, want, 1e-4)


def test_plan_sorts_pairs_by_expert_and_keeps_their_order() -> None:
    for experts, pairs in ((8, 2), (8, 64), (128, 8), (128, 300 if QUICK else 70_000), (3, 5000)):
        chosen = torch.randint(0, max(1, experts - 1), (pairs, 1), dtype=torch.int32, device=DEVICE)
        with poisoned_outputs():
            plan = moe_plan.plan(chosen, experts)
        if MODE == "compile":
            continue
        flat = chosen.flatten().long()
        check_equal("order", plan.order.long(), flat.argsort(stable=True))
        counts = torch.bincount(flat, minlength=experts)
        check_equal("starts", plan.starts.long(), F.pad(counts.cumsum(0), (1, 0)))


def test_grouped_experts_equal_one_pair_at_a_time() -> None:
    cases = [(8, 2, 64, 48, 5), (16, 3, 96, 40, 40)] if QUICK else [(8, 2, 512, 896, 300), (60, 4, 320, 200, 64)]
    for experts, top_k, hidden, ffn, tokens in [*cases, (8, 2, 64, 32, 1)]:
        for dtype in (torch.float32, BF16, FP8):
            gelu = dtype == torch.float32
            mlp = make_moe(experts, top_k, hidden, ffn, dtype, normalize=not gelu, gelu=gelu)
            grouped = group(mlp)
            assert grouped is not None
            x = rand(tokens, hidden, dtype=BF16 if dtype == FP8 else dtype)
            with poisoned_outputs():
                got = grouped.forward(x)
            if MODE == "compile":
                continue
            weights, chosen = moe_route.route(mlp.router.linear(x), choice_of(mlp.router))
            want = moe64(mlp, x, weights, chosen)
            check(f"experts {experts} {dtype} of {tokens}", got, want, 1e-4 if dtype == torch.float32 else 3e-2)


def test_a_shared_expert_is_added_for_any_number_of_tokens() -> None:
    for dtype in (torch.float32,) if QUICK else (torch.float32, BF16):
        mlp = make_moe(6, 2, 64, 48, dtype)
        grouped = group(mlp)
        assert grouped is not None
        shared = make_moe(1, 1, 64, 80, dtype).experts[0]
        both = with_shared(grouped, shared, None)
        assert isinstance(both, FusedSharedAndRouted)
        for tokens in (1, 8, 9):
            x = rand(tokens, 64, dtype=dtype)
            with poisoned_outputs():
                got = both.forward(x)
            if MODE != "compile":
                gate, up = (x.double() @ wide(shared.gate_up).t()).chunk(2, -1)
                want = grouped.forward(x).double() + (F.silu(gate) * up) @ wide(shared.down).t()
                check(f"{tokens} tokens {dtype}", got, want, 1e-4 if dtype == torch.float32 else 2e-2)


def block_fp8(out: int, inputs: int, tile: tuple[int, int]) -> BlockFp8Linear:
    weight = rand(out, inputs, dtype=BF16).to(FP8)
    scales = rand(-(-out // tile[0]), inputs // tile[1]).abs() + 0.5
    rows = scales if MODE == "compile" else scales[torch.arange(out, device=DEVICE) // tile[0]]
    if MODE == "compile":
        return BlockFp8Linear(weight, scales, tile, None)
    return BlockFp8Linear.of_rows(weight, rows, None)


def widened(linear: BlockFp8Linear) -> Tensor:
    rows = linear.scale.double().repeat_interleave(linear.tile[0], 0)
    return linear.weight.double() * rows.repeat_interleave(linear.tile[1], 1)


def test_weights_in_fp8_tiles_are_multiplied_as_they_are() -> None:
    """Dense linears and experts; matrices whose last tile is cut, and tiles cut by a shard."""
    cases = [(48, 64, (16, 32)), (40, 64, (32, 32))] if QUICK else [(1536, 2048, (128, 128)), (576, 7168, (128, 128))]
    for out, inputs, tile in cases:
        for tokens in (1, 20) if QUICK else (1, 7, 20, 100, 700):
            for dtype in (torch.float32, BF16):
                linear = block_fp8(out, inputs, tile)
                x = rand(tokens, inputs, dtype=dtype)
                with poisoned_outputs():
                    got = linear(x)
                if MODE != "compile":
                    want = x.double() @ widened(linear).t()
                    check(f"{out} x {inputs} of {tokens} {dtype}", got, want, 1e-4 if dtype != BF16 else 1e-2)
    experts, top_k, hidden, ffn, tile = (4, 2, 64, 32, (16, 32)) if QUICK else (16, 4, 512, 256, (128, 128))
    for tokens in (1, 9) if QUICK else (1, 40, 600):
        mlps = [
            GatedMlp(ops, "silu", block_fp8(2 * ffn, hidden, tile), block_fp8(hidden, ffn, tile))
            for _ in range(experts)
        ]
        router = CudaLinear(rand(experts, hidden, dtype=BF16), None)
        mlp = ExpertMlp(ops, Router(router, top_k, True), mlps, ExpertSource(mlps.__getitem__, lambda _: None))
        grouped = group(mlp)
        assert grouped is not None
        x = rand(tokens, hidden, dtype=BF16, scale=0.1)
        with poisoned_outputs():
            got = grouped.forward(x)
        if MODE == "compile":
            continue
        weights, chosen = grouped.choose(x)
        want = torch.zeros(tokens, hidden, dtype=torch.float64, device=DEVICE)
        for token in range(tokens):
            for weight, expert in zip(weights[token].double(), chosen[token].tolist(), strict=True):
                gate, up = (widened(mlps[expert].gate_up) @ x[token].double()).chunk(2)
                want[token] += weight * (widened(mlps[expert].down) @ (F.silu(gate) * up))
        check(f"experts in tiles, {tokens} tokens", got, want, 3e-2)


def test_every_tile_shape_gives_the_same_product() -> None:
    """All tokens at one expert, at all of them, and in between: tiles begun, full, and missing."""
    experts, top_k, hidden, ffn = 6, 2, 64, 48
    for tokens in (3, 37) if QUICK else (3, 37, 500):
        mlp = make_moe(experts, top_k, hidden, ffn, BF16)
        grouped = group(mlp)
        assert grouped is not None
        x = rand(tokens, hidden, dtype=BF16)
        if MODE == "compile":
            chosen = torch.zeros(tokens, top_k, dtype=torch.int32)
        else:
            first = torch.randint(0, 2, (tokens,), dtype=torch.int32, device=DEVICE)
            chosen = torch.stack((first, torch.full_like(first, experts - 1)), dim=1)
        weights = rand(tokens, top_k).abs()
        want = None if MODE == "compile" else moe64(mlp, x, weights, chosen)
        plan = moe_plan.plan(chosen, experts)
        for shape in ((16, 32, 64), (32, 64, 32), (64, 16, 16), (128, 64, 64)):
            config = GroupedConfig(*shape, num_warps=4, num_stages=2)
            with poisoned_outputs():
                inner = moe.grouped_linear(x, grouped.gate_up.weight, plan, top_k, gated=True, config=config)
                pairs = moe.grouped_linear(
                    inner, grouped.down.weight, plan, top_k, gated=False, route_weights=weights, config=config
                )
                got = moe.combine(pairs, top_k)
            if want is not None:
                check(f"tiles {shape} of {tokens}", got, want, 3e-2)


def test_shards_with_some_of_the_experts_sum_to_all_of_them() -> None:
    """Three shards of three slots for seven experts: two have a copy; choices of experts elsewhere add nothing."""
    experts, top_k, hidden, ffn = 7, 3, 64, 48
    table = ((0, 1, 2), (3, 4, 0), (5, 6, 1))
    for dtype in (torch.float32, BF16, FP8):
        mlp = make_moe(experts, top_k, hidden, ffn, dtype)
        x = rand(29, hidden, dtype=BF16 if dtype == FP8 else dtype)
        total = torch.zeros(29, hidden, dtype=torch.float64, device=DEVICE)
        for shard, held in enumerate(table):
            slots = ExpertSlots(table, shard, experts, torch.device(DEVICE))
            mine = [mlp.experts[expert] for expert in held]
            grouped = group(ExpertMlp(ops, mlp.router, mine, mlp.source, slots))
            assert grouped is not None
            if shard == 1:  # another expert and back
                grouped.replace(0, mlp.source.make(6))
                grouped.replace(0, mlp.source.make(3))
            with poisoned_outputs():
                total += grouped.forward(x).double()
        if MODE == "compile":
            continue
        weights, chosen = moe_route.route(mlp.router.linear(x), choice_of(mlp.router))
        want = moe64(mlp, x, weights, chosen)
        check(f"sum over shards {dtype}", total, want, 1e-4 if dtype == torch.float32 else 3e-2)


def test_graph_replay_with_new_tokens() -> None:
    """A graph captured with one routing serves any other."""
    if MODE != "device":
        return
    mlp = make_moe(16, 4, 256, 128, BF16)
    grouped = group(mlp)
    assert grouped is not None
    x = rand(12, 256, dtype=BF16)
    grouped.forward(x)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = grouped.forward(x)
    for _ in range(4):
        x.copy_(rand(12, 256, dtype=BF16))
        out.fill_(float("nan"))
        graph.replay()
        torch.cuda.synchronize()
        weights, chosen = moe_route.route(mlp.router.linear(x), choice_of(mlp.router))
        check("replay", out, moe64(mlp, x, weights, chosen), 3e-2)


SHAPES = {
    "mixtral-8x7b": (8, 2, 4096, 14336),
    "qwen3-30b-a3b": (128, 8, 2048, 768),
}


def bench_experts() -> Iterator[Row]:
    """Few tokens: bytes of the weights of the experts visited. Many: operations of the pairs."""
    for name, (experts, top_k, hidden, ffn) in SHAPES.items():
        for dtype, label in ((BF16, "bf16"), (FP8, "fp8")):
            grouped = group(make_moe(experts, top_k, hidden, ffn, dtype))
            assert grouped is not None
            for tokens in (1, 8, 64, 256, 2048, 8192):
                x = rand(tokens, hidden, dtype=BF16)
                us = time_us([lambda g=grouped, x=x: g.forward(x)])
                title = f"{name} experts {label}, {tokens} tokens"
                if tokens > 256:
                    yield arithmetic(title, us, 2.0 * tokens * top_k * 3 * hidden * ffn)
                elif MODE == "compile":
                    yield bandwidth(title, 0.0, 0.0)
                else:
                    visited = len(moe_route.route(grouped.router.linear(x), Choice(top_k, True))[1].unique())
                    yield bandwidth(title, us, grouped.weight_bytes / experts * visited)


def bench_routing() -> Iterator[Row]:
    for name, (experts, top_k, _, _) in SHAPES.items():
        for tokens in (1, 64, 8192):
            logits = rand(tokens, experts, dtype=BF16)

            def step(x: Tensor = logits, k: int = top_k, e: int = experts) -> None:
                moe_plan.plan(moe_route.route(x, Choice(k, True))[1], e)

            yield bandwidth(f"{name} route and sort, {tokens} tokens", time_us([step]), 2.0 * logits.numel())


def tune_experts() -> Iterator[Row]:
    flat = [(16, n, k, 4, s) for n in (32, 64, 128) for k in (64, 128, 256) for s in (3, 5)]
    square = [(m, n, 64, w, s) for m in (64, 128) for n in (64, 128) for w in (4, 8) for s in (3, 4)]
    for name, (experts, top_k, hidden, ffn) in SHAPES.items():
        grouped = group(make_moe(experts, top_k, hidden, ffn, BF16))
        assert grouped is not None
        for tokens in (8, 64, 512, 8192):
            x, inner = rand(tokens, hidden, dtype=BF16), rand(tokens * top_k, ffn, dtype=BF16)
            weights, chosen = moe_route.route(grouped.router.linear(x), Choice(top_k, True))
            plan = moe_plan.plan(chosen, experts)
            up = partial(moe.grouped_linear, x, grouped.gate_up.weight, plan, top_k, gated=True)
            down = partial(
                moe.grouped_linear, inner, grouped.down.weight, plan, top_k, gated=False, route_weights=weights
            )
            for shape in flat if tokens <= 64 else square:
                for part, call, width in (("gate_up", up, 2 * ffn), ("down", down, ffn)):
                    us = time_us([partial(call, config=GroupedConfig(*shape))])
                    yield arithmetic(
                        f"{name} {part} {tokens} tokens {shape}", us, 2.0 * tokens * top_k * hidden * width
                    )


def test_gelu_gate() -> None:
    for dtype in (BF16, torch.float16, torch.float32):
        gate_up = rand(3, 2 * 200, dtype=dtype, scale=4)
        with poisoned_outputs():
            got = ops.gelu_mul(gate_up)
        gate, up = gate_up.double().chunk(2, dim=-1)
        check(f"gelu {dtype}", got, F.gelu(gate, approximate="tanh") * up, TOLERANCE[dtype])


def test_the_added_row_is_normalized_first() -> None:
    for dtype in (BF16, torch.float32):
        x, residual = rand(4, 96, dtype=dtype), rand(4, 96, dtype=dtype)
        weight, x_weight = rand(96), rand(96)
        total = residual.double() + F.rms_norm(x.double(), (96,), x_weight.double(), 1e-6)
        with poisoned_outputs():
            got = ops.add_rms_norm(x, residual, weight, 1e-6, x_weight)
        check(f"residual {dtype}", residual, total, TOLERANCE[dtype])
        check(f"norm {dtype}", got, F.rms_norm(total, (96,), weight.double(), 1e-6), 2 * TOLERANCE[dtype])
