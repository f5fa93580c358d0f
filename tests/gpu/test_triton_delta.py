"""Gated delta nets against the plain implementation: decodes, draft tokens, prompts, mixes; engines with them."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import torch
from attention_cases import build as attention_case
from attention_cases import layout as head_layout
from attention_cases import ops
from gpu_harness import (
    DEVICE,
    MODE,
    QUICK,
    Row,
    bandwidth,
    check,
    check_equal,
    poisoned_outputs,
    rand,
    time_us,
)
from state_cases import DECODES, PROMPTS, VERIFIED, Run, batch_of, batch_on, engines_equal_the_cpu, moved
from torch import Tensor

from penstock.engine.backends.cuda.kernels import delta
from penstock.engine.backends.cuda.kernels.delta_decode import DecodeShape
from penstock.engine.backends.cuda.kernels.gemv import linear
from penstock.engine.backends.cuda.kernels.gemv_shapes import GemvConfig
from penstock.engine.backends.cuda.ops import TritonOps
from penstock.engine.backends.interface import AttentionBatch, DeltaLayout, DeltaWeights
from penstock.engine.backends.reference.delta import delta_net as plain
from penstock.engine.backends.reference.delta import split_gate

SMALL = DeltaLayout(k_heads=2, v_heads=4, k_dim=16, v_dim=24, conv=4, grouped=True)
APART = DeltaLayout(k_heads=3, v_heads=3, k_dim=32, v_dim=16, conv=3, grouped=False, sigmoid_gate=True)
CHANNELS = DeltaLayout(
    k_heads=3, v_heads=3, k_dim=24, v_dim=16, conv=4, grouped=False, by_channel=True, sigmoid_gate=True
)
KIMI = DeltaLayout(
    k_heads=32, v_heads=32, k_dim=128, v_dim=128, conv=4, grouped=False, by_channel=True, sigmoid_gate=True
)
REAL = DeltaLayout(k_heads=16, v_heads=32, k_dim=128, v_dim=128, conv=4, grouped=True)
TOLERANCES = {torch.float32: 3e-5, torch.bfloat16: 2e-2}


@dataclasses.dataclass(frozen=True, slots=True)
class Case:
    layout: DeltaLayout
    weights: DeltaWeights
    projected: Tensor
    gates: Tensor
    batch: AttentionBatch
    conv: Tensor
    state: Tensor

    def on(self, device: torch.device | str) -> Case:
        weights = (moved(getattr(self.weights, name), device) for name in ("conv", "decay", "decay_bias", "norm"))
        tensors = (moved(tensor, device) for tensor in (self.projected, self.gates))
        caches = (moved(tensor, device) for tensor in (self.conv, self.state))
        return Case(self.layout, DeltaWeights(*weights, 1e-6), *tensors, batch_on(self.batch, device), *caches)


def build(layout: DeltaLayout, runs: list[Run], dtype: torch.dtype, slots: int = 10) -> Case:
    weights = DeltaWeights(
        conv=rand(layout.channels, layout.conv, scale=0.5),
        decay=-torch.rand(layout.v_heads, device=DEVICE) * 2 - 0.01,
        decay_bias=rand(layout.decays),
        norm=1 + rand(layout.v_dim, scale=0.2),
        eps=1e-6,
    )
    batch = batch_of(runs)
    both = rand(len(batch.positions), layout.width + layout.v_heads + layout.decays, dtype=dtype)
    conv = rand(slots, layout.conv, layout.channels, dtype=dtype)
    state = rand(slots, layout.v_heads, layout.k_dim, layout.v_dim, scale=0.3)
    return Case(layout, weights, both[:, : layout.width], both[:, layout.width :], batch, conv, state)


def compare(name: str, case: Case) -> None:
    layout, dtype = case.layout, case.projected.dtype
    theirs = case.on("cpu") if MODE != "compile" else case
    with poisoned_outputs():
        got = ops.delta_net(case.projected, case.gates, layout, case.weights, case.batch, case.conv, case.state)
    if MODE == "compile":
        return
    want = plain(theirs.projected.float(), theirs.gates.float(), layout, theirs.weights, theirs.batch,
                 theirs.conv, theirs.state)  # fmt: skip
    limit = TOLERANCES[dtype]
    check(f"{name} out", got, want, limit)
    check(f"{name} states", case.state[1:], theirs.state[1:], limit)
    check(f"{name} inputs", case.conv[1:], theirs.conv[1:], 1e-6)


CASES = ((SMALL, torch.float32), (APART, torch.bfloat16), (CHANNELS, torch.float32)) if QUICK else (
    (SMALL, torch.float32), (APART, torch.float32), (REAL, torch.float32), (REAL, torch.bfloat16),
    (CHANNELS, torch.float32), (KIMI, torch.float32), (KIMI, torch.bfloat16),
)  # fmt: skip


def test_decodes_and_draft_tokens() -> None:
    for layout, dtype in CASES:
        compare(f"drafts {layout} {dtype}", build(layout, DECODES + VERIFIED, dtype))


def test_many_decodes() -> None:
    layout = SMALL if QUICK else REAL
    count = 9 if QUICK else 70
    runs = [Run(i, 1, i + 1 if i else 0, (i + 1,), True) for i in range(count)]
    compare("many", build(layout, runs, torch.float32, slots=count + 2))


def test_states_split_between_programs() -> None:
    """Few sequences: several programs share a state, and the last of them to finish applies the norm."""
    processors = ops.processors
    try:
        for layout, dtype in CASES:
            for ops.processors in (2, 48) if QUICK else (2, 48, 1024):
                compare(f"split {layout} {dtype} {ops.processors}", build(layout, DECODES + VERIFIED, dtype))
        assert not int(ops._counters.count_nonzero()), "counters are zero between launches"
    finally:
        ops.processors = processors


def test_queries_beside_their_gates() -> None:
    """Queries are read where they stand, and gates applied from there, as if they had been copied apart."""
    for heads, kv_heads, dim in ((4, 2, 32),) if QUICK else ((4, 2, 32), (16, 2, 256)):
        for dtype in (torch.float32, torch.bfloat16):
            case = attention_case([1, 1, 5], [30, 1, 20], head_layout(heads, kv_heads, dim), dtype, dtype)
            tokens, norms = case.q.shape[0], (rand(dim, dtype=dtype), rand(dim, dtype=dtype))
            rows, cos_sin = rand(tokens, (2 * heads + 2 * kv_heads) * dim, dtype=dtype), rand(64, dim // 4)
            apart, plain_gate = split_gate(rows, case.layout)
            keys, values = case.k_cache.clone(), case.v_cache.clone()
            want = ops.rope_and_cache(apart, case.layout, cos_sin, case.batch, keys, values, *norms, 1e-6)
            with poisoned_outputs():
                together, gate = ops.split_gate(rows, case.layout)
                q = ops.rope_and_cache(
                    together, case.layout, cos_sin, case.batch, case.k_cache, case.v_cache, *norms, 1e-6
                )
                out = ops.sigmoid_mul(q.view(tokens, -1), gate)
            if MODE != "compile":
                check_equal("queries", q, want)
                check_equal("keys", case.k_cache.view(torch.uint8), keys.view(torch.uint8))
                check_equal("values", case.v_cache.view(torch.uint8), values.view(torch.uint8))
                check("gated", out, want.view(tokens, -1).double() * plain_gate.double().sigmoid())


def test_prompts() -> None:
    for layout, dtype in CASES:
        compare(f"mixed {layout} {dtype}", build(layout, [*DECODES[:1], *VERIFIED, *PROMPTS], dtype))


def test_prompts_whose_channels_forget_at_once() -> None:
    """Exponentials of sums of such decays are zero, and those of their negatives would be infinite."""
    case = build(CHANNELS, [Run(33, 37, 3, (3,), False)], torch.float32)
    case.weights.decay.mul_(200.0)
    compare("fast decays", case)


def test_padding_is_zero_and_writes_nothing() -> None:
    case = build(SMALL, DECODES, torch.float32)
    states = case.batch.states
    assert states is not None
    for part in (states.first, states.last, states.reads, states.writes):
        part[1:] = 0
    before = case.state.clone()
    got = ops.delta_net(case.projected, case.gates, SMALL, case.weights, case.batch, case.conv, case.state)
    if MODE != "compile":
        assert bool((got[1:] == 0).all()) and bool((case.state[2:] == before[2:]).all())


def test_prompt_token_by_token() -> None:
    """Deterministic mode: a chunk is a run of single tokens, written where it was read."""
    ops.batch_invariant = True
    try:
        runs = [Run(6, 9, 1, (1,), True), Run(3, 1, 2, (2,), True)]
        compare("in place", build(SMALL, runs, torch.float32))
    finally:
        ops.batch_invariant = False


def test_engines_with_states_equal_the_cpu() -> None:
    """Prefix hits, preemption and rejected draft tokens, with CUDA graphs, against an engine on the CPU without any."""
    if MODE != "device":
        return
    config = {
        "model_type": "qwen3_next", "vocab_size": 199, "hidden_size": 64, "intermediate_size": 96,
        "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32,
        "max_position_embeddings": 1024, "full_attention_interval": 2, "linear_num_key_heads": 2,
        "linear_num_value_heads": 4, "linear_key_head_dim": 16, "linear_value_head_dim": 24, "num_experts": 0,
    }  # fmt: skip
    engines_equal_the_cpu(config)


def bench_delta_parts() -> Iterator[Row]:
    """Programs that share a head's state, with the convolution or without it: what is fastest for so many sequences."""
    chosen = delta.choose
    try:
        for count in (1, 8, 64):
            runs = [Run(9, 1, i + 1, (i + 1,), True) for i in range(count)]
            cases = [build(REAL, runs, torch.bfloat16, slots=count + 1) for _ in range(4)]
            for shape in (DecodeShape(parts, apart) for apart in (False, True) for parts in (2, 4, 8)):
                delta.choose = lambda *_, shape=shape, **__: shape
                calls = [
                    lambda c=c: ops.delta_net(c.projected, c.gates, REAL, c.weights, c.batch, c.conv, c.state)
                    for c in cases
                ]
                moved = count * 2 * 4 * REAL.v_heads * REAL.k_dim * REAL.v_dim
                yield bandwidth(
                    f"delta decode b{count} in {shape.parts}{' apart' if shape.apart else ''}", time_us(calls), moved
                )
    finally:
        delta.choose = chosen


def bench_mixer() -> Iterator[Row]:
    """A whole mixer of Qwen3-Next at one token (norm, projections, delta net, output), kernels starting early: which
    launch shape of the projections is fastest (rows and warps of a program)."""
    hidden, wide = 2048, REAL.width + 2 * REAL.v_heads
    early = TritonOps(DEVICE, pdl=True)
    cases = [build(REAL, [Run(9, 1, 1, (1,), True)], torch.bfloat16, slots=2) for _ in range(4)]
    mixes = [rand(wide, hidden, dtype=torch.bfloat16, scale=0.02) for _ in cases]
    outputs = [rand(hidden, REAL.v_heads * REAL.v_dim, dtype=torch.bfloat16, scale=0.02) for _ in cases]
    gains, x = rand(hidden, dtype=torch.bfloat16), rand(1, hidden, dtype=torch.bfloat16)

    def mixer(case: Case, mix: Tensor, output: Tensor, config: GemvConfig | None) -> Tensor:
        normed = early.rms_norm(x, gains, 1e-6)
        projected = linear(normed, mix, config=config, pdl=True)
        rows, gates = projected[:, : REAL.width], projected[:, REAL.width :]
        mixed = early.delta_net(rows, gates, REAL, case.weights, case.batch, case.conv, case.state)
        return linear(mixed, output, residual=x, out=x, pdl=True)

    moved = (
        sum(t.numel() * t.element_size() for t in (mixes[0], outputs[0])) + 8 * REAL.v_heads * REAL.k_dim * REAL.v_dim
    )
    for rows, warps in ((0, 0), (1, 8), (2, 8), (4, 8), (2, 4), (4, 4), (4, 2)):
        config = GemvConfig("rows", rows, warps * 256, warps, 1) if rows else None
        calls = [lambda a=args, c=config: mixer(*a, c) for args in zip(cases, mixes, outputs, strict=True)]
        yield bandwidth(f"delta mixer b1, projections {rows} rows {warps} warps", time_us(calls), moved)


def bench_gates() -> Iterator[Row]:
    """What gated attention adds to attention, at one and at many tokens of Qwen3-Next."""
    layout = head_layout(16, 2, 256)

    def apply(rows: Tensor, x: Tensor) -> Tensor:
        return ops.sigmoid_mul(x, ops.split_gate(rows, layout)[1])

    for tokens in (1, 64):
        rows = [rand(tokens, 36 * 256, dtype=torch.bfloat16) for _ in range(4)]
        xs = [rand(tokens, 16 * 256, dtype=torch.bfloat16) for _ in range(4)]
        us = time_us([lambda r=r, x=x: apply(r, x) for r, x in zip(rows, xs, strict=True)])
        yield bandwidth(f"gates {tokens}", us, 3 * tokens * 16 * 256 * 2)


def bench_delta() -> Iterator[Row]:
    for count in (1, 8, 64):
        runs = [Run(9, 1, i + 1, (i + 1,), True) for i in range(count)]
        cases = [build(REAL, runs, torch.bfloat16, slots=count + 1) for _ in range(4)]
        calls = [
            lambda c=c: ops.delta_net(c.projected, c.gates, REAL, c.weights, c.batch, c.conv, c.state) for c in cases
        ]
        us = time_us(calls)
        moved = count * 2 * 4 * REAL.v_heads * REAL.k_dim * REAL.v_dim
        yield bandwidth(f"delta decode b{count}", us, moved)
    for length in (512, 8192):
        cases = [build(REAL, [Run(0, length, 0, (1,), False)], torch.bfloat16, slots=2) for _ in range(2)]
        calls = [
            lambda c=c: ops.delta_net(c.projected, c.gates, REAL, c.weights, c.batch, c.conv, c.state) for c in cases
        ]
        us = time_us(calls)
        yield f"delta prompt {length}", us, f"{length / us:.1f} tokens/us" if us else "-"
