"""The time of a step, computed a second time by hand: every factor counts once, and where it belongs."""

from __future__ import annotations

from dataclasses import replace
from math import hypot

import pytest

from penstock.bench.shapes import named as bench_shape
from penstock.planning.calibration import Calibration, Source, WeightFactors
from penstock.planning.catalogue import Link, device
from penstock.planning.config_shape import shape_of_config
from penstock.planning.deployment import Deployment, Speculation
from penstock.planning.model_shape import model_shape
from penstock.planning.shape import ModelShape, Moe
from penstock.planning.step_time import ModelCounts, StepTime, StepWork, Window, attended, counts_of
from penstock.planning.token_mixers import Delta, Mla

H200 = device("h200")
# Numbers that differ from each other, so that none can stand for another.
FACTORS = Calibration(
    device="h200",
    source=Source("a test", "2026-01-01", "0", "none"),
    weights={"bf16": WeightFactors(0.71, 0.53, 0.61), "fp8": WeightFactors(0.67, 0.43, 0.37),
             "int4": WeightFactors(0.57, 0.41, 0.29)},
    kv_read=0.47, attention=0.31, step_s=3e-4, prompt_step_s=7e-4, layer_s=1.1e-5, sequence_s=1.3e-6,
    few_tokens=8, expert_layer_s=1.7e-5, verify_s=1.9e-4, link=0.59,
)  # fmt: skip
DENSE = Deployment(shape=model_shape("llama-8b"), device=H200)
DEPLOYMENTS = {
    "dense": DENSE,
    "fp8": replace(DENSE, weight_dtype="fp8"),
    "int4": replace(DENSE, weight_dtype="int4"),
    "shards": replace(DENSE, tensor_parallel=4),
    "stages": replace(DENSE, pipeline_parallel=2),
    "experts": Deployment(shape=model_shape("qwen3-30b-a3b"), device=H200),
    "window": Deployment(shape=shape_of_config(bench_shape("gemma3-1b"), "gemma3-1b"), device=H200),
}
WORKS = [
    StepWork(1, 5000, 0, 0, 1),
    StepWork(64, 64 * 3000, 0, 0, 64),
    StepWork(0, 0, 4096, attended(1000, 4096), 1),
    StepWork(5, 700, 3, attended(0, 3), 6),
    StepWork(0, 0, 512, attended(0, 512), 0),
]


def by_hand(deployment: Deployment, work: StepWork) -> float:
    counts, shards, stages = counts_of(deployment), deployment.tensor_parallel, deployment.pipeline_parallel
    form = deployment.weights
    here, dense = FACTORS.factors(form), FACTORS.weights["bf16"]
    head = dense if form.head_bytes >= 2 else here
    tokens = work.decodes + work.prefill
    bandwidth, flops = H200.bandwidth * shards, H200.flops_in("bf16") * shards
    visited = counts.experts * (1 - (1 - counts.experts_per_token / counts.experts) ** tokens) if counts.experts else 0
    share = here.read_few if tokens <= 8 else here.read
    read = (counts.dense_bytes + visited * counts.expert_bytes) / (bandwidth * share)
    passed = counts.dense_params + counts.experts_per_token * counts.expert_params
    compute = tokens * 2 * passed / (H200.flops_in(form.compute) * shards * here.compute)
    seconds = 3e-4 + counts.layers * 1.1e-5 + counts.expert_layers * 1.7e-5 + hypot(read, compute)
    if work.samples:
        rows = work.samples * 2 * counts.head_params / (flops * head.compute)
        seconds += hypot(counts.head_bytes / (bandwidth * head.read_few), rows) + work.samples * 1.3e-6
    if work.prefill:
        seconds += 7e-4
    for window in counts.windows:
        context, positions = work.context, work.attended
        if window.length is not None:
            context, positions = (
                min(context, work.decodes * window.length),
                min(positions, work.prefill * window.length),
            )
        seconds += context * window.kv_bytes / (H200.bandwidth * 0.47) + positions * window.flops / (flops * 0.31)
    row = 2 * counts.hidden / (H200.link.bandwidth * 0.59)
    if shards > 1:  # two all-reduces per layer, each of which sends a row twice but for the share that stays
        seconds += 2 * counts.layers * (tokens * row * 2 * (shards - 1) / shards + H200.link.latency_s)
    if stages > 1:
        seconds += stages * (tokens * row + H200.link.latency_s)
    return seconds


@pytest.mark.parametrize("work", WORKS, ids=str)
@pytest.mark.parametrize("which", DEPLOYMENTS)
def test_a_step_takes_what_it_reads_and_computes(which: str, work: StepWork) -> None:
    time = StepTime(DEPLOYMENTS[which], FACTORS)
    assert time.seconds(work) == pytest.approx(by_hand(DEPLOYMENTS[which], work))
    shares = time.shares(work)
    assert sum(shares.values()) == pytest.approx(time.seconds(work)) and min(shares.values()) >= 0.0


@pytest.mark.parametrize("which", DEPLOYMENTS)
def test_where_the_time_goes(which: str) -> None:
    """Without bandwidth, links or arithmetic as a limit, that share is what is gone."""
    deployment, work = DEPLOYMENTS[which], WORKS[3]
    shares, counts = StepTime(deployment, FACTORS).shares(work), counts_of(deployment)
    fixed = 3e-4 + 7e-4 + counts.layers * 1.1e-5 + counts.expert_layers * 1.7e-5 + work.samples * 1.3e-6
    assert shares["overhead"] == pytest.approx(fixed)
    assert (shares["links"] > 0) == (deployment.devices > 1)
    instant = StepTime(replace(deployment, device=replace(H200, bandwidth=1e24)), FACTORS).shares(work)
    assert instant["bandwidth"] < 1e-9 < shares["bandwidth"]
    assert instant["compute"] + instant["overhead"] + instant["links"] < by_hand(deployment, work)


@pytest.mark.parametrize("shards", [1, 2, 8])
def test_steps_of_several_ranks_take_at_least_their_launch(shards: int) -> None:
    slow = StepTime(replace(DENSE, tensor_parallel=shards), replace(FACTORS, launch_layer_s=1.0))
    assert (slow.seconds(WORKS[0]) == counts_of(DENSE).layers) == (shards > 1)


def test_a_step_of_nothing_is_the_default_and_tokens_take_a_step_each() -> None:
    assert StepWork() == StepWork(0, 0, 0, 0, 0)
    time = StepTime(DENSE, FACTORS)
    assert time.token_s(4, 1200) == time.seconds(StepWork(4, 1200, 0, 0, 4))


def test_a_verified_step_is_a_step_of_more_rows_and_the_drafts() -> None:
    time = StepTime(DENSE, FACTORS)
    rows = time.of(4 * 3, 4 * 900, 0, 0, 4 * 3)
    assert time.verify(4, 1200, 2) == pytest.approx(1.9e-4 + rows)
    small = model_shape("qwen3-0.6b")
    drafted = StepTime(replace(DENSE, speculation=Speculation("draft", 0.8, draft=small)), FACTORS)
    draft = StepTime(replace(DENSE, shape=small), FACTORS).of(4, 1200, 0, 0, 4)
    assert drafted.verify(4, 1200, 2) == pytest.approx(1.9e-4 + rows + 2 * draft, rel=1e-12)


SMALL = ModelShape(
    name="small", family="llama", layers=5, hidden=24, ffn=40, heads=6, kv_heads=3, head_dim=8, vocab=101,
    max_positions=640, windows=(None, 32, 32, None, 64),
)  # fmt: skip


def test_what_a_step_must_read_and_compute() -> None:
    layer = 2 * 24 * 48 + 2 * 24 * 24 + 3 * 24 * 40
    found = counts_of(replace(DENSE, shape=SMALL))
    assert found == ModelCounts(
        5, 24, 5 * layer, 10 * layer, 101 * 24, 2 * 101 * 24,
        (Window(2 * 48 * 2, 2 * 4 * 48), Window(2 * 48 * 2, 2 * 4 * 48, 32), Window(48 * 2, 4 * 48, 64)),
    )  # fmt: skip
    assert (found.experts, found.experts_per_token, found.expert_params, found.expert_layers) == (0, 0, 0, 0)
    shared = counts_of(replace(DENSE, shape=replace(SMALL, kv_heads=6), tensor_parallel=2))
    assert shared.windows[0] == Window(2 * 2 * 3 * 8 * 2, 2 * 4 * 48), "keys of a device, products of all"


def test_what_a_step_of_experts_must_read() -> None:
    moe = Moe(experts=7, top_k=2, ffn=14, layers=(False, True, True, True, False), bias=False)
    found = counts_of(replace(DENSE, shape=replace(SMALL, moe=moe, served=False), weight_dtype="fp8"))
    attention, routers = 2 * 24 * 48 + 2 * 24 * 24, 3 * 24 * 7
    assert found.dense_params == 5 * attention + 2 * 3 * 24 * 40 + routers
    assert found.dense_bytes == found.dense_params + routers, "routers in two bytes, the rest in one"
    assert (found.experts, found.experts_per_token, found.expert_layers) == (7, 2, 3)
    assert found.expert_params == found.expert_bytes == 3 * 3 * 24 * 14
    latent = replace(SMALL, mla=Mla(kv_rank=20, rope_dim=4, nope_dim=10, value_dim=7), windows=(None,) * 5)
    assert counts_of(replace(DENSE, shape=latent)).windows == (Window(5 * 24 * 2, 5 * 2 * 6 * (10 + 4 + 7)),)


def test_sequences_read_and_write_their_states() -> None:
    delta = Delta(layers=(True, False, True, True, False), k_heads=2, v_heads=4, k_dim=8, v_dim=6, conv=4)
    recurrent = replace(SMALL, delta=delta, windows=(None,) * 5, kv_heads=6)
    one, two = (replace(DENSE, shape=recurrent, tensor_parallel=size) for size in (1, 2))
    states = 3 * (4 * 4 * 8 * 6 + 2 * 4 * (2 * 2 * 8 + 4 * 6))
    assert counts_of(one).state_bytes == states == 2 * counts_of(two).state_bytes
    assert counts_of(one).windows == (Window(2 * 2 * 48 * 2, 2 * 4 * 48),), "of two layers with attention"
    work = StepWork(3, 300, 0, 0, 3)
    with_states, without = StepTime(one, FACTORS), StepTime(one, FACTORS)
    without._state, without._sequence = 0.0, without._sequence - with_states._state
    added = 3 * 2 * states / (H200.bandwidth * FACTORS.kv_read)
    assert with_states.seconds(work) - without.seconds(work) == pytest.approx(added)
    assert with_states.shares(work)["bandwidth"] - without.shares(work)["bandwidth"] == pytest.approx(added)
    assert sum(with_states.shares(work).values()) == pytest.approx(with_states.seconds(work))


@pytest.mark.parametrize("tokens", [7, 8, 9])
@pytest.mark.parametrize("which", DEPLOYMENTS)
def test_few_tokens_read_at_their_own_speed(which: str, tokens: int) -> None:
    work = StepWork(tokens, 100 * tokens, 0, 0, tokens)
    assert StepTime(DEPLOYMENTS[which], FACTORS).seconds(work) == pytest.approx(by_hand(DEPLOYMENTS[which], work))


@pytest.mark.parametrize("work", WORKS, ids=str)
@pytest.mark.parametrize("which", DEPLOYMENTS)
def test_time_is_divided_by_the_squares_of_reading_and_computing(which: str, work: StepWork) -> None:
    deployment = DEPLOYMENTS[which]
    time, counts = StepTime(deployment, FACTORS), counts_of(deployment)
    shards, form = deployment.tensor_parallel, deployment.weights
    here = FACTORS.factors(form)
    head = FACTORS.weights["bf16"] if form.head_bytes >= 2 else here
    tokens = work.decodes + work.prefill
    bandwidth, flops = H200.bandwidth * shards, H200.flops_in("bf16") * shards
    visited = counts.experts * (1 - (1 - counts.experts_per_token / counts.experts) ** tokens) if counts.experts else 0
    share = here.read_few if tokens <= 8 else here.read
    read = (counts.dense_bytes + visited * counts.expert_bytes) / (bandwidth * share)
    passed = counts.dense_params + counts.experts_per_token * counts.expert_params
    compute = tokens * 2 * passed / (H200.flops_in(form.compute) * shards * here.compute)
    head_read = counts.head_bytes / (bandwidth * head.read_few)
    head_compute = work.samples * 2 * counts.head_params / (flops * head.compute)
    context = positions = 0.0
    for window in counts.windows:
        longest = window.length or 1 << 60
        context += min(work.context, work.decodes * longest) * window.kv_bytes / (H200.bandwidth * 0.47)
        positions += min(work.attended, work.prefill * longest) * window.flops / (flops * 0.31)
    pairs = [(read, compute)] + ([(head_read, head_compute)] if work.samples else [])
    shares = time.shares(work)
    assert shares["bandwidth"] == pytest.approx(sum(r * r / hypot(r, c) for r, c in pairs) + context)
    assert shares["compute"] == pytest.approx(sum(hypot(r, c) - r * r / hypot(r, c) for r, c in pairs) + positions)


def test_links_within_a_machine_and_between_machines() -> None:
    large = replace(model_shape("deepseek-v3"), served=False)  # the engine's do not span machines with one layer
    hidden, layers, work = large.hidden, large.layers, StepWork(3, 300, 0, 0, 3)
    row = 2 * hidden / 0.59

    def links(**settings: int) -> float:
        return StepTime(Deployment(shape=large, device=H200, **settings), FACTORS).shares(work)["links"]  # type: ignore[arg-type]

    def reduced(shards: int, link: Link) -> float:
        return 2 * layers * (3 * row * 2 * (shards - 1) / shards / link.bandwidth + link.latency_s)

    def handed(stages: int, link: Link) -> float:
        return stages * (3 * row / link.bandwidth + link.latency_s)

    assert H200.network.bandwidth != H200.link.bandwidth
    assert links() == 0
    assert links(tensor_parallel=2) == pytest.approx(reduced(2, H200.link))
    assert links(tensor_parallel=8) == pytest.approx(reduced(8, H200.link))
    assert links(tensor_parallel=16) == pytest.approx(reduced(16, H200.network))
    assert links(pipeline_parallel=2) == pytest.approx(handed(2, H200.link))
    assert links(pipeline_parallel=3) == pytest.approx(handed(3, H200.link))
    both = links(tensor_parallel=8, pipeline_parallel=2)
    assert both == pytest.approx(reduced(8, H200.link) + handed(2, H200.network))


@pytest.mark.parametrize("steps", [0, 1, 2, 30])
@pytest.mark.parametrize("each", [1, 31, 32, 60, 64, 65, 100])
def test_a_run_of_steps_past_the_ends_of_windows(each: int, steps: int) -> None:
    time = StepTime(replace(DENSE, shape=SMALL), FACTORS)
    one_by_one = sum(time.of(4, 4 * (each + step), 0, 0, 4) for step in range(steps))
    assert time.decode_run(4, 4 * each, steps) == pytest.approx(one_by_one, rel=1e-12)


@pytest.mark.parametrize("extra", [-1e-3, 0.0, 1e-7, 1.05e-6, 5e-6, 1.0])
def test_a_run_whose_first_steps_wait_for_their_launch(extra: float) -> None:
    """A token more of context takes 29 ns for each of the eight, so that 1.05 us are five steps."""
    sharded = replace(DENSE, tensor_parallel=2)
    base = StepTime(sharded, FACTORS).of(8, 8 * 100, 0, 0, 8)
    time = StepTime(sharded, replace(FACTORS, launch_layer_s=(base + extra) / 32))
    one_by_one = [time.of(8, 8 * (100 + step), 0, 0, 8) for step in range(40)]
    assert time.decode_run(8, 800, 40) == pytest.approx(sum(one_by_one), rel=1e-12)
    waiting = sum(one == base + extra or abs(one - base - extra) < 1e-15 for one in one_by_one)
    assert (waiting == 40) == (extra == 1.0) and (waiting == 0) == (extra < 0)


@pytest.mark.parametrize("sequences", [1, 5, 9, 12, 13, 16, 21, 22, 32, 33, 64])
@pytest.mark.parametrize("deepest", [1, 4, 6])
def test_as_many_draft_tokens_as_pay_and_fit(sequences: int, deepest: int) -> None:
    """At most 64 tokens are verified together; nearly all are accepted, so more would pay."""
    free = replace(FACTORS, verify_s=0.0)
    drafted = StepTime(replace(DENSE, speculation=Speculation("ngram", 0.99, deepest)), free)
    times = [drafted.of(sequences, 100 * sequences, 0, 0, sequences)]
    for depth in range(1, deepest + 1):
        if sequences + sequences * depth <= 64:
            gained = sum(0.99**accepted for accepted in range(depth + 1))
            times.append(drafted.verify(sequences, 100 * sequences, depth) / gained)
    assert drafted.token_s(sequences, 100 * sequences) == pytest.approx(min(times), rel=1e-12)
    assert min(times) == times[-1]
