"""Products of experts in MXFP4: all three kernels against float64, and launch shapes in time."""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import patch

import torch
from gpu_harness import DEVICE, MODE, QUICK, Row, arithmetic, bandwidth, check, poisoned_outputs, rand, time_us
from torch import Tensor

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from penstock.engine.backends.cuda.kernels import moe_mxfp4, moe_one, moe_plan, mxfp4_one  # noqa: E402
from penstock.engine.backends.cuda.kernels.moe_mxfp4 import PlainConfig  # noqa: E402
from penstock.engine.backends.cuda.kernels.moe_route import Choice  # noqa: E402
from penstock.engine.backends.cuda.kernels.mxfp4_fragments import Mxfp4Fragments, fragments, stacked  # noqa: E402
from penstock.engine.backends.cuda.kernels.mxfp4_prompt import PromptConfig  # noqa: E402
from penstock.engine.backends.cuda.kernels.mxfp4_staged import StagedConfig  # noqa: E402
from penstock.engine.backends.cuda.kernels.mxfp4_stream import StreamConfig  # noqa: E402
from penstock.engine.backends.interface import ClampedSwiglu  # noqa: E402
from penstock.engine.loading.mxfp4 import Mxfp4, round_mxfp4  # noqa: E402

BF16 = torch.bfloat16
GATE = ClampedSwiglu(1.702, 7.0)


def _experts(count: int, out: int, inputs: int, paired: bool) -> tuple[Mxfp4Fragments, Tensor]:
    """A stack, and the weights themselves."""
    if MODE == "compile":
        tiles, steps = -(-out // 16), -(-inputs // 64)
        words = torch.empty(count, tiles, steps, 8, 4, 4, dtype=torch.int32)
        exponents = torch.empty(count, tiles, -(-steps // 4), 8, 2, 2, dtype=torch.int32)
        return Mxfp4Fragments(words, exponents, torch.empty(count, out), inputs, paired), torch.empty(0)
    weights = [round_mxfp4(rand(out, inputs, scale=inputs**-0.5)) for _ in range(count)]
    return stacked([fragments(one, paired=paired) for one in weights]), torch.stack([one.dense() for one in weights])


def _choices(tokens: int, top_k: int, experts: int) -> Tensor:
    if MODE == "compile":
        return torch.zeros(tokens, top_k, dtype=torch.int32)
    return torch.rand(tokens, experts, device=DEVICE).topk(top_k).indices.int()


def _schedule(chosen: Tensor, experts: int, few: bool) -> moe_plan.Plan | moe_plan.FewPairs:
    return moe_plan.FewPairs(chosen) if few else moe_plan.plan(chosen, experts)


Config = PlainConfig | StreamConfig | StagedConfig | PromptConfig


def _compare(
    experts: int, top_k: int, hidden: int, ffn: int, cases: tuple[tuple[int, bool, Config | None], ...]
) -> None:
    """Both products of a layer, for so many tokens, in order or few of them; the gated one without a gate too, if they
    are 64, as adapters ask for it."""
    gate_up, wide = _experts(experts, 2 * ffn, hidden, True)
    down, narrow = _experts(experts, hidden, ffn, False)
    bias, last = rand(experts, 2 * ffn, dtype=BF16, scale=0.3), rand(experts, hidden, dtype=BF16, scale=0.3)
    counters = torch.zeros(1024, dtype=torch.int32, device=DEVICE)
    for tokens, few, config in cases:
        chosen = _choices(tokens, top_k, experts)
        route, x = rand(tokens, top_k).abs(), rand(tokens, hidden, dtype=BF16)
        schedule, each = _schedule(chosen, experts, few), x.repeat_interleave(top_k, 0)
        with poisoned_outputs():
            inner = moe_mxfp4.grouped_linear(
                x, gate_up, bias, schedule, top_k, gated=True, activation=GATE, config=config
            )
            plain = None
            if tokens == 64 and isinstance(schedule, moe_plan.Plan):
                ordered = each if MODE == "compile" else each[schedule.order.long()]
                plain = moe_mxfp4.grouped_linear(ordered, gate_up, bias, schedule, top_k, gated=False, config=config)
            got = moe_mxfp4.grouped_linear(
                inner, down, last, schedule, top_k, gated=False, route_weights=route, counters=counters, config=config
            )
        if MODE == "compile":
            continue
        name = f"{experts}x{hidden}x{ffn} {tokens} tokens {config}"
        pairs = chosen.flatten().long()
        rows = torch.einsum("pk,pnk->pn", each[:80].double(), wide[pairs[:80]].double()) + bias[pairs[:80]].double()
        if plain is not None:
            check(name, plain[:80], rows, 1e-2)
        gate, up = rows.chunk(2, -1)
        gate, up = gate.clamp(max=GATE.limit), up.clamp(-GATE.limit, GATE.limit)
        want = gate * torch.sigmoid(GATE.alpha * gate) * (up + 1)
        found = inner if few else inner[schedule.order.long().argsort()]  # type: ignore[union-attr]
        check(name, found[:80], want, 1e-2)
        y = torch.einsum("pk,pnk->pn", found[:80].double(), narrow[pairs[:80]].double()) + last[pairs[:80]].double()
        y *= route.flatten()[:80, None].double()
        if few:
            check(name, got, y.view(tokens, top_k, -1).sum(1), 1e-2)
            assert not counters.any(), name
        else:
            check(name, got[:80], y, 1e-2)


def test_products_equal_float64() -> None:
    """Launch shapes as they are chosen; steps that end in the middle of a round, rows that end in the middle of a tile,
    empty experts, and some with more tokens than a tile."""
    if QUICK:  # Gluon has no interpreter
        _compare(6, 4, 96, 64, ((9, False, None), (3, True, None)))
        return
    _compare(32, 4, 2880, 288, tuple((tokens, tokens <= 16, None) for tokens in (1, 6, 13, 64, 150)))
    _compare(6, 4, 96, 64, ((40, False, StreamConfig(8, 4, 2, 1)), (64, False, StagedConfig(16, 1, 4, 4))))
    _compare(5, 2, 512, 160, ((5, True, StreamConfig(8, 1, 2, 8, 2)), (40, False, PlainConfig())))


def test_products_of_prompts_equal_float64() -> None:
    if QUICK:
        return
    _compare(32, 4, 2880, 288, ((300, False, None), (300, False, PromptConfig(128, 2, 8))))
    _compare(6, 4, 96, 64, ((64, False, PromptConfig(64, 2, 8)),))


def _visits(logits: Tensor, top_k: int, chooses: bool) -> tuple[moe_one.Visits, Tensor, Tensor]:
    """What one token with these scores chooses: for the kernels, its experts, and their weights in float64."""
    choice = Choice(top_k, normalize=True)
    weights, chosen = choice.outputs(1, DEVICE)
    if MODE == "compile":
        return moe_one.Visits(chosen, weights, False, logits if chooses else None, choice), chosen, weights
    best = logits.double().topk(top_k)
    want = best.values.softmax(-1)
    if chooses:
        return moe_one.Visits(chosen, weights, False, logits, choice), best.indices[0], want[0]
    return moe_one.Visits(best.indices.int(), want.float(), False), best.indices[0], want[0]


def test_one_token_equals_float64() -> None:
    """Shares that end past the last input, rows that end in the middle of a tile, a choice made by the kernel or before
    it, three visits, a residual stream, no biases; twice, since counters must be as before."""
    if QUICK:
        return
    counters = torch.zeros(2, dtype=torch.int32, device=DEVICE)
    cases = ((32, 4, 2880, 2880, True), (6, 3, 96, 160, False), (33, 4, 512, 64, True))
    for experts, top_k, hidden, ffn, chooses in cases:
        gate_up, wide = _experts(experts, 2 * ffn, hidden, True)
        down, narrow = _experts(experts, hidden, ffn, False)
        bias, last = rand(experts, 2 * ffn, dtype=BF16, scale=0.3), rand(experts, hidden, dtype=BF16, scale=0.3)
        for residual in (None, rand(1, hidden, dtype=BF16)):
            visits, chosen, weights = _visits(rand(1, experts), top_k, chooses)
            x = rand(1, hidden, dtype=BF16)
            biased = residual is not None or chooses
            before = None if residual is None else residual.clone()
            biases = (bias, last) if biased else (None, None)
            with poisoned_outputs():
                got = mxfp4_one.experts_of_one(
                    x, gate_up, biases[0], down, biases[1], visits, GATE, counters, residual=residual
                )
            if MODE == "compile":
                continue
            name = f"one token {experts}x{hidden}x{ffn} {chooses}"
            rows = torch.einsum("k,pnk->pn", x[0].double(), wide[chosen].double())
            gate, up = (rows + bias[chosen].double() if biased else rows).chunk(2, -1)
            gate, up = gate.clamp(max=GATE.limit), up.clamp(-GATE.limit, GATE.limit)
            inner = (gate * torch.sigmoid(GATE.alpha * gate) * (up + 1)).to(BF16).double()
            y = torch.einsum("pk,pnk->pn", inner, narrow[chosen].double())
            want = ((y + last[chosen].double() if biased else y) * weights[:, None]).sum(0, keepdim=True)
            if before is not None:
                assert got is residual, name
                want += before.double()
            check(name, got, want, 1e-2)
            assert not counters.any(), name


def test_every_code_is_exact() -> None:
    """All sixteen values at several powers of two, times one and minus three."""
    blocks = torch.arange(256, dtype=torch.uint8, device=DEVICE).repeat(64, 1)
    exponents = torch.arange(64, dtype=torch.uint8, device=DEVICE).view(-1, 1).expand(64, 16) * 2 + 60
    weight = Mxfp4(blocks, exponents.contiguous())
    x = torch.zeros(32, 512, dtype=BF16, device=DEVICE)
    x[torch.arange(32), torch.arange(32) * 16 + torch.arange(32) % 16] = 1.0
    x[::2] *= -3
    chosen = torch.zeros(32, 1, dtype=torch.int32, device=DEVICE)
    for paired in (True,) if QUICK else (False, True):
        stack = stacked([fragments(weight, paired=paired)])
        configs: tuple[Config, ...] = (
            StreamConfig(8, 1, 1, 1),
            StagedConfig(16, 1, 2, 1, 2, 0),
            PromptConfig(32, 1, 4),
        )
        for config in (PlainConfig(),) if QUICK else (PlainConfig(), *configs):
            with poisoned_outputs():
                plan = moe_plan.plan(chosen, 1)
                got = moe_mxfp4.grouped_linear(x, stack, None, plan, 1, gated=False, config=config)
            if MODE != "compile":
                want = x.double() @ weight.dense().double().T
                check(f"codes {config}", got, want.to(BF16).double(), 1e-6)


def _random(experts: int, out: int, inputs: int, paired: bool) -> Mxfp4Fragments:
    if MODE == "compile":
        return _experts(experts, out, inputs, paired)[0]
    tiles, steps = -(-out // 16), -(-inputs // 64)
    words = torch.randint(-(2**31), 2**31, (experts, tiles, steps, 8, 4, 4), device=DEVICE, dtype=torch.int32)
    exponents = torch.full((experts, tiles, -(-steps // 4), 8, 2, 2), -0x03040506, device=DEVICE, dtype=torch.int32)
    return Mxfp4Fragments(words, exponents, torch.full((experts, out), 2.0**-9, device=DEVICE), inputs, paired)


def _time(tokens: int, gated: bool, configs: Sequence[StreamConfig | StagedConfig | PromptConfig]) -> Iterator[Row]:
    """A layer of gpt-oss 20B."""
    stack = _random(32, 5760 if gated else 2880, 2880, gated)
    bias = rand(32, stack.outputs, dtype=BF16)
    counters = torch.zeros(1024, dtype=torch.int32, device=DEVICE)
    few = tokens <= 16
    drawn = [_choices(tokens, 4, 32) for _ in range(4 if few else 1)]
    orders = [_schedule(chosen, 32, few) for chosen in drawn]
    visited = sum(4 if MODE == "compile" else len(chosen.unique()) for chosen in drawn) / len(drawn)
    x = rand(tokens if gated else tokens * 4, 2880, dtype=BF16)
    route = None if gated else rand(tokens, 4)
    for config in configs:
        calls = [
            partial(
                moe_mxfp4.grouped_linear, x, stack, bias, order, 4, gated=gated, route_weights=route,
                activation=GATE, counters=counters, config=config, pdl=True,
            )
            for order in orders
        ]  # fmt: skip
        name = f"{'gate and up' if gated else 'down'}, {tokens} tokens: {_label(config)}"
        us = time_us(calls, repeats=7)
        if tokens > 128:
            yield arithmetic(name, us, 2.0 * tokens * 4 * 2880 * stack.outputs)
        else:
            yield bandwidth(name, us, visited * stack.nbytes / 32)


def _label(config: StreamConfig | StagedConfig | PromptConfig) -> str:
    tile = f"{config.tokens}x{config.rows} w{config.num_warps}"
    if isinstance(config, StreamConfig):
        return f"stream {tile} a{config.ahead} s{config.split}"
    if isinstance(config, StagedConfig):
        return f"staged {tile} a{config.ahead} s{config.stages} n{config.narrow} r{config.registers}"
    return f"prompt {tile} {'early' if config.early else 'late'} r{config.registers}"


def bench_one_token() -> Iterator[Row]:
    """A layer of gpt-oss 20B, with eight different choices."""
    gate_up, down = _random(32, 5760, 2880, True), _random(32, 2880, 2880, False)
    wide, narrow = rand(32, 5760, dtype=BF16), rand(32, 2880, dtype=BF16)
    x, residual = rand(1, 2880, dtype=BF16), rand(1, 2880, dtype=BF16)
    counters = torch.zeros(2, dtype=torch.int32, device=DEVICE)
    calls = [
        partial(
            mxfp4_one.experts_of_one, x, gate_up, wide, down, narrow, _visits(rand(1, 32), 4, True)[0], GATE, counters,
            residual=residual, pdl=True,
        )
        for _ in range(8)
    ]  # fmt: skip
    yield bandwidth("one token", time_us(calls * 8), (gate_up.nbytes + down.nbytes) / 8)


def bench_mxfp4() -> Iterator[Row]:
    """With the launch shapes that are chosen."""
    for tokens in (1, 8, 16, 64, 128, 512, 2048):
        for gated in (True, False):
            yield from _time(tokens, gated, [moe_mxfp4.choose(tokens * 4, 32, gated, tokens if tokens <= 16 else 0)])  # type: ignore[list-item]


def tune_some() -> Iterator[Row]:
    streams = [StreamConfig(16, 2, 4, 2, 1, 128), StreamConfig(16, 1, 4, 4, 1, 128)]
    for gated in (True, False):
        yield from _time(64, gated, streams)
        yield from _time(64, gated, [StagedConfig(*shape) for shape in STAGED])


STAGED = ((16, 2, 4, 2), (16, 2, 4, 4), (16, 1, 4, 4, 3, 8, 96), (16, 1, 4, 4, 3, 8, 80), (16, 1, 4, 4, 3, 0, 80))


def tune_prompt() -> Iterator[Row]:
    shapes = ((64, 2, 8), (64, 4, 8), (128, 1, 8), (256, 1, 8), (128, 2, 8, False), (64, 2, 4))
    for gated in (True, False):
        yield from _time(2048, gated, [PromptConfig(*shape) for shape in shapes])  # type: ignore[arg-type]


def test_one_launch_stays_away_from_a_multi_process_service() -> None:
    """Two of them that have half of a GPU each would wait forever."""
    fits, before = mxfp4_one._fits.__wrapped__, os.environ.get("CUDA_MPS_PIPE_DIRECTORY")
    with tempfile.TemporaryDirectory() as folder:
        os.environ["CUDA_MPS_PIPE_DIRECTORY"] = folder
        try:
            assert fits(torch.device(DEVICE), 132, 4, 32)
            Path(folder, "control").touch()
            assert not fits(torch.device(DEVICE), 132, 4, 32)
        finally:
            if before is None:
                del os.environ["CUDA_MPS_PIPE_DIRECTORY"]
            else:
                os.environ["CUDA_MPS_PIPE_DIRECTORY"] = before


def test_one_launch_is_no_larger_than_what_a_device_holds() -> None:
    """Programs that wait for one that has no place would wait forever: experts of gpt-oss 20B on devices whose
    multiprocessors have less shared memory than an H200's, and wide layers that need more of it."""
    fits = mxfp4_one._fits.__wrapped__

    def on(processors: int, shared: int, threads: int, programs: int, visits: int, staged: int, major: int = 9) -> bool:
        device = SimpleNamespace(
            major=major,
            multi_processor_count=processors,
            shared_memory_per_multiprocessor=shared,
            max_threads_per_multi_processor=threads,
        )
        with (
            patch.object(torch.cuda, "get_device_properties", lambda _: device),
            patch.object(mxfp4_one, "shares_processors", lambda: False),
        ):
            return fits(torch.device("cuda"), programs, visits, staged)

    assert on(132, 228 << 10, 2048, 360, 4, 32)
    assert not on(114, 228 << 10, 2048, 360, 4, 32)  # H100 PCIe
    assert not on(170, 100 << 10, 1536, 360, 4, 32, major=12)  # RTX 5090
    assert on(188, 100 << 10, 1536, 360, 4, 32, major=12)
    assert not on(132, 228 << 10, 2048, 360, 4, 32, major=8)
    assert not on(132, 228 << 10, 2048, 768, 2, 128)  # two experts of 12,288 inputs
    assert on(132, 228 << 10, 2048, 768, 2, 32)
    assert not on(132, 228 << 10, 2048, 1, 16, 8)


def test_prompts_have_a_kernel_on_every_device() -> None:
    """Other devices than Hopper do not have the instructions of the fastest one."""
    for pairs in (1, 300, 700, 4096, 1 << 20):
        for wide in (False, True):
            assert not isinstance(moe_mxfp4.choose(pairs, 32, wide, hopper=False), PromptConfig)
    assert isinstance(moe_mxfp4.choose(4096, 32, True), PromptConfig)
