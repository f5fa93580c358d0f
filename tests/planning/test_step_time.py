"""How long a step takes: what it grows with, what overlaps, what parallelism divides and adds."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest

from penstock.bench.shapes import named as bench_shape
from penstock.planning.calibration import calibration_for
from penstock.planning.catalogue import device
from penstock.planning.config_shape import shape_of_config
from penstock.planning.deployment import Deployment, Speculation
from penstock.planning.model_shape import model_shape
from penstock.planning.step_time import StepTime, StepWork, attended

H200 = device("h200")
FACTORS = calibration_for(H200)
LLAMA = Deployment(shape=model_shape("llama-8b"), device=H200)


def time_of(deployment: Deployment) -> StepTime:
    return StepTime(deployment, FACTORS)


def decode(time: StepTime, streams: int, context: int = 1000) -> float:
    return time.seconds(StepWork(streams, streams * context, 0, 0, streams))


def test_one_stream_reads_the_weights_at_the_measured_bandwidth() -> None:
    weights = 15.0e9  # 7.5 billion parameters in matrices and head, two bytes each
    seconds = decode(time_of(LLAMA), 1, context=1)
    assert weights / 4.8e12 < seconds < 1.5 * weights / 4.8e12


def test_a_long_prompt_computes_at_the_measured_flops() -> None:
    prompt = 8192
    seconds = time_of(LLAMA).seconds(StepWork(0, 0, prompt, attended(0, prompt), 1))
    linears = 2 * 6.98e9 * prompt
    assert 0.55 * 989e12 < linears / seconds < 0.70 * 989e12


def test_positions_a_chunk_attends_to() -> None:
    assert attended(0, 4) == 1 + 2 + 3 + 4
    assert attended(10, 2) == 11 + 12


def test_a_step_takes_longer_with_more_of_anything() -> None:
    time = time_of(LLAMA)
    base = StepWork(32, 32_000, 512, 200_000, 33)
    for name in ("decodes", "context", "prefill", "attended", "samples"):
        more = replace(base, **{name: 2 * getattr(base, name)})
        assert time.seconds(more) > time.seconds(base), name


def test_batches_share_the_reading_of_weights() -> None:
    time = time_of(LLAMA)
    per_token = [decode(time, streams, 256) / streams for streams in (1, 8, 64, 256)]
    assert all(after < before for before, after in pairwise(per_token))
    assert decode(time, 8, 256) < 1.1 * decode(time, 1, 256)


@pytest.mark.parametrize("streams, context, steps", [(1, 10, 1), (3, 5000, 77), (64, 64 * 500, 300)])
@pytest.mark.parametrize("model", ["llama-8b", "gemma3-1b", "qwen3-30b-a3b"])
def test_a_run_of_decode_steps_is_their_sum(model: str, streams: int, context: int, steps: int) -> None:
    time = time_of(Deployment(shape=shape_of_config(bench_shape(model), model), device=H200))
    one_by_one = sum(time.of(streams, context + step * streams, 0, 0, streams) for step in range(steps))
    assert time.decode_run(streams, context, steps) == pytest.approx(one_by_one, rel=1e-3)


def test_a_run_that_is_launched_kernel_by_kernel_at_first() -> None:
    sharded = Deployment(shape=model_shape("llama-3.3-70b"), device=H200, tensor_parallel=8)
    time = time_of(sharded)
    one_by_one = [time.of(256, 256 * (3000 + step), 0, 0, 256) for step in range(6000)]
    assert one_by_one[0] == one_by_one[10] < one_by_one[-1], "launching is the bound at first, reading in the end"
    assert time.decode_run(256, 256 * 3000, 6000) == pytest.approx(sum(one_by_one))


def test_a_window_bounds_what_is_read_and_multiplied() -> None:
    windowed = time_of(Deployment(shape=shape_of_config(bench_shape("phi3-mini"), "phi3-mini"), device=H200))
    assert decode(windowed, 4, 3000) == decode(windowed, 4, 2500) > decode(windowed, 4, 1000)


def test_experts_are_read_as_far_as_tokens_visit_them() -> None:
    time = time_of(Deployment(shape=model_shape("qwen3-30b-a3b"), device=H200))
    one, many = decode(time, 1, 1), decode(time, 64, 1)
    assert many > 4 * one, "one token visits 8 of 128 experts, 64 tokens nearly all"
    assert decode(time, 128, 1) < 1.3 * many


def test_shards_divide_the_work_and_pay_for_links() -> None:
    long = StepWork(0, 0, 8192, attended(0, 8192), 1)
    shape = model_shape("llama-3.3-70b")
    one, four = (
        time_of(Deployment(shape=shape, device=H200, tensor_parallel=shards, weight_dtype="fp8")) for shards in (1, 4)
    )
    assert one.seconds(long) / 4 < four.seconds(long) < one.seconds(long) / 2.5
    assert four.shares(long)["links"] > 0 and one.shares(long)["links"] == 0


def test_stages_take_turns() -> None:
    work = StepWork(0, 0, 8192, attended(0, 8192), 1)
    one, two = (time_of(replace(LLAMA, pipeline_parallel=stages)).seconds(work) for stages in (1, 2))
    assert one < two < 1.1 * one


def test_shares_add_up() -> None:
    for work in (StepWork(1, 100, 0, 0, 1), StepWork(64, 64_000, 2048, attended(0, 2048), 65)):
        time = time_of(LLAMA)
        assert sum(time.shares(work).values()) == pytest.approx(time.seconds(work))


def test_fewer_bits_read_faster_and_compute_no_slower() -> None:
    dense, few = (time_of(replace(LLAMA, weight_dtype=form)) for form in ("bf16", "fp8"))  # type: ignore[arg-type]
    assert decode(few, 1) < 0.75 * decode(dense, 1)
    prompt = StepWork(0, 0, 4096, attended(0, 4096), 1)
    assert few.seconds(prompt) < dense.seconds(prompt)


def test_speculation_pays_for_few_streams_and_is_off_for_many() -> None:
    plain = time_of(LLAMA)
    drafted = time_of(replace(LLAMA, speculation=Speculation("ngram", acceptance=0.9)))
    hopeless = time_of(replace(LLAMA, speculation=Speculation("ngram", acceptance=0.0)))
    ratio = plain.token_s(1, 200) / drafted.token_s(1, 200)
    assert ratio == pytest.approx(3.65, rel=0.15), "results/h200.md: one stream, drafts right with 90%"
    assert hopeless.token_s(1, 200) == plain.token_s(1, 200)
    assert drafted.token_s(64, 64 * 200) == plain.token_s(64, 64 * 200)


def test_a_draft_model_costs_its_steps() -> None:
    draft = model_shape("qwen3-0.6b")
    ngram = time_of(replace(LLAMA, speculation=Speculation("ngram", 0.8)))
    model = time_of(replace(LLAMA, speculation=Speculation("draft", 0.8, draft=draft)))
    assert ngram.token_s(1, 200) < model.token_s(1, 200) < time_of(LLAMA).token_s(1, 200)
