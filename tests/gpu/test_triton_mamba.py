"""Mamba-2 layers against the plain implementation: decodes, draft tokens, prompts, mixes; engines with them."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator

import torch
from attention_cases import ops
from gpu_harness import DEVICE, MODE, QUICK, Row, bandwidth, check, poisoned_outputs, rand, time_us
from state_cases import DECODES, PROMPTS, VERIFIED, Run, batch_of, batch_on, engines_equal_the_cpu, moved
from torch import Tensor

from penstock.engine.backends.interface import AttentionBatch, MambaLayout, MambaWeights
from penstock.engine.backends.reference.mamba import mamba as plain

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
class Case:
    layout: MambaLayout
    weights: MambaWeights
    projected: Tensor
    batch: AttentionBatch
    conv: Tensor
    state: Tensor

    def on(self, device: torch.device | str) -> Case:
        weights = dataclasses.replace(
            self.weights, **{name: moved(getattr(self.weights, name), device) for name in _TENSORS}
        )
        projected, conv, state = (moved(tensor, device) for tensor in (self.projected, self.conv, self.state))
        return Case(self.layout, weights, projected, batch_on(self.batch, device), conv, state)


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


CASES = ((SMALL, torch.float32), (APART, torch.bfloat16), (PLAIN, torch.float32)) if QUICK else (
    (SMALL, torch.float32), (APART, torch.float32), (PLAIN, torch.float32), (REAL, torch.float32),
    (REAL, torch.bfloat16), (WIDE, torch.bfloat16),
)  # fmt: skip


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
    engines_equal_the_cpu(config)


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
