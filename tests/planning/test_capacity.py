"""The steady state of a replica: Little's law, saturation, objectives, and what is named as the limit."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from math import inf, isfinite

import pytest

from penstock.bench.workloads import named
from penstock.errors import ConfigError
from penstock.planning.calibration import calibration_for
from penstock.planning.capacity import RequestShape, Slo, closed_loop, most_load, steady
from penstock.planning.catalogue import device
from penstock.planning.deployment import Deployment
from penstock.planning.model_shape import model_shape

H200 = device("h200")
FACTORS = calibration_for(H200)
LLAMA = Deployment(shape=model_shape("llama-8b"), device=H200, max_model_len=8192)
CHAT = RequestShape(prompt=2000, output=500)


def test_littles_law_and_tokens() -> None:
    state = steady(LLAMA, FACTORS, CHAT, 5)
    assert state.requests_per_s == pytest.approx(5, rel=1e-4)
    assert state.concurrency == pytest.approx(5 * 500 * state.itl_s, rel=0.01)
    assert state.output_tps == pytest.approx(2500, rel=1e-4)
    assert state.input_tps == pytest.approx(10_000, rel=1e-4)
    assert state.e2e_s == pytest.approx(state.ttft_mean_s + 499 * state.itl_s)


def test_everything_gets_slower_with_load() -> None:
    states = [steady(LLAMA, FACTORS, CHAT, rate) for rate in (0.01, 1, 4, 8, 10)]
    for before, after in pairwise(states):
        assert before.ttft_s < after.ttft_s and before.itl_s < after.itl_s and before.kv_use < after.kv_use
        assert before.ttft_mean_s <= before.ttft_s and before.itl_s <= before.gap_s


def test_a_request_a_year() -> None:
    alone, rare = (steady(LLAMA, FACTORS, CHAT, rate) for rate in (1e-3, 3e-8))
    assert rare.requests_per_s == pytest.approx(3e-8, rel=0.01)
    assert rare.ttft_s == pytest.approx(alone.ttft_s, rel=0.01) and rare.itl_s == pytest.approx(alone.itl_s, rel=0.01)


def test_more_than_it_can_serve() -> None:
    state = steady(LLAMA, FACTORS, CHAT, 1000)
    full = closed_loop(LLAMA, FACTORS, CHAT, 256)
    assert state.ttft_s == state.e2e_s == inf and state.utilisation > 1
    assert state.requests_per_s == pytest.approx(full.requests_per_s), "what it serves, not what arrives"


def test_the_mix_row_in_its_steady_state() -> None:
    """`mix` starts 256 requests and lets the batch drain. Its mean batch, held steady, must give about its throughput
    (results/h200.md: 10,418 output tok/s)."""
    lengths = list(named("mix").lengths())
    prompt = sum(inputs for inputs, _ in lengths) / len(lengths)
    output = sum(outputs for _, outputs in lengths) / len(lengths)
    longest = max(outputs for _, outputs in lengths)
    mean_batch = round(sum(outputs for _, outputs in lengths) / longest)
    state = closed_loop(LLAMA, FACTORS, RequestShape(prompt, output), mean_batch)
    assert state.output_tps == pytest.approx(10_418, rel=0.15)


def test_most_load_keeps_the_objectives_and_names_the_one_that_stops_it() -> None:
    for slo in (Slo(ttft_s=0.5, itl_s=0.05), Slo(itl_s=0.01), Slo(ttft_s=0.1)):
        state = most_load(LLAMA, FACTORS, CHAT, slo)
        assert state.ttft_s <= (slo.ttft_s or inf) * 1.001 and state.itl_s <= (slo.itl_s or inf) * 1.001
        more = steady(LLAMA, FACTORS, CHAT, 1.02 * state.requests_per_s)
        assert more.ttft_s > (slo.ttft_s or inf) or more.itl_s > (slo.itl_s or inf)
    assert most_load(LLAMA, FACTORS, CHAT, Slo(itl_s=0.01)).limited_by == "itl"
    assert most_load(LLAMA, FACTORS, CHAT, Slo(ttft_s=0.1)).limited_by == "ttft"


def test_an_objective_that_not_even_one_request_meets() -> None:
    state = most_load(LLAMA, FACTORS, CHAT, Slo(ttft_s=0.001))
    assert (state.requests_per_s, state.limited_by) == (0, "ttft")
    assert 0.001 < state.ttft_s < 0.1, "what one request alone would get"
    assert most_load(LLAMA, FACTORS, CHAT, Slo(itl_s=0.001)).limited_by == "itl"


def test_without_objectives_the_device_is_the_limit() -> None:
    assert most_load(LLAMA, FACTORS, RequestShape(4000, 8), Slo()).limited_by == "compute"
    small = replace(LLAMA, max_running=8)
    assert most_load(small, FACTORS, CHAT, Slo()).limited_by == "slots"
    tight = replace(LLAMA, shape=model_shape("llama-3.3-70b"), weight_dtype="fp8", max_model_len=None)
    state = most_load(tight, FACTORS, RequestShape(30_000, 500), Slo())
    assert state.slots < 20 and state.limited_by in ("memory", "compute")
    assert most_load(tight, FACTORS, RequestShape(30_000, 500, cached=29_900), Slo()).limited_by == "memory"


@pytest.mark.parametrize("shards", [1, 8])
def test_short_answers_are_bounded_by_the_token_budget(shards: int) -> None:
    deployment = replace(LLAMA, tensor_parallel=shards)
    state = most_load(deployment, FACTORS, RequestShape(500, 2), Slo())
    assert state.requests_per_s * 500 * state.gap_s <= deployment.step_tokens
    half = steady(deployment, FACTORS, RequestShape(500, 2), state.requests_per_s / 2)
    assert half.ttft_mean_s < half.ttft_s < 1


def test_cached_prompts_cost_nothing_but_their_context() -> None:
    cold, warm = (most_load(LLAMA, FACTORS, RequestShape(4000, 200, cached), Slo(ttft_s=1)) for cached in (0, 3500))
    assert warm.requests_per_s > 1.8 * cold.requests_per_s
    assert warm.prefill_share < cold.prefill_share


def test_those_without_a_slot_wait_in_a_closed_loop() -> None:
    few = replace(LLAMA, max_running=16)
    at, beyond = (closed_loop(few, FACTORS, CHAT, concurrency) for concurrency in (16, 32))
    assert beyond.output_tps == at.output_tps
    assert beyond.e2e_s == pytest.approx(2 * at.e2e_s, rel=0.1)


def test_waiting_for_slots_shows_in_the_first_token() -> None:
    few = replace(LLAMA, max_running=16)
    most = closed_loop(few, FACTORS, CHAT, 16).requests_per_s
    early, late = (steady(few, FACTORS, CHAT, share * most) for share in (0.5, 0.97))
    assert early.ttft_s < 0.3 and late.ttft_s > 2 and isfinite(late.ttft_s)


@pytest.mark.parametrize("model, weights", [("qwen3-30b-a3b", "bf16"), ("gemma-3-27b", "bf16"), ("deepseek-v3", "fp8")])
def test_other_kinds_of_models(model: str, weights: str) -> None:
    shape = model_shape(model)
    deployment = Deployment(shape=shape, device=H200, tensor_parallel=8, weight_dtype=weights)  # type: ignore[arg-type]
    state = most_load(deployment, FACTORS, CHAT, Slo(ttft_s=2, itl_s=0.1))
    assert state.requests_per_s > 1


@pytest.mark.parametrize(
    "wrong, message",
    [
        (lambda: RequestShape(0, 10), "at least one prompt token"),
        (lambda: RequestShape(100, 10, cached=200), "between 0 and the 100 of a prompt"),
        (lambda: Slo(ttft_s=-1), "ttft_s must be greater than 0"),
        (lambda: steady(LLAMA, FACTORS, CHAT, -3), "requests per second must be greater than 0, not -3"),
        (lambda: closed_loop(LLAMA, FACTORS, CHAT, 0), "concurrency must be at least 1"),
        (lambda: steady(LLAMA, FACTORS, RequestShape(9000, 10), 1), "9,010 tokens does not fit .* takes 8,192"),
        (
            lambda: steady(Deployment(shape=model_shape("llama-3.3-70b"), device=device("l4")), FACTORS, CHAT, 1),
            "llama-3.3-70b does not fit",
        ),
    ],
)
def test_bad_input_is_a_sentence(wrong, message: str) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(ConfigError, match=message):
        wrong()
