"""The products between two attentions in one launch of CUDA C++: how they are laid out over a device, when there is no
such launch, and what the kernel computes (emulated)."""

from __future__ import annotations

import ctypes
import shutil
from dataclasses import replace

import pytest
import torch

from penstock.engine.backends.cuda.kernels.chain_plan import ENTRY, SOURCE, ChainShape, plan_chain
from penstock.engine.backends.interface import FP8, Link
from tests.gpu.chain_cases import BF16, LLAMA_8B, LLAMA_70B, QWEN3_06B, TOLERANCE, Sizes, links64, make_links
from tests.gpu.cuda_emulation import emulate, guarded

H200 = ChainShape(132)
META = torch.device("meta")
SIZES = (LLAMA_8B, LLAMA_70B, QWEN3_06B, Sizes(192, 544, 192, 320), Sizes(64, 80, 64, 96))


@pytest.mark.parametrize("sizes", SIZES)
def test_warps_have_nearly_equal_shares(sizes: Sizes) -> None:
    """Units that a warp goes through, beside those that there are; every row is read from end to end."""
    links = make_links(sizes, bias=False, device=META)
    for shape in (H200, replace(H200, warps=8)):
        plan = plan_chain(links, shape)
        assert plan is not None and plan.shared_bytes <= 227 << 10
        for link, one in zip(links, plan.links, strict=True):
            units = -(-one.inputs // 512)
            assert (one.inputs, one.outputs) == (link.inputs, link.outputs)
            assert one.slices * one.columns >= units > one.slices * (one.columns - 1)
            rows = -(-one.outputs // shape.blocks)
            groups = shape.warps // one.slices
            slots = shape.warps * one.columns * -(-rows // (4 * groups)) * 4
            if rows * units >= 16 * shape.warps:
                assert slots <= 1.35 * rows * units


def test_what_the_kernel_is_built_with_and_given() -> None:
    plan = plan_chain(make_links(LLAMA_8B, bias=True, device=META), H200)
    assert plan is not None
    assert plan.defines["CHAIN"] == (
        "Link<4096,4096,8,RESIDUAL|BIAS>,Link<4096,14336,8,NORM|GATED|BIAS>,"
        "Link<14336,4096,16,RESIDUAL|BIAS>,Link<4096,6144,8,NORM|BIAS>"
    )
    links = make_links(Sizes(32, 48, 16, 64), bias=True, device=torch.device("cpu"))
    small = plan_chain(links, ChainShape(2, 2, 2))
    x, residual, counter = torch.zeros(1, 16), torch.zeros(1, 32), torch.zeros(1)
    outs = [None, torch.zeros(1, 48), None, torch.zeros(1, 64)]
    assert small is not None
    given = small.arguments(links, x, residual, outs, counter)
    assert ctypes.sizeof(given) == 3 * 8 + 4 * 40 + 5 * 24
    parts = given.parts  # type: ignore[attr-defined]
    assert parts[2].weight - parts[1].weight == 48 * 32 and [part.outputs for part in parts] == [32, 48, 48, 32, 64]


def test_other_products_have_no_chain() -> None:
    links = make_links(Sizes(64, 80, 64, 96), bias=True, device=META)
    assert plan_chain(links, H200) is not None
    assert plan_chain([], H200) is None
    output, gate_up, down, qkv = links
    scale = torch.ones(64, device=META)
    for other in (
        [replace(output, weight=output.weight.to(BF16), scale=None)],  # measured: no faster than launches
        [replace(output, scale=None)],
        [replace(output, bias=torch.zeros(64))],
        [replace(gate_up, norm=torch.zeros(64))],
        [Link(torch.empty(64, 72, dtype=FP8, device=META), scale)],  # rows that begin between multiples of 16 bytes
        # Shorter than what the kernel would read.
        [replace(output, scale=torch.ones(1))],
        [replace(output, bias=torch.zeros(63, dtype=BF16))],
        [replace(gate_up, norm=torch.zeros(63, dtype=BF16))],
        [output, down],  # which reads what nobody wrote
        [gate_up, qkv, down],
        [output, make_links(Sizes(80, 80, 64, 96), bias=True, device=META)[1]],  # of another residual stream
        [Link(torch.empty(64, 1 << 20, dtype=FP8, device=META), scale)],  # more inputs than registers
    ):
        assert plan_chain(other, H200) is None


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("g++") is None, reason="the emulation is compiled with g++")
@pytest.mark.parametrize(
    ("sizes", "shape", "bias"),
    [
        (Sizes(256, 688, 128, 320), ChainShape(3, 4, 3), True),
        (Sizes(528, 272, 1040, 48), ChainShape(5, 4, 2), False),
        (Sizes(64, 80, 64, 96), ChainShape(70, 2, 2), True),
        (Sizes(64, 5136, 64, 96), ChainShape(2, 8, 4), False),
    ],
)
def test_products_are_those_of_float64(sizes: Sizes, shape: ChainShape, bias: bool) -> None:
    """Whichever thread runs first, launch after launch."""
    torch.manual_seed(3)
    links = make_links(sizes, bias=bias, device=torch.device("cpu"), keep=guarded)
    plan = plan_chain(links, shape)
    assert plan is not None
    kernel = emulate(SOURCE, ENTRY, defines=plan.defines)
    counter = torch.zeros(1, dtype=torch.int32)
    for seed in range(3):
        x, residual = guarded(torch.randn(1, sizes.attended).to(BF16)), torch.randn(1, sizes.hidden).to(BF16) * 3
        stream = guarded(residual)
        outs = [
            None if link.residual else guarded(torch.full((1, link.outputs), float("nan"), dtype=BF16))
            for link in plan.links
        ]
        kernel.launch(
            shape.blocks, shape.warps * 32, [plan.arguments(links, x, stream, outs, counter)],
            shared_bytes=plan.shared_bytes, cooperative=True, seed=seed,
        )  # fmt: skip
        for got, want in zip((stream, outs[-1]), links64(links, x, residual), strict=True):
            assert got is not None
            assert float((got.double() - want).norm() / want.norm()) < TOLERANCE
    assert int(counter) & 0x7FFFFFFF == 0


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("g++") is None, reason="the emulation is compiled with g++")
def test_inputs_of_any_size() -> None:
    """Tensor cores multiply e4m3 weights by float16 inputs, which have to be brought into its range."""
    torch.manual_seed(5)
    links = make_links(Sizes(64, 80, 528, 96), bias=False, device=torch.device("cpu"))[:1]
    plan = plan_chain(links, ChainShape(2, 2, 2))
    assert plan is not None
    kernel = emulate(SOURCE, ENTRY, defines=plan.defines)
    for size in (1e-30, 1e-20, 1e-3, 3e5, 1e20, 0.0):
        x, residual = (torch.randn(1, 528) * size).to(BF16), torch.zeros(1, 64, dtype=BF16)
        want, _ = links64(links, x, residual)
        kernel.launch(
            2, 64, [plan.arguments(links, x, residual, [None], torch.zeros(1, dtype=torch.int32))],
            shared_bytes=plan.shared_bytes, cooperative=True,
        )  # fmt: skip
        assert float((residual.double() - want).norm()) <= TOLERANCE * float(want.norm()), size
