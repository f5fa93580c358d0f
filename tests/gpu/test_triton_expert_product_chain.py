"""Chains of products with a layer of experts in them, in one launch of CUDA C++: against float64, and what they take
beside the launches that they replace and beside reading the weights.

`python tests/gpu/run.py --only product_chain.` on a device; `--interpret` runs the emulation (minutes), `--compile`
says registers and spills.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

import torch
from cuda_emulation import emulate, guarded
from expert_chain_cases import (
    BF16,
    DEEPSEEK_LITE,
    GPT_OSS,
    GPT_OSS_GATE,
    QWEN3_30B,
    QWEN3_NEXT,
    TOLERANCE,
    ExpertSizes,
    expert_chain64,
    make_expert_chain,
    pack,
    pack_shape,
)
from gpu_harness import DEVICE, MODE, Row, check, poison_, rand, time_us
from test_triton_product_chain import H200, _processors, build, early, shapes
from torch import Tensor

from penstock.bench.bounds import probe
from penstock.engine.backends.cuda import nvrtc
from penstock.engine.backends.cuda.kernels import moe_one, mxfp4_one
from penstock.engine.backends.cuda.kernels.chain_plan import ENTRY, SOURCE, ChainPlan, ChainShape, plan_chain
from penstock.engine.backends.cuda.kernels.gemv import linear
from penstock.engine.backends.cuda.kernels.moe_one import Matrices, Visits
from penstock.engine.backends.cuda.kernels.moe_route import Choice, score_and_route
from penstock.engine.backends.cuda.kernels.mxfp4_fragments import fragments, stacked
from penstock.engine.backends.cuda.kernels.mxfp4_rows import rows_of
from penstock.engine.backends.cuda.kernels.product_chain import ProductChain
from penstock.engine.backends.cuda.ops import TritonOps
from penstock.engine.backends.interface import AnyLink, ExpertChoice, ExpertLinks, Link
from penstock.engine.loading.mxfp4 import round_mxfp4

LARGE_IN_MXFP4 = {"gpt-oss-20b": GPT_OSS}
LARGE = {"qwen3-30b-a3b": QWEN3_30B, "deepseek-v2-lite": DEEPSEEK_LITE, "qwen3-next": QWEN3_NEXT}
CORRECTION = torch.linspace(-0.2, 0.2, 256)
SMALL = {
    "few rows": (ExpertSizes(256, 128, 320, 24, 144, ExpertChoice(4, True), ties=True), ChainShape(3, 4, 3)),
    "rows that are no whole units": (
        ExpertSizes(1040, 272, 48, 16, 272, ExpertChoice(3, False), shared=560, gate=True),
        ChainShape(5, 4, 2),
    ),
    "groups and corrections": (
        ExpertSizes(
            512, 256, 96, 256, 128,
            ExpertChoice(8, True, True, CORRECTION, groups=8, top_groups=4, best_two=True, scale=2.5),
            shared=128, ties=True,
        ),
        ChainShape(4, 8, 4),
    ),
}  # fmt: skip
TIMED = (("qwen3-30b-a3b", 4), ("deepseek-v2-lite", 3), ("qwen3-next", 3))
"""Shapes, and layers enough for no weights to stay in the cache."""


def cases() -> Iterator[tuple[str, ExpertSizes, ChainShape, bool]]:
    """Name, sizes, launch shape, whether weights are e4m3."""
    for fp8 in (True, False):
        if MODE != "interpret":
            for name, sizes in LARGE.items():
                yield name, sizes, H200, fp8
        for name, (sizes, shape) in SMALL.items():
            yield name, sizes, shape if MODE == "interpret" else H200, fp8


def chain_of(sizes: ExpertSizes, *, fp8: bool, device: torch.device = DEVICE) -> list[AnyLink]:
    """With the correction of the choice on the device, too."""
    if sizes.choice.correction is not None:
        sizes = replace(sizes, choice=replace(sizes.choice, correction=sizes.choice.correction.to(device)))
    keep: Callable[[Tensor], Tensor] = guarded if MODE == "interpret" else lambda x: x
    return make_expert_chain(sizes, fp8=fp8, bias=True, device=device, keep=keep)


def run(links: list[AnyLink], shape: ChainShape, x: Tensor, stream: Tensor, seed: int) -> tuple[Tensor, Tensor]:
    """Launched or emulated. Returns the scores and the last output."""
    if MODE != "interpret":
        shape = replace(shape, blocks=_processors())
    plan = plan_chain(links, shape)
    assert plan is not None
    counter = torch.zeros(1, dtype=torch.int32, device=DEVICE)

    def make(count: int, dtype: torch.dtype) -> Tensor:
        out = poison_(torch.empty(count, dtype=dtype, device=DEVICE))
        return guarded(out) if MODE == "interpret" else out

    outs = plan.outs(make, BF16)
    launched = stream if MODE == "device" else guarded(stream)
    given, size = [plan.arguments(links, x, launched, outs, counter)], plan.shared_bytes
    if MODE == "interpret":
        kernel = emulate(SOURCE, ENTRY, defines=plan.defines)
        kernel.launch(shape.blocks, shape.warps * 32, given, shared_bytes=size, cooperative=True, seed=seed)
        stream.copy_(launched)
    else:
        on_device = nvrtc.kernel(DEVICE, SOURCE, ENTRY, defines=plan.defines, options=plan.options)
        on_device.launch(shape.blocks, shape.warps * 32, given, shared_bytes=size, overlap=seed == 2)
        torch.cuda.synchronize()
    assert int(counter) & 0x7FFFFFFF == 0
    scores, out = next(one for one in outs if one is not None and one.dtype == torch.float32), outs[-1]
    assert out is not None
    return scores, out


def test_products_of_experts_are_those_of_float64() -> None:
    """Experts are those of the kernel's own scores, which are rounded; of equal ones the first."""
    plans: dict[str, ChainPlan] = {}
    for name, sizes, shape, fp8 in cases():
        for tensor in (True, False):
            label = f"{name}, {'fp8' if fp8 else 'bf16'}, {'tensor cores' if tensor else 'ordinary arithmetic'}"
            here = replace(shape, tensor=tensor)
            if MODE == "compile":
                plan = plan_chain(make_expert_chain(sizes, fp8=fp8, bias=True, device=torch.device("meta")), here)
                assert plan is not None
                plans[label] = plan
                continue
            links = chain_of(sizes, fp8=fp8)
            x, residual = rand(1, sizes.attended, dtype=BF16), rand(1, sizes.hidden, dtype=BF16, scale=2)
            for seed in range(3):
                stream = residual.clone()
                scores, out = run(links, here, x, stream, seed)
                if sizes.ties:
                    assert torch.equal(scores[::2], scores[1::2]), label
                want_stream, want_out, exact = expert_chain64(links, x, residual, scores)
                check(f"{label}, scores", scores, exact, TOLERANCE)
                check(f"{label}, stream", stream, want_stream, TOLERANCE)
                check(f"{label}, output", out, want_out[0], TOLERANCE)
    build(plans)


def test_products_of_experts_in_mxfp4_are_those_of_float64() -> None:
    plans: dict[str, ChainPlan] = {}
    small = {"few rows": (ExpertSizes(1056, 64, 96, 8, 96, ExpertChoice(3, True), ties=True), ChainShape(3, 4, 3))}
    large = {} if MODE == "interpret" else {name: (sizes, H200) for name, sizes in LARGE_IN_MXFP4.items()}
    for name, (sizes, shape) in {**small, **large}.items():
        here = shape if MODE == "interpret" else H200
        if MODE == "compile":
            meta = make_expert_chain(sizes, fp8=False, bias=True, device=torch.device("meta"))
            plan = plan_chain(pack_shape(meta, GPT_OSS_GATE), here)
            if plan is not None:  # few rows may be too few for so many warps
                plans[f"{name}, mxfp4"] = plan
            continue
        if MODE == "device" and sizes.width < 4 * here.warps:
            continue
        keep: Callable[[Tensor], Tensor] = guarded if MODE == "interpret" else lambda x: x
        links, wide = pack(chain_of(sizes, fp8=False), GPT_OSS_GATE, keep)
        x, residual = rand(1, sizes.attended, dtype=BF16), rand(1, sizes.hidden, dtype=BF16, scale=2)
        for seed in range(3):
            stream = residual.clone()
            scores, out = run(links, here, x, stream, seed)
            want_stream, want_out, exact = expert_chain64(wide, x, residual, scores)
            check(f"{name}, mxfp4, scores", scores, exact, TOLERANCE)
            check(f"{name}, mxfp4, stream", stream, want_stream, TOLERANCE)
            check(f"{name}, mxfp4, output", out, want_out[0], TOLERANCE)
    build(plans)


def test_a_graph_replays_it_with_experts() -> None:
    """Over and over, beside launches that start early: the same numbers each time."""
    if MODE != "device":
        return
    for name, sizes in LARGE.items():
        chain = ProductChain(chain_of(sizes, fp8=False))
        x, start = rand(1, sizes.attended, dtype=BF16), rand(1, sizes.hidden, dtype=BF16)
        stream = start.clone()
        with early(True):
            chain(x, stream)
            torch.cuda.synchronize()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                stream.copy_(start)
                for _ in range(5):
                    out = chain(x, stream)
        results: set[tuple[bytes, ...]] = set()
        for _ in range(200):
            graph.replay()
            torch.cuda.synchronize()
            assert out is not None
            results.add(tuple(one.view(torch.int16).cpu().numpy().tobytes() for one in (stream, out)))
        assert len(results) == 1, name
        assert int(chain.counter) & 0x7FFFFFFF == 0


def test_engines_have_counters_of_their_own() -> None:
    """All chains of one engine share one; a launch of another engine does not touch it."""
    if MODE != "device":
        return
    engines = [TritonOps(DEVICE) for _ in range(2)]
    for ops in engines:
        ops.chains = True
    links = chain_of(QWEN3_30B, fp8=False)
    chains = [ops.chain(links) for ops in engines for _ in range(2)]
    found = [one.counter for one in chains if isinstance(one, ProductChain)]
    assert [one is found[0] for one in found] == [True, True, False, False] and found[2] is found[3]
    x, stream = rand(1, QWEN3_30B.attended, dtype=BF16), rand(1, QWEN3_30B.hidden, dtype=BF16)
    before = int(found[2])
    for one in chains[:2]:
        assert one is not None
        one(x, stream)
    assert int(found[2]) == before


def launches_of(links: list[AnyLink], x: Tensor, residual: Tensor) -> Callable[[], object]:
    """The same products as the engine launches them."""
    output, experts, entry = links
    assert isinstance(output, Link) and isinstance(experts, ExpertLinks) and isinstance(entry, Link)
    asked = experts.choice
    choice = Choice(
        asked.top_k, asked.normalize, asked.sigmoid, asked.correction, asked.groups, asked.top_groups, asked.best_two,
        asked.scale,
    )  # fmt: skip
    counters = torch.zeros(1024, dtype=torch.int32, device=DEVICE)
    up = Matrices(experts.gate_up, experts.gate_up_scale, experts.shared_gate_up, experts.shared_gate_up_scale)
    down = Matrices(experts.down, experts.down_scale, experts.shared_down, experts.shared_down_scale)

    def launch() -> Tensor:
        linear(x, output.weight, weight_scale=output.scale, residual=residual, out=residual)
        normed = torch.empty_like(residual)
        logits = None
        if moe_one.ranks(choice, len(experts.router)):
            logits = torch.empty((1, len(experts.router)), dtype=torch.float32, device=DEVICE)
        weights, chosen, gates = score_and_route(
            residual, experts.router, None, choice, counters, shared=experts.shared_gate, norm=experts.norm,
            eps=experts.eps, normed=normed, logits=logits,
        )  # fmt: skip
        visits = Visits(chosen, weights, False, logits, choice)
        inner = moe_one.gate_up(normed, up, visits, "silu")
        moe_one.down(inner, down, visits, shared_gate=gates, residual=residual)
        return linear(residual, entry.weight, weight_scale=entry.scale, norm=entry.norm, eps=entry.eps)

    return launch


def variants(blocks: int) -> dict[str, ChainShape]:
    """Of `shapes`, what may matter here."""
    kept = ("chain", "ordinary arithmetic", "ring of 3 stages", "ring of 5 stages", "ring of 6 stages")
    found = {name: shape for name, shape in shapes(blocks).items() if name in kept}
    base = found["chain"]
    return {
        **found,
        "80 registers": replace(base, registers=80),
        "104 registers": replace(base, registers=104),
        "8 warps, 8 stages": replace(base, warps=8, stages=8),
        "without waits": replace(base, waits=False),
        "copies alone": replace(base, waits=False, multiplies=False),
    }


def bench_experts() -> Iterator[Row]:
    """Microseconds of the products of a layer, and their share of what reading the weights takes."""
    if MODE == "compile":
        meta = torch.device("meta")
        plans = {
            f"{name}, {'fp8' if fp8 else 'bf16'}, {kind}": plan_chain(
                make_expert_chain(LARGE[name], fp8=fp8, device=meta), shape
            )
            for name, _ in TIMED
            for fp8 in (False, True)
            for kind, shape in variants(H200.blocks).items()
        }
        build({label: plan for label, plan in plans.items() if plan is not None})
    for name, copies in TIMED if MODE == "device" else ():
        bound = probe(torch.device("cuda", 0), BF16).read_gbps
        for fp8 in (False, True):
            sizes = LARGE[name]
            layers = [make_expert_chain(sizes, fp8=fp8, device=DEVICE) for _ in range(copies * (2 if fp8 else 1))]
            x, residual = rand(1, sizes.attended, dtype=BF16), rand(1, sizes.hidden, dtype=BF16)
            label, read = f"{name} {'fp8' if fp8 else 'bf16'}", sizes.weights * (1 if fp8 else 2)

            def row(kind: str, us: float, label: str = label, read: int = read, bound: float = bound) -> Row:
                return f"{label}, {kind}", us, f"{read / bound / us / 10:.0f}% of the read bound" if us else "-"

            with early(True):
                usual = [launches_of(links, x, residual) for links in layers]
                yield row("launches", time_us(usual))
                for kind, shape in variants(_processors()).items():
                    if plan_chain(layers[0], shape) is None:
                        continue  # no room for it
                    chains = [ProductChain(links, shape) for links in layers]
                    us = time_us([lambda chain=chain, x=x, r=residual: chain(x, r) for chain in chains])
                    yield row(kind, us)
                yield row("launches again", time_us(usual))
            del layers, usual, chains


def packed_layer(sizes: ExpertSizes) -> tuple[list[AnyLink], Callable[[Tensor, Tensor], object]]:
    """A chain with experts in MXFP4, and the same weights as the engine launches them."""
    links = make_expert_chain(sizes, fp8=False, bias=True, device=DEVICE)
    output, experts, entry = links
    assert isinstance(output, Link) and isinstance(experts, ExpertLinks) and isinstance(entry, Link)
    matrices = [[round_mxfp4(one.float()) for one in stack] for stack in (experts.gate_up, experts.down)]
    up, down = (
        stacked([fragments(one, paired=paired) for one in stack])
        for stack, paired in zip(matrices, (True, False), strict=True)
    )
    biases = [torch.zeros(one.shape[:2], dtype=BF16, device=DEVICE) for one in (experts.gate_up, experts.down)]
    rows = [rows_of(one) for one in (up, down)]
    packed = replace(
        experts, gate_up=rows[0].units, gate_up_scale=rows[0].scale, down=rows[1].units, down_scale=rows[1].scale,
        gate_up_bias=biases[0], down_bias=biases[1], clamped=GPT_OSS_GATE,
    )  # fmt: skip
    choice, counters = Choice(experts.choice.top_k, True), torch.zeros(1024, dtype=torch.int32, device=DEVICE)

    def launch(x: Tensor, residual: Tensor) -> Tensor:
        linear(x, output.weight, bias=output.bias, residual=residual, out=residual)
        normed = torch.empty_like(residual)
        logits = torch.empty((1, len(experts.router)), dtype=torch.float32, device=DEVICE)
        weights, chosen, _ = score_and_route(
            residual, experts.router, experts.router_bias, choice, counters, norm=experts.norm, eps=experts.eps,
            normed=normed, logits=logits,
        )  # fmt: skip
        visits = Visits(chosen, weights, False, logits, choice)
        mxfp4_one.experts_of_one(
            normed, up, biases[0], down, biases[1], visits, GPT_OSS_GATE, counters, residual=residual
        )  # fmt: skip
        return linear(residual, entry.weight, bias=entry.bias, norm=entry.norm, eps=entry.eps)

    return [output, packed, entry], launch


def bench_experts_in_mxfp4() -> Iterator[Row]:
    """The same for gpt-oss."""
    if MODE == "compile":
        chain = pack_shape(make_expert_chain(GPT_OSS, fp8=False, bias=True, device=torch.device("meta")), GPT_OSS_GATE)
        plans = {f"gpt-oss-20b, mxfp4, {kind}": plan_chain(chain, shape) for kind, shape in variants(132).items()}
        build({label: plan for label, plan in plans.items() if plan is not None})
    if MODE != "device":
        return
    bound, sizes = probe(torch.device("cuda", 0), BF16).read_gbps, GPT_OSS
    layers = [packed_layer(sizes) for _ in range(4)]
    x, residual = rand(1, sizes.attended, dtype=BF16), rand(1, sizes.hidden, dtype=BF16)
    experts = 3 * sizes.hidden * sizes.width * sizes.choice.top_k
    read = (sizes.weights - experts) * 2 + experts * 17 // 32

    def row(kind: str, us: float) -> Row:
        return f"gpt-oss-20b mxfp4, {kind}", us, f"{read / bound / us / 10:.0f}% of the read bound"

    with early(True):
        usual = [lambda launch=launch: launch(x, residual) for _, launch in layers]
        yield row("launches", time_us(usual))
        for kind, shape in variants(_processors()).items():
            if plan_chain(layers[0][0], shape) is None:
                continue  # no kernel or no room for it
            chains = [ProductChain(links, shape) for links, _ in layers]
            yield row(kind, time_us([lambda chain=chain: chain(x, residual) for chain in chains]))
        yield row("launches again", time_us(usual))
