"""Gated short convolutions against the plain implementation: decodes, draft tokens, prompts, mixes; engines with them.
Their captured steps are tested in `test_triton_state_graphs`."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import torch
from attention_cases import ops
from gpu_harness import (
    DEVICE,
    MODE,
    QUICK,
    TOLERANCE,
    Row,
    bandwidth,
    check,
    check_equal,
    check_rounded,
    checked_addresses,
    poison_,
    poisoned_outputs,
    programs_backwards,
    rand,
    time_us,
)
from state_cases import DECODES, VERIFIED, Run, batch_of, batch_on, engines_equal_the_cpu, moved
from torch import Tensor

from penstock.engine.backends.cuda.kernels import short_conv as kernels
from penstock.engine.backends.cuda.ops import TritonOps
from penstock.engine.backends.interface import AttentionBatch, ShortConvWeights
from penstock.engine.backends.reference.short_conv import short_conv as plain


@dataclasses.dataclass(frozen=True, slots=True)
class Size:
    channels: int
    width: int
    bias: bool = True


SMALL = Size(40, 3)
"""No multiple of a program's channels."""
REAL = Size(2048, 3, bias=False)
"""Of LFM2-1.2B and LFM2-8B-A1B."""
SIZES = (
    (SMALL, Size(136, 4), Size(16, 2), Size(24, 5)) if QUICK else (SMALL, Size(300, 4), Size(64, 2), Size(72, 5), REAL)
)
DTYPES = torch.float32, torch.bfloat16, torch.float16
TOLERANCES = TOLERANCE


@dataclasses.dataclass(frozen=True, slots=True)
class Case:
    size: Size
    weights: ShortConvWeights
    projected: Tensor
    batch: AttentionBatch
    conv: Tensor

    def on(self, device: torch.device | str) -> Case:
        weights = ShortConvWeights(moved(self.weights.taps, device), moved(self.weights.bias, device))
        batch = batch_on(self.batch, device)
        return Case(self.size, weights, moved(self.projected, device), batch, moved(self.conv, device))


def build(size: Size, runs: list[Run], dtype: torch.dtype, slots: int = 12) -> Case:
    weights = ShortConvWeights(
        taps=rand(size.width, size.channels, scale=0.6),
        bias=rand(size.channels) if size.bias else torch.zeros(size.channels, device=DEVICE),
    )
    batch = batch_of(runs)
    projected = rand(len(batch.positions), 3 * size.channels, dtype=dtype)
    conv = rand(slots, size.width, size.channels, dtype=dtype)
    return Case(size, weights, projected, batch, conv)


def call(case: Case) -> Tensor:
    return ops.short_conv(case.projected, case.weights, case.batch, case.conv)


def plain_call(case: Case) -> Tensor:
    """It writes what nobody keeps to slot 0."""
    none = case.conv[0].clone()
    out = plain(case.projected, case.weights, case.batch, case.conv)
    case.conv[0] = none
    return out


def compare(name: str, case: Case) -> None:
    poison_(case.conv[0])  # stands for none
    theirs = case.on("cpu") if MODE != "compile" else case
    before = case.conv.clone()
    with poisoned_outputs(), checked_addresses(kernels):
        got = call(case)
    if MODE == "compile":
        return
    check(f"{name} out", got, plain_call(theirs), TOLERANCES[got.dtype])
    check_rounded(f"{name} inputs", case.conv[1:], theirs.conv[1:])
    assert case.batch.states is not None
    kept = [slot for slot in range(1, len(before)) if slot not in set(case.batch.states.writes.tolist())]
    check_equal(f"{name} other inputs", case.conv[kept], before[kept])
    assert bool(case.conv[0].isnan().all()), f"{name}: slot 0 is written"


def compare_in_any_order(name: str, case: Case) -> None:
    again = case.on(DEVICE)
    compare(name, case)
    with programs_backwards():
        compare(f"{name} backwards", again)


IN_PLACE = [Run(33, 2, 3, (3,), False), Run(3, 20, 1, (1,), False), Run(9, 1, 2, (2,), False)]
"""Chunks that go on in the slot that they read: shorter than what a token sees, longer, a single token."""
ELSEWHERE = [
    Run(0, 75, 0, (2,), False),
    Run(0, 1, 0, (9,), False),
    Run(1, 130, 4, (10,), False),
    Run(0, 2, 0, (11,), False),
]


def test_decodes_and_draft_tokens() -> None:
    for size in SIZES:
        for dtype in DTYPES:
            compare(f"drafts {size} {dtype}", build(size, DECODES + VERIFIED, dtype))


def test_many_decodes() -> None:
    """Of all beginnings, some in a slot of their own."""
    count, size = (33, SMALL) if QUICK else (256, REAL)
    runs = [Run(i, 1, i + 1 if i else 0, (i + 1 if i % 3 else count + i + 1,), True) for i in range(count)]
    for dtype in DTYPES:
        compare(f"many {dtype}", build(size, runs, dtype, slots=2 * count + 1))


def test_prompts() -> None:
    for size in SIZES:
        for dtype in DTYPES:
            compare(f"alone {size} {dtype}", build(size, ELSEWHERE[:1], dtype))
            compare(f"in place {size} {dtype}", build(size, IN_PLACE, dtype))
            compare(f"mixed {size} {dtype}", build(size, [*DECODES[:1], *VERIFIED, *ELSEWHERE, IN_PLACE[0]], dtype))


def test_chunks_begin_anywhere_in_a_program() -> None:
    """A run's first tokens see what was kept, and its last one replaces it: a chunk before it moves both from place to
    place, over the border between two programs."""
    for width in (3, 4):
        for before in range(10, 18):
            for length in (1, 2, 3, 4, 15):
                runs = [Run(0, before, 0, (1,), False), Run(21, length, 2, (2,), False), Run(6, 3, 4, (4,), False)]
                compare_in_any_order(f"{width} {before} {length}", build(Size(16, width), runs, torch.float32))


def test_a_run_of_single_tokens_may_be_written_where_it_was_read() -> None:
    """Deterministic mode: a chunk of a prompt is computed as decodes."""
    for size in SIZES[:2] if QUICK else SIZES:
        for length in (1, 2, 3, 9):
            runs = [Run(6, length, 1, (1,), True), Run(3, 1, 2, (2,), True), Run(0, length, 0, (3,), True)]
            compare_in_any_order(f"{size} {length}", build(size, runs, torch.float32))


def test_padding_is_zero_and_writes_nothing() -> None:
    for beside in ([], [Run(0, 75, 0, (9,), False)]):
        case = build(SMALL, [*DECODES, *beside], torch.float32)
        states = case.batch.states
        assert states is not None
        for part in (states.first, states.last, states.reads, states.writes):
            part[1 : len(DECODES)] = 0
        before = case.conv.clone()
        with poisoned_outputs():
            got = call(case)
        if MODE != "compile":
            assert bool((got[1 : len(DECODES)] == 0).all()) and bool(got.isfinite().all())
            for slot in (2, 4):
                check_equal(f"slot {slot}", case.conv[slot], before[slot])


def test_the_same_bits_wherever_a_run_is_cut() -> None:
    """As one chunk, in chunks, token by token; alone and beside others."""
    if MODE == "compile":
        return
    for dtype in (torch.float32, torch.bfloat16):
        whole = build(SMALL, [Run(0, 40, 0, (1,), False)], dtype)
        expected, at_end = call(whole), whole.conv[1]
        for cut in ([1] * 40, [7, 1, 2, 30], [16, 24], [39, 1]):
            start, found, conv = 0, [], rand(10, SMALL.width, SMALL.channels, dtype=dtype)
            for length in cut:
                other = build(SMALL, [Run(4, 1, 2, (2,), True), Run(4, 19, 3, (3,), False)], dtype)
                runs = [Run(4, 1, 2, (2,), True), Run(start, length, 1 if start else 0, (1,), length == 1)]
                if length != 1:
                    runs.append(Run(4, 18, 3, (3,), False))
                part = whole.projected[start : start + length]
                rows = torch.cat([other.projected[:1], part, other.projected[1 : 1 + (18 if length != 1 else 0)]])
                case = dataclasses.replace(whole, projected=rows, batch=batch_of(runs), conv=conv)
                found.append(call(case)[1 : 1 + length])
                start += length
            check_equal(f"{dtype} {cut}", torch.cat(found), expected)
            # Of the ring only what the next token sees.
            seen = [(start - back) % SMALL.width for back in range(1, SMALL.width)]
            check_equal(f"{dtype} {cut} inputs", conv[1][seen], at_end[seen])


def test_programs_that_start_early() -> None:
    """Between kernels that write what it reads and read what it writes: the same bits."""
    if MODE == "interpret":
        return
    early = TritonOps(DEVICE, pdl=MODE == "compile" or torch.cuda.get_device_capability()[0] >= 9)

    def step(of: TritonOps, cases: list[Case]) -> list[Tensor]:
        outs = []
        for case in cases:
            rows = of.rms_norm(case.projected, None, 1e-6)
            out = of.short_conv(rows, case.weights, case.batch, case.conv)
            outs.append(of.rms_norm(out, None, 1e-6))
        return outs

    beside_decodes = [Run(0, 75, 0, (9,), False), Run(1, 130, 10, (11,), False), Run(0, 2, 0, (12,), False)]
    for runs in (DECODES + VERIFIED, DECODES + beside_decodes):
        cases = [build(REAL, runs, torch.bfloat16, slots=13) for _ in range(6)]
        others = [case.on(DEVICE) for case in cases]
        for place, (got, want) in enumerate(zip(step(early, cases), step(ops, others), strict=True)):
            check_equal(f"layer {place}", got, want)
            check_equal(f"inputs of layer {place}", cases[place].conv[1:], others[place].conv[1:])


LFM2 = {
    "model_type": "lfm2", "vocab_size": 199, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 4,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 1024,
    "layer_types": ["conv", "full_attention", "conv", "conv"], "conv_L_cache": 3, "block_auto_adjust_ff_dim": False,
}  # fmt: skip
LFM2_MOE = {
    **{key: value for key, value in LFM2.items() if key != "block_auto_adjust_ff_dim"}, "model_type": "lfm2_moe",
    "num_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 32, "num_dense_layers": 1,
    "conv_L_cache": 4, "conv_bias": True,
}  # fmt: skip


def test_engines_with_short_convs_equal_the_cpu() -> None:
    if MODE == "device":
        engines_equal_the_cpu(LFM2, embedding_scale=0.3)


def test_engines_with_short_convs_and_experts_equal_the_cpu() -> None:
    if MODE == "device":
        engines_equal_the_cpu(LFM2_MOE, embedding_scale=0.3)


def bench_short_conv() -> Iterator[Row]:
    """Beside it, in microseconds, what its bytes take at 4.8 TB/s, and the plain implementation in PyTorch."""
    steps = [
        (f"decode b{count}", [Run(9, 1, i + 1, (i + 1,), True) for i in range(count)]) for count in (1, 8, 64, 256)
    ]
    steps += [(f"prompt {length}", [Run(0, length, 0, (1,), False)]) for length in (64, 512, 8192)]
    steps.append(("mixed 64 + 512", [*steps[2][1], Run(0, 512, 0, (65,), False)]))
    for name, runs in steps:
        slots = 1 + max(slot for run in runs for slot in run.writes)
        cases = [build(REAL, runs, torch.bfloat16, slots=slots) for _ in range(4)]
        reads, writes = sum(run.read > 0 for run in runs), len(runs)
        tokens = len(cases[0].projected)
        # A row of projections and one of the result; of the ring what a token sees, and what it leaves.
        moved = 2 * REAL.channels * (4 * tokens + (REAL.width - 1) * (reads + writes))
        us = time_us([lambda c=c: call(c) for c in cases])
        yield bandwidth(f"short conv {name}, {moved / 4.8e6:.1f} us for its bytes", us, moved)
        if MODE == "device":
            us = time_us([lambda c=c: plain(c.projected, c.weights, c.batch, c.conv) for c in cases])
            yield bandwidth(f"short conv {name}, in PyTorch", us, moved)
