"""Mamba-2 layers against the plain implementation: decodes, draft tokens, prompts, mixes; engines with them."""

from __future__ import annotations

import dataclasses
import math
import random
from collections.abc import Iterator
from typing import Any

import torch
from attention_cases import ops
from gpu_harness import DEVICE, MODE, QUICK, Row, bandwidth, check, integers, poisoned_outputs, rand, time_us
from graph_watch import watched_prompts
from torch import Tensor

from penstock.engine.backends.interface import AttentionBatch, MambaLayout, MambaWeights, StateBatch
from penstock.engine.backends.reference.mamba import mamba as plain
from penstock.engine.config import EngineConfig
from penstock.engine.core import Engine
from penstock.engine.loading.random_checkpoint import RandomCheckpoint
from tests.engine.harness import generate, greedy

SMALL = MambaLayout(heads=4, head_dim=24, groups=2, state=16, conv=3)
APART = MambaLayout(heads=6, head_dim=16, groups=1, state=40, conv=4, norm_groups=3, gate_first=False)
PLAIN = MambaLayout(heads=2, head_dim=32, groups=2, state=16, conv=2, norm_groups=0)
REAL = MambaLayout(heads=128, head_dim=64, groups=1, state=128, conv=4)
"""Of Granite 4.0 H-Small."""
WIDE = MambaLayout(heads=24, head_dim=64, groups=2, state=256, conv=4, norm_groups=0)
"""Of Falcon-H1."""
TOLERANCES = {torch.float32: 3e-5, torch.bfloat16: 2e-2}


_TENSORS = ("conv", "conv_bias", "decay", "dt_bias", "skip", "norm")


@dataclasses.dataclass(frozen=True, slots=True)
class Run:
    """What a step computes of one sequence: its first position, tokens, the slots it reads and writes."""

    start: int
    length: int
    read: int
    writes: tuple[int, ...]
    decodes: bool


@dataclasses.dataclass(frozen=True, slots=True)
class Case:
    layout: MambaLayout
    weights: MambaWeights
    projected: Tensor
    batch: AttentionBatch
    conv: Tensor
    state: Tensor

    def on(self, device: torch.device | str) -> Case:
        def move(x: Tensor) -> Tensor:
            return x.detach().clone().to(device)

        moved_weights = {n: move(getattr(self.weights, n)) for n in _TENSORS}
        weights = dataclasses.replace(self.weights, **moved_weights)
        states = self.batch.states
        assert states is not None
        moved = StateBatch(*(move(getattr(states, name)) for name in ("first", "last", "reads", "writes")))
        batch = dataclasses.replace(self.batch, positions=move(self.batch.positions), states=moved)
        return Case(self.layout, weights, move(self.projected), batch, move(self.conv), move(self.state))


def batch_of(runs: list[Run]) -> AttentionBatch:
    """Decodes come first, and draft tokens count as decodes. No run may write what another one reads or writes: nobody
    knows which of them is first."""
    for run in runs:
        others = {slot for other in runs if other is not run for slot in (other.read, *other.writes)}
        assert others.isdisjoint({*run.writes} - {0}), f"{run} writes a slot of another run"
    positions, first, last, reads, writes, starts = [], [], [], [], [], [0]
    for run in runs:
        begin = len(positions)
        positions += range(run.start, run.start + run.length)
        first += [begin] * run.length
        last += [begin + run.length - 1] * run.length
        reads += [run.read] * run.length
        writes += [0] * (run.length - len(run.writes)) + list(run.writes)
        starts += range(begin + 1, begin + run.length + 1) if run.decodes else [begin + run.length]
    contexts = [positions[end - 1] + 1 for end in starts[1:]]
    return AttentionBatch(
        positions=integers(positions, torch.int64),
        slots=integers(positions, torch.int64),
        query_starts=integers(starts, torch.int32),
        context_lens=integers(contexts, torch.int32),
        rows=integers([0] * len(contexts), torch.int32),
        block_tables=integers([0], torch.int32).view(1, 1),
        num_decodes=sum(run.length for run in runs if run.decodes),
        max_query=max(run.length for run in runs),
        max_context=max(contexts),
        states=StateBatch(*(integers(values, torch.int32) for values in (first, last, reads, writes))),
    )


def build(layout: MambaLayout, runs: list[Run], dtype: torch.dtype, slots: int = 10) -> Case:
    weights = MambaWeights(
        conv=rand(layout.channels, layout.conv, scale=0.5),
        conv_bias=rand(layout.channels, scale=0.3),
        decay=-torch.rand(layout.heads, device=DEVICE) * 2 - 0.01,
        dt_bias=rand(layout.heads),
        skip=rand(layout.heads),
        norm=1 + rand(layout.inner, scale=0.2),
        eps=1e-5,
        dt_range=(0.1, 2.5) if layout.conv == 3 else (0.0, math.inf),
        gate_scale=0.8,
        dt_scale=1.2,
    )
    batch = batch_of(runs)
    projected = rand(len(batch.positions), layout.width, dtype=dtype)
    conv = rand(slots, layout.conv, layout.channels, dtype=dtype)
    state = rand(slots, layout.heads, layout.head_dim, layout.state, scale=0.3)
    return Case(layout, weights, projected, batch, conv, state)


def compare(name: str, case: Case) -> None:
    layout, dtype = case.layout, case.projected.dtype
    theirs = case.on("cpu") if MODE != "compile" else case
    with poisoned_outputs():
        got = ops.mamba(case.projected, layout, case.weights, case.batch, case.conv, case.state)
    if MODE == "compile":
        return
    want = plain(theirs.projected.float(), layout, theirs.weights, theirs.batch, theirs.conv, theirs.state)
    limit = TOLERANCES[dtype]
    check(f"{name} out", got, want, limit)
    check(f"{name} states", case.state[1:], theirs.state[1:], limit)
    check(f"{name} inputs", case.conv[1:], theirs.conv[1:], 1e-6)


DECODES = [Run(5, 1, 1, (1,), True), Run(0, 1, 0, (2,), True), Run(2, 1, 3, (4,), True)]
VERIFIED = [Run(7, 4, 5, (5, 6, 7, 8), True)]
CASES = ((SMALL, torch.float32), (APART, torch.bfloat16), (PLAIN, torch.float32)) if QUICK else (
    (SMALL, torch.float32), (APART, torch.float32), (PLAIN, torch.float32), (REAL, torch.float32),
    (REAL, torch.bfloat16), (WIDE, torch.bfloat16),
)  # fmt: skip
PROMPTS = [Run(0, 75, 0, (2,), False), Run(33, 2, 3, (3,), False), Run(1, 130, 4, (9,), False)]


def test_decodes_and_draft_tokens() -> None:
    for layout, dtype in CASES:
        compare(f"drafts {layout} {dtype}", build(layout, DECODES + VERIFIED, dtype))


def test_many_decodes() -> None:
    layout = SMALL if QUICK else REAL
    count = 9 if QUICK else 70
    runs = [Run(i, 1, i + 1 if i else 0, (i + 1,), True) for i in range(count)]
    compare("many", build(layout, runs, torch.float32, slots=count + 2))


def test_prompts() -> None:
    for layout, dtype in CASES:
        compare(f"mixed {layout} {dtype}", build(layout, [*DECODES[:1], *VERIFIED, *PROMPTS], dtype))


def test_padding_is_zero_and_writes_nothing() -> None:
    case = build(SMALL, DECODES, torch.float32)
    states = case.batch.states
    assert states is not None
    for part in (states.first, states.last, states.reads, states.writes):
        part[1:] = 0
    before = case.state.clone()
    got = ops.mamba(case.projected, SMALL, case.weights, case.batch, case.conv, case.state)
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


class SameEverywhere(RandomCheckpoint):
    """Devices draw other numbers from the same seed: all get the CPU's."""

    def tensor(self, name: str, device: str | torch.device | None = None) -> Tensor:
        return super().tensor(name, "cpu").to(device or "cpu")


def _engines() -> Iterator[tuple[str, dict[str, Any]]]:
    yield "plain", {}
    yield "small chunks and preemption", {"token_budget": 48, "num_blocks": 24, "max_running": 6}
    yield "drafts", {"speculation": "ngram"}
    yield "deterministic", {"deterministic": True}


def test_engines_with_states_equal_the_cpu() -> None:
    """Prefix hits, preemption and rejected draft tokens, with CUDA graphs, against an engine on the CPU without any."""
    if MODE != "device":
        return
    config = {
        "model_type": "granitemoehybrid", "vocab_size": 199, "hidden_size": 64, "intermediate_size": 32,
        "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 1024,
        "layer_types": ["mamba", "attention", "mamba", "mamba"], "mamba_n_heads": 8, "mamba_n_groups": 2,
        "mamba_d_state": 24, "mamba_d_conv": 3, "num_local_experts": 0, "shared_intermediate_size": 96,
        "residual_multiplier": 0.4, "attention_multiplier": 0.2,
    }  # fmt: skip
    weights = SameEverywhere(config, seed=3, dtype=torch.float32, embedding_scale=1.0)

    def engine(device: str, **settings: Any) -> Engine:
        settings = {"dtype": "float32", "state_interval": 32, "max_running": 8, **settings}
        return Engine.load(EngineConfig(model="hybrid", device=device, **settings), checkpoint=weights)

    chance = random.Random(5)
    prompts = {f"r{n}": [chance.randrange(199) for _ in range(n)] for n in (1, 17, 64, 130, 300)}
    text = prompts["r64"]
    prompts["repeated"] = text + text + text[:20]
    alone = engine("cpu", prefix_cache=False)
    expected = {name: generate(alone, greedy(name, prompt, 40))[name] for name, prompt in prompts.items()}
    for label, settings in _engines():
        here = engine("cuda", **settings)
        with watched_prompts() as shapes:
            for turn in range(2):
                got = generate(here, *(greedy(f"{name}-{turn}", prompt, 40) for name, prompt in prompts.items()))
                for name, tokens in expected.items():
                    assert got[f"{name}-{turn}"] == tokens, (label, name)
            for name, prompt in prompts.items():
                got = generate(here, greedy(f"{name} alone", prompt, 40))
                assert got[f"{name} alone"] == expected[name], (label, name)
        kinds = {bool(shape.decodes) for shape in shapes}
        assert kinds == (set() if "deterministic" in settings else {False, True}), (label, shapes)
        assert here.load_snapshot().prefix_hit_tokens > 0, label
        here.check_idle()
        here.close()


def bench_mamba() -> Iterator[Row]:
    for count in (1, 8, 64):
        runs = [Run(9, 1, i + 1, (i + 1,), True) for i in range(count)]
        cases = [build(REAL, runs, torch.bfloat16, slots=count + 1) for _ in range(4)]
        us = time_us([lambda c=c: _call(c) for c in cases])
        moved = count * 2 * 4 * REAL.heads * REAL.head_dim * REAL.state
        yield bandwidth(f"mamba decode b{count}", us, moved)
    for length in (512, 8192):
        cases = [build(REAL, [Run(0, length, 0, (1,), False)], torch.bfloat16, slots=2) for _ in range(2)]
        us = time_us([lambda c=c: _call(c) for c in cases])
        yield f"mamba prompt {length}", us, f"{length / us:.1f} tokens/us" if us else "-"


def _call(case: Case) -> Tensor:
    return ops.mamba(case.projected, case.layout, case.weights, case.batch, case.conv, case.state)
