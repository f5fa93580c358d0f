"""The time of a step, computed a second time by hand: every factor counts once, and where it belongs."""

from __future__ import annotations

from dataclasses import replace
from math import hypot

import pytest

from penstock.bench.shapes import named as bench_shape
from penstock.planning.calibration import Calibration, Source, WeightFactors
from penstock.planning.catalogue import device
from penstock.planning.config_shape import shape_of_config
from penstock.planning.deployment import Deployment, Speculation
from penstock.planning.model_shape import model_shape
from penstock.planning.step_time import StepTime, StepWork, attended, counts_of

H200 = device("h200")
# Numbers that differ from each other, so that none can stand for another.
FACTORS = Calibration(
    device="h200",
    source=Source("a test", "2026-01-01", "0", "none"),
    weights={"bf16": WeightFactors(0.71, 0.53, 0.61), "fp8": WeightFactors(0.67, 0.43, 0.37)},
    kv_read=0.47, attention=0.31, step_s=3e-4, prompt_step_s=7e-4, layer_s=1.1e-5, sequence_s=1.3e-6,
    few_tokens=8, expert_layer_s=1.7e-5, verify_s=1.9e-4, link=0.59,
)  # fmt: skip
DENSE = Deployment(shape=model_shape("llama-8b"), device=H200)
DEPLOYMENTS = {
    "dense": DENSE,
    "fp8": replace(DENSE, weight_dtype="fp8"),
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
    assert drafted.verify(4, 1200, 2) == pytest.approx(1.9e-4 + rows + 2 * draft)
