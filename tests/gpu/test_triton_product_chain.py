"""The products between two attentions of one token in one launch of CUDA C++, against float64, and what they take
beside the launches that they replace.

`python tests/gpu/run.py --only product_chain.` on a device; `--interpret` runs the emulation (minutes), `--compile`
says registers and spills.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
from chain_cases import BF16, EPS, LLAMA_8B, LLAMA_70B, QWEN3_06B, TOLERANCE, Sizes, links64, make_links
from cuda_emulation import emulate, guarded
from gpu_harness import DEVICE, MODE, Row, bandwidth, check, compiled, poison_, rand, time_us
from torch import Tensor

from penstock.engine.backends.cuda import nvrtc
from penstock.engine.backends.cuda.chains import new_counter
from penstock.engine.backends.cuda.kernels import common
from penstock.engine.backends.cuda.kernels.chain_plan import ENTRY, SOURCE, ChainPlan, ChainShape, plan_chain
from penstock.engine.backends.cuda.kernels.gemv import linear
from penstock.engine.backends.cuda.kernels.product_chain import ProductChain
from penstock.engine.backends.interface import Link

H200 = ChainShape(132)
SMALL = {
    "few rows": (Sizes(256, 688, 128, 320), ChainShape(3, 4, 3)),
    "rows that are no whole units": (Sizes(1040, 528, 2064, 48), ChainShape(5, 4, 2)),
}
TIMED = (("llama-8b", LLAMA_8B, 4), ("llama-70b", LLAMA_70B, 2))
"""With layers enough for none to stay in the cache."""


@contextmanager
def early(on: bool) -> Iterator[None]:
    common.overlap_launches(on)
    try:
        yield
    finally:
        common.overlap_launches(False)


def run_emulated(links: list[Link], shape: ChainShape, x: Tensor, residual: Tensor, seed: int) -> Tensor:
    plan = plan_chain(links, shape)
    assert plan is not None
    outs = [
        None if link.residual else guarded(poison_(torch.empty(1, link.outputs, dtype=BF16))) for link in plan.links
    ]
    counter = torch.zeros(1, dtype=torch.int32)
    for _ in range(2):  # the counter serves the next launch, too
        begun = guarded(residual)
        emulate(SOURCE, ENTRY, defines=plan.defines).launch(
            shape.blocks, shape.warps * 32, [plan.arguments(links, x, begun, outs, counter)],
            shared_bytes=plan.shared_bytes, cooperative=True, seed=seed,
        )  # fmt: skip
    residual.copy_(begun)
    assert outs[-1] is not None
    return outs[-1]


def test_blocks_that_do_not_all_fit_are_not_launched() -> None:
    """They wait for each other: without this check, for ever."""
    sizes, shape = SMALL["few rows"]
    links = make_links(sizes, bias=False, device=DEVICE)
    x, residual = rand(1, links[0].inputs, dtype=BF16), rand(1, links[0].outputs, dtype=BF16)
    for room in (shape.blocks, shape.blocks - 1):
        launched: list[object] = []
        stub = SimpleNamespace(
            resident_blocks=lambda block, shared, room=room: room,
            launch=lambda grid, *rest, launched=launched, **options: launched.append(grid),
        )
        with patch.object(nvrtc, "kernel", lambda *args, stub=stub, **options: stub):
            try:
                ProductChain(links, shape, new_counter(DEVICE))(x, residual)
            except nvrtc.CudaDriverError as error:
                assert room < shape.blocks and f"room for {room} of the {shape.blocks} blocks" in str(error)
        assert common.is_building() or launched == [shape.blocks] * (room == shape.blocks)


def cases() -> Iterator[tuple[str, Sizes, ChainShape, bool]]:
    """Name, sizes, launch shape, whether there are biases."""
    if MODE != "interpret":
        yield "llama-8b", LLAMA_8B, H200, False
    for name, (sizes, shape) in SMALL.items():
        yield name, sizes, shape if MODE == "interpret" else H200, True


def planned(sizes: Sizes, shape: ChainShape, *, bias: bool) -> ChainPlan:
    found = plan_chain(make_links(sizes, bias=bias, device=torch.device("meta")), shape)
    assert found is not None
    return found


def build(plans: dict[str, ChainPlan]) -> None:
    """Without a device: what each takes; or, in one of several processes, its share of what a device will run."""
    shard, shards = map(int, sys.argv[sys.argv.index("--shard") + 1].split("/")) if "--shard" in sys.argv else (0, 1)
    for label, plan in list(plans.items())[shard::shards]:
        if os.environ.get("PENSTOCK_RESOURCES") == "1":
            report = nvrtc.report(SOURCE, defines=plan.defines, options=plan.options)
            compiled[label] = f"product_chain, {label}\n{report}"
        else:
            nvrtc.build(SOURCE, defines=plan.defines, options=plan.options)


def test_products_are_those_of_float64() -> None:
    plans: dict[str, ChainPlan] = {}
    for name, sizes, shape, bias in cases():
        if MODE == "compile":
            plans[name] = planned(sizes, shape, bias=bias)
            continue
        emulated = MODE == "interpret"
        links = make_links(sizes, bias=bias, device=DEVICE, keep=guarded if emulated else lambda x: x)
        x, residual = rand(1, sizes.attended, dtype=BF16), rand(1, sizes.hidden, dtype=BF16, scale=3)
        want_stream, want_out = links64(links, x, residual)
        for seed in range(3):
            stream = residual.clone()
            if emulated:
                out = run_emulated(links, shape, x, stream, seed)
            else:
                with early(seed == 2):
                    found = on_device(links)(x, stream)
                assert found is not None
                out = found
            check(f"{name}, stream", stream, want_stream, TOLERANCE)
            check(f"{name}, output", out, want_out, TOLERANCE)
    build(plans)


def on_device(links: list[Link], **changes: Any) -> ProductChain:
    blocks = int(torch.cuda.get_device_properties(DEVICE).multi_processor_count)
    return ProductChain(links, replace(H200, blocks=blocks, **changes), new_counter(DEVICE))


def test_inputs_of_any_size() -> None:
    """E4m3 weights are multiplied by float16 inputs, which have to be brought into its range."""
    if MODE != "device":
        return
    links = make_links(QWEN3_06B, bias=False, device=DEVICE)[:1]
    chain = on_device(links)
    for size in (1e-20, 1e-3, 3e5, 1e20):
        x = rand(1, QWEN3_06B.attended, dtype=BF16, scale=size)
        stream = torch.zeros(1, QWEN3_06B.hidden, dtype=BF16, device=DEVICE)
        want = links64(links, x, stream)[0]
        chain(x, stream)
        check(f"inputs of {size}", stream, want)


def test_a_graph_replays_it() -> None:
    """Over and over with other inputs, beside launches that start early: the same numbers each time."""
    if MODE != "device":
        return
    chain = on_device(make_links(QWEN3_06B, bias=False, device=DEVICE))
    x, start = rand(1, QWEN3_06B.attended, dtype=BF16), rand(1, QWEN3_06B.hidden, dtype=BF16)
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
    assert len(results) == 1
    assert int(chain.counter) & 0x7FFFFFFF == 0


def launches_of(links: list[Link], x: Tensor, residual: Tensor) -> Callable[[], object]:
    """The same products as the engine launches them."""
    output, gate_up, down, qkv = links

    def run() -> Tensor:
        linear(x, output.weight, weight_scale=output.scale, residual=residual, out=residual)
        inner = linear(
            residual, gate_up.weight, weight_scale=gate_up.scale, norm=gate_up.norm, eps=EPS, gated=True
        )  # fmt: skip
        linear(inner, down.weight, weight_scale=down.scale, residual=residual, out=residual)
        return linear(residual, qkv.weight, weight_scale=qkv.scale, norm=qkv.norm, eps=EPS)

    return run


VARIANTS: dict[str, dict[str, Any]] = {
    "chain": {},
    "chain, without waits": {"waits": False},
    "chain, copies alone": {"waits": False, "multiplies": False},
}


def bench_product_chain() -> Iterator[Row]:
    """Microseconds of the products of a layer, everything twice."""
    if MODE == "compile":
        build(
            {
                f"{name}, {kind}": planned(sizes, replace(H200, **changes), bias=False)
                for name, sizes, _ in TIMED
                for kind, changes in VARIANTS.items()
            }
        )
    for name, sizes, copies in TIMED if MODE == "device" else ():
        layers = [make_links(sizes, bias=False, device=DEVICE) for _ in range(copies)]
        x, residual = rand(1, sizes.attended, dtype=BF16), rand(1, sizes.hidden, dtype=BF16)
        usual = [launches_of(links, x, residual) for links in layers]
        chains = {kind: [on_device(links, **changes) for links in layers] for kind, changes in VARIANTS.items()}
        with early(True):
            for _ in range(2):
                yield bandwidth(f"{name} fp8, launches", time_us(usual), sizes.weights)
                for kind, made in chains.items():
                    us = time_us([lambda chain=chain, x=x, r=residual: chain(x, r) for chain in made])
                    yield bandwidth(f"{name} fp8, {kind}", us, sizes.weights)
        del layers, usual, chains
