"""Chains of products with a layer of experts in them: how they are laid out over a device, when there is no such
launch, how experts are chosen, and what the kernel computes (emulated)."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch

from penstock.engine.backends.cuda.kernels.chain_plan import ENTRY, SOURCE, ChainShape, plan_chain
from penstock.engine.backends.cuda.kernels.mxfp4_fragments import fragments, stacked
from penstock.engine.backends.cuda.kernels.mxfp4_rows import Mxfp4Rows, row_bytes, rows_of
from penstock.engine.backends.interface import AnyLink, ExpertChoice, ExpertLinks
from penstock.engine.loading.mxfp4 import round_mxfp4
from penstock.engine.models.layers.experts import Router
from tests.gpu.cuda_emulation import emulate, guarded
from tests.gpu.expert_chain_cases import (
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

H200 = ChainShape(132)
META = torch.device("meta")
REAL = (QWEN3_30B, DEEPSEEK_LITE, QWEN3_NEXT, GPT_OSS)
CHOICES = {
    "softmax": ExpertChoice(3, False),
    "normalized": ExpertChoice(5, True, scale=1.5),
    "sigmoid": ExpertChoice(5, True, sigmoid=True),
    "corrected": ExpertChoice(3, True, sigmoid=True, correction=torch.linspace(-0.3, 0.3, 40)),
    "corrected softmax": ExpertChoice(4, False, correction=torch.linspace(0.1, -0.1, 40)),
    "groups": ExpertChoice(5, False, groups=4, top_groups=2, scale=16.0),
    "best two of groups": ExpertChoice(
        7,
        True,
        sigmoid=True,
        correction=torch.linspace(-0.2, 0.2, 40),
        groups=8,
        top_groups=3,
        best_two=True,
        scale=2.5,
    ),
}


@pytest.mark.parametrize("sizes", REAL)
@pytest.mark.parametrize("fp8", [True, False])
def test_warps_have_nearly_equal_shares(sizes: ExpertSizes, fp8: bool) -> None:
    """Units that a warp goes through in a chain, beside those that there are."""
    links = make_expert_chain(sizes, fp8=fp8, device=META)
    plan = plan_chain(links, H200)
    assert plan is not None and plan.shared_bytes <= 160 << 10
    slots = read = 0
    for one in plan.links:
        rows, groups = -(-one.rows // H200.blocks), H200.warps // one.slices
        slots += H200.warps * one.columns * -(-rows // (4 * groups)) * 4 * (2 if one.gated else 1)
        units = -(-one.row_bytes // 512) * (one.visits if one.role.value == "SUM" else 1)
        units += -(-one.width * (1 if one.fp8 else 2) // 512)
        assert one.slices * one.columns >= units > one.slices * (one.columns - 1)
        read += one.rows * units * (2 if one.gated else 1)
    assert slots * H200.blocks <= 1.4 * read


def test_what_the_kernel_is_built_with_and_given() -> None:
    plan = plan_chain(make_expert_chain(QWEN3_NEXT, fp8=False, device=META), H200)
    assert plan is not None and plan.defines["CHAIN"] == (
        "Link<4096,2048,16,RESIDUAL>,Link<2048,512,8,NORM|GATES|WIDE|SCORES>,Link<2048,512,8,NORM|GATED|GATES|WIDE|SHARED>,"
        "Link<2048,512,8,NORM|GATED|WIDE|EACH>,Link<512,2048,8,RESIDUAL|SUM,512>,Link<2048,12352,8,NORM|WIDE>"
    )
    assert (plan.defines["EXPERTS"], plan.defines["TOP_K"], plan.defines["FACTOR"]) == (512, 10, "1.0f")
    sizes = ExpertSizes(64, 48, 96, 16, 32, ExpertChoice(3, True), shared=80)
    links = make_expert_chain(sizes, fp8=False, device=torch.device("cpu"))
    small = plan_chain(links, ChainShape(2, 4, 2))
    assert small is not None
    outs = small.outs(lambda count, dtype: torch.zeros(count, dtype=dtype), BF16)
    _, scores, shared, each, _, entry = outs
    assert scores is not None and shared is not None and each is not None and entry is not None
    assert (scores.dtype, len(scores), len(shared), len(each), len(entry)) == (torch.float32, 16, 80, 96, 96)
    assert shared.data_ptr() - each.data_ptr() == 96 * 2  # one vector, which the next product reads
    given: Any = small.arguments(links, torch.zeros(1), torch.zeros(1), outs, torch.zeros(1))
    experts: Any = links[1]
    parts = given.parts
    assert [part.kind for part in parts] == [0, 0, 0, 0, 2, 2, 3, 0]
    assert parts[5].weight - parts[4].weight == 32 * 64 * 2 and parts[4].expert_bytes == 2 * 32 * 64 * 2
    assert (parts[6].weight, parts[6].shared) == (experts.down.data_ptr(), experts.shared_down.data_ptr())
    assert (parts[6].expert_bytes, parts[6].row_bytes, parts[6].shared_bytes) == (64 * 32 * 2, 32 * 2, 80 * 2)


def test_other_experts_have_no_chain() -> None:
    sizes = ExpertSizes(128, 64, 96, 16, 80, ExpertChoice(3, True), shared=80, gate=True)
    output, experts, entry = make_expert_chain(sizes, fp8=False, device=META)
    assert isinstance(experts, ExpertLinks) and plan_chain([output, experts, entry], H200) is not None
    assert plan_chain([output, experts], H200) is not None and plan_chain([experts], H200) is not None
    for change in (
        {"gate_up": experts.gate_up.half()},
        {"gate_up": experts.gate_up[:, :96].contiguous(), "down": experts.down[..., :48].contiguous()},  # few rows
        {"down": experts.down[..., :64].contiguous()},
        {"router": experts.router.float()},
        {"norm": experts.norm.half()},
        {"shared_down": None},
        {"shared_gate_up": None, "shared_down": None},  # and yet a gate for it
        {"shared_gate": experts.shared_gate.float() if experts.shared_gate is not None else None},
        {"choice": replace(experts.choice, top_k=32)},
        {"choice": replace(experts.choice, groups=3)},
        {"choice": replace(experts.choice, correction=torch.zeros(16, dtype=BF16, device=META))},
        # Shorter than what the kernel would read.
        {"choice": replace(experts.choice, correction=torch.zeros(15, device=META))},
        {"router_bias": torch.zeros(15, dtype=BF16, device=META)},
        {"gate_up_bias": torch.zeros(16, 80, dtype=BF16, device=META)},
        {"down_bias": torch.zeros(128, dtype=BF16, device=META)},
    ):
        other: list[AnyLink] = [output, replace(experts, **change), entry]  # type: ignore[arg-type]
        assert plan_chain(other, H200) is None, change
    output, experts, entry = make_expert_chain(sizes, fp8=True, device=META)
    assert isinstance(experts, ExpertLinks) and plan_chain([output, experts, entry], H200) is not None
    for name in ("gate_up_scale", "down_scale", "shared_gate_up_scale", "shared_down_scale"):
        one: list[AnyLink] = [output, replace(experts, **{name: torch.zeros(1, device=META)}), entry]
        assert plan_chain(one, H200) is None, name
    assert plan_chain([output, experts, experts], H200) is None  # one choice to a chain
    assert plan_chain([output, experts, replace(entry, norm=None)], H200) is None  # which reads what nobody wrote


@pytest.mark.parametrize("name", CHOICES)
def test_a_choice_is_that_of_the_router(name: str) -> None:
    choice = CHOICES[name]
    generator = torch.Generator().manual_seed(7)
    for _ in range(20):
        scores = torch.randn(1, 40, generator=generator) * 2
        router = Router(
            linear=_Identity(),
            top_k=choice.top_k,
            normalize=choice.normalize,
            scoring="sigmoid" if choice.sigmoid else "softmax",
            bias=choice.correction,
            groups=choice.groups,
            top_groups=choice.top_groups,
            group_score="best_two" if choice.best_two else "best",
            scale=choice.scale,
        )
        expected, experts = router(scores)
        weights, chosen = choice(scores[0])
        assert chosen.tolist() == experts[0].tolist()
        torch.testing.assert_close(weights, expected[0])


class _Identity:
    weight_bytes = 0

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return x


def test_experts_in_mxfp4() -> None:
    """Rows of units of 960 inputs; only tensor cores multiply them."""
    links = pack_shape(make_expert_chain(GPT_OSS, fp8=False, bias=True, device=META), GPT_OSS_GATE)
    plan = plan_chain(links, H200)
    assert plan is not None and plan.defines["CHAIN"] == (
        "Link<4096,2880,16,RESIDUAL|BIAS>,Link<2880,32,16,NORM|BIAS|SCORES>,Link<2880,2880,4,FP4|NORM|GATED|BIAS|EACH>,"
        "Link<2880,2880,16,FP4|RESIDUAL|BIAS|SUM>,Link<2880,5120,16,NORM|BIAS>"
    )
    assert (plan.defines["ALPHA"], plan.defines["LIMIT"]) == ("1.702f", "7.0f")
    assert [link.row_bytes for link in plan.links[2:4]] == [1536, 1536]
    assert plan_chain(links, replace(H200, tensor=False)) is None
    output, experts, entry = links
    assert isinstance(experts, ExpertLinks)
    for change in ({"down_scale": None}, {"down": experts.down[..., :1024].contiguous()}, {"down": experts.gate_up}):
        other: list[AnyLink] = [output, replace(experts, **change), entry]  # type: ignore[arg-type]
        assert plan_chain(other, H200) is None, change


@pytest.mark.parametrize(("out", "inputs", "paired"), [(20, 992, False), (48, 1056, True), (24, 2880, True)])
def test_mxfp4_in_rows_is_the_same_weights(out: int, inputs: int, paired: bool) -> None:
    torch.manual_seed(1)
    spread = torch.randn(2, out, inputs // 32, 1).exp().expand(-1, -1, -1, 32).reshape(2, out, inputs)
    weights = [round_mxfp4(one) for one in torch.randn(2, out, inputs) * spread]
    rows = rows_of(stacked([fragments(one, paired=paired) for one in weights]))
    assert rows.units.shape == (2, out, row_bytes(inputs))
    expected = torch.stack([one.dense() for one in weights])
    assert torch.equal(_dense(rows, inputs), expected)
    rows.put(0, fragments(weights[1], paired=paired))
    assert torch.equal(_dense(rows, inputs), expected[1].expand(2, -1, -1))


def _dense(rows: Mxfp4Rows, inputs: int) -> torch.Tensor:
    """As the kernel unpacks it."""
    units = rows.units.view(*rows.scale.shape, -1, 512)
    words = units[..., :480].contiguous().view(torch.int32).long().bitwise_and_(0xFFFFFFFF)
    first, second = words.view(*units.shape[:-1], 30, 2, 2).unbind(-1)
    every, upper, lower = 0x81C081C0, 0x81008100, 0x00C000C0
    pairs = (
        first << 6 & every, first << 2 & every, (first << 12 | first >> 20) & every,
        second << 4 & every, second & every, (second << 10 | second >> 22) & every,
        (first << 1 & upper) | (second >> 3 & lower), (first & upper) | (second << 6 & lower),
    )  # fmt: skip
    halves = torch.stack([pair >> shift & 0xFFFF for pair in pairs for shift in (0, 16)], -1)
    values = (halves << 16).to(torch.int32).view(torch.float32) * 2.0**126
    powers = torch.ldexp(torch.ones(()), (units[..., 480:510].int() - 253).float()).view(*units.shape[:-1], 30, 1, 1)
    found = (values * powers).flatten(2)[..., :inputs]
    assert not units[..., 510:].any()
    return found * rows.scale.unsqueeze(-1)


def _launch(sizes: ExpertSizes, shape: ChainShape, *, fp8: bool, bias: bool, seeds: int, fp4: bool = False) -> None:
    """Whichever thread runs first, launch after launch. `fp4`: experts in MXFP4, with a clamped gate."""
    torch.manual_seed(3)
    links = make_expert_chain(sizes, fp8=fp8, bias=bias, device=torch.device("cpu"), keep=guarded)
    wide: Sequence[AnyLink] = links
    if fp4:
        links, wide = pack(links, GPT_OSS_GATE, guarded)
    plan = plan_chain(links, shape)
    assert plan is not None
    kernel = emulate(SOURCE, ENTRY, defines=plan.defines)
    counter = torch.zeros(1, dtype=torch.int32)
    for seed in range(seeds):
        x, residual = guarded(torch.randn(1, sizes.attended).to(BF16)), torch.randn(1, sizes.hidden).to(BF16) * 2
        stream = guarded(residual)
        outs = plan.outs(lambda count, dtype: guarded(torch.full((count,), float("nan"), dtype=dtype)), BF16)
        kernel.launch(
            shape.blocks, shape.warps * 32, [plan.arguments(links, x, stream, outs, counter)],
            shared_bytes=plan.shared_bytes, cooperative=True, seed=seed,
        )  # fmt: skip
        scores, out = outs[1], outs[-1]
        assert scores is not None and out is not None
        if sizes.ties:
            assert torch.equal(scores[::2], scores[1::2])
        want_stream, want_out, exact = expert_chain64(wide, x, residual, scores)
        for got, want in ((scores[None], exact[None]), (stream, want_stream), (out[None], want_out)):
            assert float((got.double() - want).norm() / want.norm()) < TOLERANCE
        added = stream.double() - residual.double(), want_stream - residual.double()
        assert float((added[0] - added[1]).norm() / added[1].norm()) < 2 * TOLERANCE
    assert int(counter) & 0x7FFFFFFF == 0


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("g++") is None, reason="the emulation is compiled with g++")
@pytest.mark.parametrize("name", CHOICES)
def test_every_choice_with_ties(name: str) -> None:
    """Experts have equal scores in pairs, of which the choice takes one; so the first of them, in every block."""
    sizes = ExpertSizes(64, 48, 32, 40, 32, CHOICES[name], ties=True)
    _launch(sizes, ChainShape(3, 2, 2, tensor=False), fp8=False, bias=True, seeds=4)


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("g++") is None, reason="the emulation is compiled with g++")
@pytest.mark.parametrize(
    ("sizes", "shape", "fp8"),
    [
        (ExpertSizes(256, 128, 320, 24, 144, ExpertChoice(4, True)), ChainShape(3, 4, 3), True),
        (ExpertSizes(528, 272, 48, 16, 272, ExpertChoice(3, False), shared=560, gate=True), ChainShape(5, 4, 2), False),
        (ExpertSizes(64, 64, 16, 24, 48, ExpertChoice(9, True), shared=16, gate=True), ChainShape(30, 2, 4), True),
        (ExpertSizes(1040, 64, 96, 8, 64, ExpertChoice(2, True), shared=96, wide=True), ChainShape(2, 8, 4), False),
        (ExpertSizes(64, 2064, 48, 8, 1040, ExpertChoice(3, True), wide=True), ChainShape(4, 4, 6), True),
    ],
)  # fmt: skip
def test_products_are_those_of_float64(sizes: ExpertSizes, shape: ChainShape, fp8: bool) -> None:
    """Copies that stop before the first product of this block, within it, and behind it; rows that are no whole units;
    rows of two visits in one stage; blocks without rows."""
    _launch(sizes, shape, fp8=fp8, bias=not fp8, seeds=3)


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("g++") is None, reason="the emulation is compiled with g++")
@pytest.mark.parametrize(
    ("sizes", "shape"),
    [
        (ExpertSizes(1056, 64, 96, 8, 96, ExpertChoice(3, True)), ChainShape(3, 4, 3)),
        (ExpertSizes(64, 64, 96, 8, 1024, ExpertChoice(2, True), ties=True), ChainShape(5, 4, 2)),
    ],
)
def test_experts_in_mxfp4_are_those_of_float64(sizes: ExpertSizes, shape: ChainShape) -> None:
    """Powers are copied by two lanes for all; biases, and a gate that is clamped."""
    _launch(sizes, shape, fp8=False, bias=True, seeds=3, fp4=True)
