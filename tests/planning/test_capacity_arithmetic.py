"""The steady state by hand: a replica whose steps take a sum of simple parts, so that every figure can be written down.

A step takes 10 ms, 1 ms for each sequence that decodes, 1 us for each token of their context, 10 us for each prompt
token, 1 ns for each position it attends to, and 0.1 ms for each sampled row.
"""

from __future__ import annotations

from math import inf, log, sqrt
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest

from penstock.errors import ConfigError
from penstock.planning import capacity
from penstock.planning.capacity import Replica, RequestShape, Slo, Steady, closed_loop, most_load, steady
from penstock.planning.step_time import StepWork

CHAT = RequestShape(prompt=1000, output=100, cached=200)
"""Computes 800 tokens, which attend to 600.5 positions on average; decodes with a context of 1,050."""
SHORT = RequestShape(prompt=100, output=4)
"""Computes 100 tokens, which attend to 50.5 positions on average; decodes with a context of 102."""
CHAT_PROMPT = 800 * (1e-5 + 600.5e-9) + 1e-4
SHORT_PROMPT = 100 * (1e-5 + 50.5e-9) + 1e-4
"""By how much one prompt lengthens steps, in whatever chunks."""


class Linear:
    """Instead of `StepTime`."""

    works: ClassVar[list[StepWork]] = []
    largest = "bandwidth"

    def __init__(self, deployment: Any, calibration: Any) -> None:
        pass

    def of(self, decodes: float, context: float, prefill: float, attended: float, samples: float) -> float:
        return 0.01 + 1e-3 * decodes + 1e-6 * context + 1e-5 * prefill + 1e-9 * attended + 1e-4 * samples

    def token_s(self, sequences: float, context: float) -> float:
        return self.of(sequences, context, 0, 0, sequences)

    def shares(self, work: StepWork) -> dict[str, float]:
        self.works.append(work)
        return {"bandwidth": 2.0, "compute": 1.0, "links": 1.0, "overhead": 1.0} | {self.largest: 3.0}


@pytest.fixture(autouse=True)
def linear_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(capacity, "StepTime", Linear)
    monkeypatch.setattr(capacity, "memory_plan", lambda deployment: deployment.plan)
    monkeypatch.setattr(Linear, "works", [])
    monkeypatch.setattr(Linear, "largest", "bandwidth")


def deployed(budget: int = 8192, most_running: int = 40, room: int = 100, longest: int = 4096, stages: int = 1) -> Any:
    plan = SimpleNamespace(problem=None, longest=longest, concurrency=lambda context: room)
    return SimpleNamespace(
        plan=plan, step_tokens=budget, most_running=most_running, label="a device", pipeline_parallel=stages
    )


def replica(request: RequestShape = CHAT, **settings: int) -> Replica:
    return Replica(deployed(**settings), None, request)  # type: ignore[arg-type]


def load(slo: Slo, request: RequestShape = CHAT, **settings: int) -> Steady:
    return most_load(deployed(**settings), None, request, slo)  # type: ignore[arg-type]


def chat_step(batch: float) -> float:
    """A decode step: 10 ms, and 1 ms + 1.05 ms + 0.1 ms for each sequence."""
    return 0.01 + 0.00215 * batch


def short_step(batch: float) -> float:
    return 0.01 + 0.001202 * batch


def test_a_request_in_tokens() -> None:
    assert (CHAT.computed, CHAT.context) == (800, 1050)
    assert RequestShape(10, 4).cached == 0 and RequestShape(10, 4).computed == 10
    assert RequestShape(10, 4, cached=10).computed == 1 and RequestShape(10, 4, cached=8.5).computed == 1.5
    assert RequestShape(1, 1).context == 1.5


@pytest.mark.parametrize(("prompt", "output", "cached"), [(0.5, 1, 0), (1, 0.5, 0), (5, 5, 5.5), (5, 5, -0.5)])
def test_a_request_has_a_prompt_an_output_and_no_more_cached_than_its_prompt(
    prompt: float, output: float, cached: float
) -> None:
    with pytest.raises(ConfigError):
        RequestShape(prompt, output, cached)


@pytest.mark.parametrize("wrong", [{"ttft_s": 0.0}, {"itl_s": 0.0}, {"itl_s": -0.5}])
def test_an_objective_is_above_zero(wrong: dict[str, float]) -> None:
    with pytest.raises(ConfigError, match="must be greater than 0 seconds"):
        Slo(**wrong)
    assert Slo(ttft_s=0.001, itl_s=0.5).itl_s == 0.5


def test_stages_have_a_step_each_in_flight() -> None:
    """Three lanes of one step each, with a third of the sequences, and a third of the prompts to wait for."""
    one, three = replica(), replica(stages=3)
    assert three.rate(30, 30) == pytest.approx(3 * one.rate(10, 10))
    narrow, narrow_lanes = replica(budget=20), replica(budget=20, stages=3)
    assert narrow_lanes.rate(30, 30) == pytest.approx(3 * narrow.rate(10, 10)), "where the token budget is the limit"
    alone, lane = three.closed(30), one.closed(10)
    assert (alone.itl_s, alone.gap_s, alone.ttft_s) == pytest.approx((lane.itl_s, lane.gap_s, lane.ttft_s))
    assert alone.prefill_share == pytest.approx(lane.prefill_share)


def test_what_fits_in_one_sequence_and_what_does_not() -> None:
    assert replica(longest=1100).slots == 40
    with pytest.raises(ConfigError, match="1,100 tokens does not fit"):
        replica(longest=1099)
    with pytest.raises(ConfigError, match="it is too large"):
        deployment = deployed()
        deployment.plan.problem = "it is too large"
        Replica(deployment, None, CHAT)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("room", "slots", "memory_bound"), [(0, 1, True), (1, 1, True), (39, 39, True), (40, 40, False), (41, 40, False)]
)
def test_slots_are_what_memory_and_the_engine_allow(room: int, slots: int, memory_bound: bool) -> None:
    found = replica(room=room)
    assert (found.slots, found.memory_bound) == (slots, memory_bound)
    assert found.closed(1).kv_use == 1 / max(room, 1)


@pytest.mark.parametrize(("running", "batch"), [(0.5, 1.5), (9, 10), (40, 40)])
def test_the_rate_is_how_many_run_over_how_long_they_take(running: float, batch: float) -> None:
    expected = running / (100 * chat_step(batch) + running * CHAT_PROMPT)
    assert replica().rate(running, batch) == pytest.approx(expected, rel=1e-12)
    assert replica(budget=2000).rate(running, batch) == pytest.approx(expected, rel=1e-12), "prompts fit still"


def test_the_rate_is_what_the_token_budget_lets_through() -> None:
    # 300 - 10 tokens a step, of 800 for each request.
    step = chat_step(10) + CHAT_PROMPT * 290 / 800
    few = replica(RequestShape(1000, 2, 200), budget=300)
    context = 0.01 + 10 * (1e-3 + 1.001e-3 + 1e-4)
    assert few.rate(10, 10) == pytest.approx(290 / (800 * (context + CHAT_PROMPT * 290 / 800)), rel=1e-12)
    assert replica(budget=300).rate(10, 10) == pytest.approx(10 / (100 * chat_step(10) + 10 * CHAT_PROMPT))
    assert replica(budget=300).closed(10).gap_s == pytest.approx(step, rel=1e-12)


@pytest.mark.parametrize("budget", [8, 10, 11])
def test_a_budget_that_decoding_uses_up_still_lets_a_token_through(budget: int) -> None:
    found = replica(budget=budget).closed(10)
    step = chat_step(10) + CHAT_PROMPT / 800
    assert found.gap_s == pytest.approx(step, rel=1e-12)
    assert found.requests_per_s == pytest.approx(1 / (800 * step), rel=1e-12)
    assert found.ttft_mean_s == pytest.approx(800 * step + step / 2, rel=1e-9), "all steps have prompts"


def test_a_closed_loop() -> None:
    found, decode = replica().closed(10), chat_step(10)
    rate = 10 / (100 * decode + 10 * CHAT_PROMPT)
    step = decode + CHAT_PROMPT
    itl = decode + 10 * CHAT_PROMPT / 100
    busy = rate * step
    ahead = busy * step + (1 - busy) * decode
    assert found.requests_per_s == pytest.approx(rate, rel=1e-12) and found.concurrency == 10
    assert (found.itl_s, found.gap_s) == pytest.approx((itl, step), rel=1e-12)
    assert (found.ttft_mean_s, found.ttft_s) == pytest.approx((step + ahead / 2, step + ahead), rel=1e-12)
    assert found.e2e_s == pytest.approx(step + ahead / 2 + 99 * itl, rel=1e-12)
    assert (found.output_tps, found.input_tps) == pytest.approx((100 * rate, 1000 * rate), rel=1e-12)
    assert found.prefill_share == pytest.approx(rate * CHAT_PROMPT, rel=1e-12) and found.kv_use == 0.1
    most = 40 / (100 * chat_step(40) + 40 * CHAT_PROMPT)
    assert found.utilisation == pytest.approx(rate / most, rel=1e-12) and found.slots == 40


def test_those_beyond_the_slots_wait_for_those_before_them() -> None:
    full, beyond = replica().closed(40), replica().closed(50)
    waited = 10 / full.requests_per_s
    for name in ("ttft_s", "ttft_mean_s", "e2e_s"):
        assert getattr(beyond, name) == pytest.approx(getattr(full, name) + waited, rel=1e-12)
    assert (beyond.concurrency, beyond.requests_per_s, beyond.itl_s) == (40, full.requests_per_s, full.itl_s)
    assert full.utilisation == 1


def test_a_prompt_in_several_chunks() -> None:
    found, decode = replica(budget=300).closed(10), chat_step(10)
    rate = 10 / (100 * decode + 10 * CHAT_PROMPT)
    step = decode + CHAT_PROMPT * 290 / 800
    busy = rate * step * 800 / 290
    assert 0.1 < busy < 1
    ahead = busy * step + (1 - busy) * decode
    assert found.ttft_s == pytest.approx(step * 800 / 290 + ahead, rel=1e-12)


def test_prompts_that_share_a_step() -> None:
    """Twelve requests of four tokens each: three end and three begin with every step."""
    found, decode = replica(SHORT).closed(12), short_step(12)
    rate = 12 / (4 * decode + 12 * SHORT_PROMPT)
    step = decode + 3 * SHORT_PROMPT
    assert found.gap_s == pytest.approx(step, rel=1e-12)
    busy = rate * step / 3
    ahead = busy * step + (1 - busy) * decode
    assert found.ttft_s == pytest.approx(step + ahead, rel=1e-12)


def md1(load: float, service: float) -> tuple[float, float]:
    """Mean and 95th percentile of waiting for one server with a fixed time of service."""
    return load * service / 2 / (1 - load), max(0.0, log(load / 0.05)) * service / 2 / (1 - load)


def test_random_arrivals_wait_for_prompts_before_them_and_for_slots() -> None:
    found, decode = replica().open(9), chat_step(10)
    rate = 9 / (100 * decode + 9 * CHAT_PROMPT)
    step, itl = decode + CHAT_PROMPT, decode + 9 * CHAT_PROMPT / 100
    busy = rate * step
    ahead = busy * step + (1 - busy) * decode
    # Sakasegawa: of 40 slots 22.5% are taken.
    waits = 0.225 ** (sqrt(2 * 41) - 1)
    mean = step + ahead / 2 + md1(busy, step)[0] + waits * 100 * itl / (40 * (1 - 0.225))
    assert found.requests_per_s == pytest.approx(rate, rel=1e-12) and found.itl_s == pytest.approx(itl, rel=1e-12)
    assert found.ttft_mean_s == pytest.approx(mean, rel=1e-12)
    # A moment with as many requests as one in twenty has.
    low, high = (n / (100 * chat_step(n + 1) + n * CHAT_PROMPT) for n in (0.98 * 9, 1.02 * 9))
    crowd = 9 + 1.645 * sqrt(rate / ((high - low) / (0.04 * 9)))
    assert 10 < crowd < 40
    decode = chat_step(crowd)
    step = decode + CHAT_PROMPT
    busy = rate * step
    late = step + busy * step + (1 - busy) * decode + md1(busy, step)[1]
    assert found.ttft_s == pytest.approx(late, rel=1e-9)


def test_fewer_than_one_sequence_seldom_meets_another() -> None:
    found, decode = replica().open(0.5), chat_step(1.5)
    rate = 0.5 / (100 * decode + 0.5 * CHAT_PROMPT)
    step = decode + CHAT_PROMPT
    waits = 0.0125 ** (sqrt(82) - 1) * 100 * found.itl_s / (40 * 0.9875)
    mean = step + 0.5 * decode / 2 + md1(rate * step, step)[0] + waits
    assert found.ttft_mean_s == pytest.approx(mean, rel=1e-12)
    one = replica().open(1.0)
    busy = one.requests_per_s * (chat_step(2) + CHAT_PROMPT)
    ahead = busy * one.gap_s + (1 - busy) * chat_step(2)
    assert one.ttft_mean_s == pytest.approx(one.gap_s + ahead / 2 + md1(busy, one.gap_s)[0], rel=1e-9)


def test_a_full_replica_has_a_queue_in_bad_moments() -> None:
    """39 of 40 run on average: one in twenty moments has more requests than slots, which wait for others to end."""
    found, decode = replica().open(39), chat_step(40)
    most = 40 / (100 * decode + 40 * CHAT_PROMPT)
    rate = 39 / (100 * decode + 39 * CHAT_PROMPT)
    low = 38.22 / (100 * chat_step(39.22) + 38.22 * CHAT_PROMPT)
    high = 39.78 / (100 * decode + 39.78 * CHAT_PROMPT)
    many = 39 + 1.645 * sqrt(rate / ((high - low) / 1.56))
    assert many > 45
    itl = decode + 39 * CHAT_PROMPT / 100
    waits = 0.975 ** (sqrt(82) - 1)
    for_slots = log(waits / 0.05) * 100 * itl / (40 * 0.025)
    step = decode + CHAT_PROMPT
    busy = rate * step
    first = step + busy * step + (1 - busy) * decode + md1(busy, step)[1]
    assert found.ttft_s == pytest.approx(first + max(for_slots, (many - 40) / most), rel=1e-9)
    mean = step + (busy * step + (1 - busy) * decode) / 2 + md1(busy, step)[0] + waits * 100 * itl / (40 * 0.025)
    assert found.ttft_mean_s == pytest.approx(mean, rel=1e-9)


def test_where_a_larger_batch_gains_little_the_number_of_requests_swings_widely() -> None:
    """At 30 of 40 the queue for slots is short, and the wait is that of the swing."""
    found = replica().open(30)
    decode = chat_step(31)
    rate = 30 / (100 * decode + 30 * CHAT_PROMPT)
    low, high = (n / (100 * chat_step(n + 1) + n * CHAT_PROMPT) for n in (29.4, 30.6))
    many = 30 + 1.645 * sqrt(rate / ((high - low) / 1.2))
    assert many > 41
    full = chat_step(40)
    step = full + CHAT_PROMPT
    busy = rate * step
    first = step + busy * step + (1 - busy) * full + md1(busy, step)[1]
    waits = 0.75 ** (sqrt(82) - 1)
    for_slots = max(0.0, log(waits / 0.05)) * 100 * found.itl_s / (40 * 0.25)
    swing = (many - 40) / (40 / (100 * full + 40 * CHAT_PROMPT))
    assert found.ttft_s == pytest.approx(first + max(for_slots, swing), rel=1e-9) and swing > for_slots


def test_a_rate_that_no_longer_rises_with_the_batch() -> None:
    """The token budget is the limit: the swing is bounded by a slope of a thousandth of rate over number."""
    found = replica(RequestShape(1000, 2, 200), budget=300)
    state = found.open(20)
    many = 20 + 1.645 * sqrt(20 / 1e-3)
    assert found.rate(20.4, 21.4) < found.rate(19.6, 20.6) == pytest.approx(279.4 / (800 * state.gap_s), rel=0.1)
    assert 0 < state.ttft_s - (many - 40) / found.most < 1


def test_nothing_at_all() -> None:
    idle = replica().open(0.0)
    assert (idle.requests_per_s, idle.concurrency, idle.utilisation, idle.kv_use) == (0, 0, 0, 0)
    assert idle.ttft_s == idle.ttft_mean_s == idle.gap_s == pytest.approx(chat_step(1) + CHAT_PROMPT)


def test_prompts_that_share_steps_queue_for_the_budget_only() -> None:
    """Of random arrivals, with three prompts in a step: a third of what steps, not the budget, make them wait."""
    found, decode = replica(SHORT).open(11), short_step(12)
    rate = 11 / (4 * decode + 11 * SHORT_PROMPT)
    step = decode + 3 * SHORT_PROMPT
    busy = rate * step / 3
    budget = rate * (SHORT_PROMPT + decode / ((8192 - 12) / 100))
    assert budget < busy < 1
    wait = md1(budget + (busy - budget) / 3, step)[0]
    ahead = busy * step + (1 - busy) * decode
    slots = (11 / 40) ** (sqrt(82) - 1) * 4 * found.itl_s / (40 * (1 - 11 / 40))
    assert found.ttft_mean_s == pytest.approx(step + ahead / 2 + wait + slots, rel=1e-9)


def test_shared_steps_with_little_budget() -> None:
    """150 - 12 tokens fit 1.38 of the three prompts that arrive with a step; 110 - 12 not even one."""
    for budget in (150, 110):
        found, decode = replica(SHORT, budget=budget).closed(12), short_step(12)
        chunk = budget - 12
        step = decode + SHORT_PROMPT * chunk / 100
        rate = min(chunk / (100 * step), 12 / (4 * decode + 12 * SHORT_PROMPT))
        service = step * max(1.0, 100 / chunk)
        busy = min(1.0, rate * service / 3)
        ahead = busy * step + (1 - busy) * decode
        assert found.requests_per_s == pytest.approx(rate, rel=1e-12)
        assert found.ttft_s == pytest.approx(service + ahead, rel=1e-12)
        open_ = replica(SHORT, budget=budget).open(11)
        rate = min(chunk / (100 * step), 11 / (4 * decode + 11 * SHORT_PROMPT))
        busy = min(1.0, rate * service / 3)
        limit = min(busy, rate * (SHORT_PROMPT + decode / max(1.0, chunk / 100)))
        wait = md1(limit + (busy - limit) / 3, service)[0]
        slots = (11 / 40) ** (sqrt(82) - 1) * 4 * open_.itl_s / (40 * (1 - 11 / 40))
        ahead = busy * step + (1 - busy) * decode
        assert open_.ttft_mean_s == pytest.approx(service + ahead / 2 + wait + slots, rel=1e-9)


def test_a_budget_for_one_and_a_half_prompts() -> None:
    """Requests of ten tokens, twelve at a time: 1.2 prompts share a step, and 1.5 would fit."""
    found, decode = replica(RequestShape(prompt=100, output=10), budget=162).open(11), 0.01 + 12 * 0.001205
    rate = 11 / (10 * decode + 11 * SHORT_PROMPT)
    step = decode + 1.2 * SHORT_PROMPT
    busy, limit = rate * step / 1.2, rate * (SHORT_PROMPT + decode / 1.5)
    assert limit < busy < 1
    wait = md1(limit + (busy - limit) / 1.2, step)[0]
    slots = (11 / 40) ** (sqrt(82) - 1) * 10 * found.itl_s / (40 * (1 - 11 / 40))
    ahead = busy * step + (1 - busy) * decode
    assert found.ttft_mean_s == pytest.approx(step + ahead / 2 + wait + slots, rel=1e-9)


@pytest.mark.parametrize("running", [0.02, 0.5, 3.0, 20.0, 39.5])
def test_the_state_at_a_rate_is_that_with_so_many_running(running: float) -> None:
    found = replica().at(replica().open(running).requests_per_s)
    assert found.concurrency == pytest.approx(running, abs=2e-6)
    assert found.ttft_s == pytest.approx(replica().open(running).ttft_s, rel=1e-4)


def test_at_small_rates_the_number_is_proportional_to_the_rate() -> None:
    at_most = 0.01 / (100 * chat_step(1.01) + 0.01 * CHAT_PROMPT)
    assert replica().at(at_most * 1e-7).concurrency == pytest.approx(1e-9, rel=1e-9)
    assert replica().at(at_most / 2).concurrency == pytest.approx(0.005, rel=1e-9)
    assert replica().at(replica().rate(0.01, 1.01)).concurrency == pytest.approx(0.01, rel=1e-12)
    single = replica(most_running=1)
    alone = 0.01 / (100 * chat_step(1) + 0.01 * CHAT_PROMPT)
    assert single.at(alone / 2).concurrency == pytest.approx(0.005, rel=1e-9), "one slot: batches of one"


def test_from_the_largest_rate_on_queues_grow_without_end() -> None:
    most = replica().most
    assert most == pytest.approx(40 / (100 * chat_step(40) + 40 * CHAT_PROMPT), rel=1e-12)
    for rate in (most, 2 * most):
        found = replica().at(rate)
        assert found.ttft_s == found.ttft_mean_s == found.e2e_s == inf
        assert found.utilisation == rate / most and found.requests_per_s == most and found.concurrency == 40
    assert replica().at(0.999 * most).ttft_s < inf


def test_rates_and_numbers_in_flight_are_above_zero() -> None:
    one: Any = (deployed(), None, CHAT)
    assert steady(*one, 0.5).requests_per_s == pytest.approx(0.5) and closed_loop(*one, 1).concurrency == 1
    with pytest.raises(ConfigError, match="greater than 0, not 0"):
        steady(*one, 0.0)
    with pytest.raises(ConfigError, match="at least 1, not 0"):
        closed_loop(*one, 0)


def test_the_bottleneck_is_that_of_a_mean_step() -> None:
    found = replica().closed(10)
    prefill = found.requests_per_s * found.itl_s * 800
    assert Linear.works == [StepWork(10, 10_500, round(prefill), round(prefill * 600), 10)]
    assert prefill > 50


@pytest.mark.parametrize(
    ("largest", "room", "running", "named"),
    [
        ("bandwidth", 100, 36, "bandwidth"), ("bandwidth", 100, 37, "slots"), ("bandwidth", 40, 37, "slots"),
        ("bandwidth", 20, 18, "bandwidth"), ("bandwidth", 20, 19, "memory"), ("compute", 100, 40, "compute"),
        ("links", 100, 5, "links"), ("overhead", 20, 20, "memory"),
    ],
)  # fmt: skip
def test_what_limits_a_full_replica(
    largest: str, room: int, running: int, named: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Linear, "largest", largest)
    assert replica(room=room).closed(running).bottleneck == named


def test_without_objectives_all_slots_are_taken() -> None:
    found = load(Slo())
    assert found.concurrency == 40 and found.limited_by == found.bottleneck == "slots"
    assert found.requests_per_s == replica().most


@pytest.mark.parametrize(("name", "limited_by"), [("itl_s", "itl"), ("ttft_s", "ttft")])
@pytest.mark.parametrize("running", [0.5, 20.0])
def test_the_most_load_is_where_an_objective_is_just_kept(name: str, limited_by: str, running: float) -> None:
    found = load(Slo(**{name: getattr(replica().open(running), name)}))
    assert found.concurrency == pytest.approx(running, abs=1e-5) and found.limited_by == limited_by
    assert found.requests_per_s == pytest.approx(replica().open(running).requests_per_s, rel=1e-5)


def test_of_two_objectives_the_one_that_is_missed_first_counts() -> None:
    early, late = replica().open(15), replica().open(25)
    assert load(Slo(ttft_s=early.ttft_s, itl_s=late.itl_s)).limited_by == "ttft"
    assert load(Slo(ttft_s=late.ttft_s, itl_s=early.itl_s)).limited_by == "itl"
    assert load(Slo(ttft_s=early.ttft_s, itl_s=replica().open(15.5).itl_s)).limited_by == "ttft", "within one percent"


def test_first_tokens_that_are_late_for_want_of_slots() -> None:
    late = replica().open(38)
    assert load(Slo(ttft_s=late.ttft_s)).limited_by == "slots"
    assert load(Slo(ttft_s=replica(room=20).open(19).ttft_s), room=20).limited_by == "memory"
    assert load(Slo(itl_s=late.itl_s)).limited_by == "itl", "not for want of slots"


def test_objectives_that_a_full_replica_keeps() -> None:
    full = replica().open(40)
    found = load(Slo(itl_s=full.itl_s))
    assert (found.concurrency, found.limited_by) == (40, "slots") and found.ttft_s == inf


@pytest.mark.parametrize(("slo", "limited_by"), [(Slo(ttft_s=1e-3), "ttft"), (Slo(itl_s=1e-3), "itl")])
def test_an_objective_that_one_request_alone_misses(slo: Slo, limited_by: str) -> None:
    found, alone = load(slo), replica().open(40e-6)
    assert found.limited_by == limited_by
    assert (found.ttft_s, found.itl_s, found.e2e_s) == (alone.ttft_s, alone.itl_s, alone.e2e_s)
    assert found.requests_per_s == found.concurrency == found.output_tps == found.input_tps == 0
    assert found.prefill_share == found.kv_use == found.utilisation == 0


def test_an_objective_that_one_request_alone_just_keeps() -> None:
    alone = replica().open(40e-6)
    for slo in (Slo(ttft_s=alone.ttft_s), Slo(itl_s=alone.itl_s)):
        assert 40e-6 <= load(slo).concurrency + 1e-6 < 1e-3 and load(slo).requests_per_s > 0
