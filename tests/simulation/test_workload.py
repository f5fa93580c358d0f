"""The requests of a scenario."""

from __future__ import annotations

import itertools
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from penstock.simulation.arrival import Arrival, Source
from penstock.simulation.scenario import RetryConfig, Scenario, SpikeConfig, TenantConfig, WorkloadConfig
from penstock.simulation.workload import source


def scenario(seconds: float = 100.0, **workload: Any) -> Scenario:
    return Scenario(duration_s=seconds, workload=WorkloadConfig(**{"rate": 10.0, **workload}))


def drawn(asked: Scenario) -> list[Arrival]:
    return list(source(asked).arrivals())


def test_requests_come_in_order_at_their_rate_until_the_end() -> None:
    found = drawn(scenario())
    assert len(found) == pytest.approx(1000, rel=0.1)
    assert all(one.at <= other.at for one, other in itertools.pairwise(found)) and found[-1].at < 100
    assert {arrival.tenant for arrival in found} == {"everyone"}
    assert all(256 <= arrival.prompt_tokens <= 768 and 64 <= arrival.output_tokens <= 192 for arrival in found)
    assert len({arrival.prompt for arrival in found}) == len(found), "nothing is shared"


def test_a_seed_is_the_same_traffic() -> None:
    asked = scenario(turns=4, tenant_count=5, arrivals="burst")
    assert drawn(asked) == drawn(asked)


def test_lengths_without_spread_and_a_limit_of_requests() -> None:
    found = drawn(scenario(spread=0.0, input_tokens=77, output_tokens=11, requests=5, arrivals="constant"))
    assert [(a.at, a.prompt_tokens, a.output_tokens) for a in found] == [
        (pytest.approx(n / 10), 77, 11) for n in range(5)
    ]


def test_tenants_have_their_shares_tiers_and_lengths() -> None:
    tenants = (
        TenantConfig(name="bank", tier="enterprise", share=3.0, input_tokens=1000),
        TenantConfig(name="anon", tier="free", share=1.0),
    )
    found = drawn(scenario(400.0, tenants=tenants, system_tokens=200, spread=0.0))
    count = Counter(arrival.tenant for arrival in found)
    assert count["bank"] / count["anon"] == pytest.approx(3.0, rel=0.15)
    bank, anon = (next(arrival for arrival in found if arrival.tenant == name) for name in ("bank", "anon"))
    assert (bank.rank, bank.weight, anon.rank, anon.weight) == (0, 4.0, 1, 1.0)
    assert (bank.prompt_tokens, anon.prompt_tokens) == (1200, 712)
    systems = {(arrival.tenant, arrival.prompt[0]) for arrival in found}
    assert len(systems) == 2 and bank.prompt[0] != anon.prompt[0], "one system prompt per tenant"


def test_few_of_many_tenants_send_most() -> None:
    found = Counter(arrival.tenant for arrival in drawn(scenario(200.0, tenant_count=12)))
    assert len(found) == 12 and found["t1"] > 4 * found["t12"]


def test_a_spike_and_a_day() -> None:
    found = drawn(scenario(60.0, spikes=(SpikeConfig(20.0, 20.0, 10.0),)))
    assert sum(20 <= arrival.at < 40 for arrival in found) == pytest.approx(2000, rel=0.1)
    night = len(drawn(scenario(3600.0, rate=1.0, day="office", start_hour=3)))
    morning = len(drawn(scenario(3600.0, rate=1.0, day="office", start_hour=10)))
    assert morning > 5 * night
    assert scenario(users=86_400, requests_per_user=2.0, rate=None).workload.requests_per_s == 2.0


def test_the_next_turn_contains_the_conversation() -> None:
    stream = source(scenario(turns=6, system_tokens=100, think_s=2.0))
    longest = 0
    for first in stream.arrivals():
        turn: Arrival | None = first
        count = 0
        while turn is not None:
            count += 1
            following = stream.after(turn, turn.at + 1.0)
            if following is not None:
                assert following.at > turn.at + 1.0 and following.session == turn.session != ""
                assert following.prompt[: len(turn.prompt)] == turn.prompt
                said = following.prompt[len(turn.prompt)]
                assert (said.id, said.tokens) == (turn.answer, turn.output_tokens)
            turn = following
        longest = max(longest, count)
    assert 6 < longest <= 11


def test_conversations_are_the_same_whenever_answers_come() -> None:
    def lengths(wait: float) -> list[list[tuple[int, int]]]:
        stream = source(scenario(5.0, turns=4))
        told = []
        for first in list(stream.arrivals()):
            turns = [first]
            while (following := stream.after(turns[-1], turns[-1].at + wait * 1e-6)) is not None and len(turns) < 3:
                turns.append(following)
            told.append([(turn.prompt_tokens, turn.output_tokens) for turn in turns])
        return told

    assert lengths(1.0) == lengths(2.0)


def test_a_conversation_ends_at_the_window_and_with_the_day() -> None:
    stream = source(scenario(turns=50, input_tokens=1000, output_tokens=500))
    first = next(iter(stream.arrivals()))
    turn, last = first, first
    while (following := stream.after(turn, turn.at)) is not None:
        turn, last = following, turn
    assert turn.prompt_tokens + turn.output_tokens <= 8192 and turn is not last
    other = next(iter(source(scenario(turns=50)).arrivals()))
    assert source(scenario(turns=50)).after(other, 100.0) is None


def test_a_closed_loop_sends_the_next_when_one_has_ended() -> None:
    loop = source(scenario(rate=None, arrivals="closed", concurrency=3, requests=5))
    first = list(loop.arrivals())
    assert [arrival.at for arrival in first] == [0.0] * 3
    following = loop.after(first[0], 2.5)
    assert following is not None and following.at == 2.5
    again = loop.refused(first[1], 3.0, 20.0)
    assert again is not None and again.at > 3.0, "a refused request's place is taken by the next"
    assert loop.after(first[2], 4.0) is None, "five were asked for"
    assert source(scenario(rate=None, arrivals="closed")).after(first[0], 100.0) is None, "the time is over"


def test_clients_try_again_as_often_as_they_are_told() -> None:
    retries = RetryConfig(attempts=2, backoff_s=1.0)
    stream = source(scenario(retries=retries))
    first = next(iter(stream.arrivals()))
    second = stream.refused(first, 10.0, 5.0)
    assert second is not None and (second.at, second.attempt, second.first_at) == (15.0, 1, first.at)
    assert second.prompt == first.prompt
    third = stream.refused(second, 20.0, None)
    assert third is not None and 21.5 <= third.at <= 22.5 and third.first_at == first.at
    assert stream.refused(third, 30.0, 1.0) is None
    assert source(scenario()).refused(first, 10.0, 5.0) is None, "without retries nobody comes back"
    deaf: Source = source(scenario(retries=RetryConfig(attempts=1, obey_retry_after=False)))
    hasty = deaf.refused(first, 10.0, 50.0)
    assert hasty is not None and hasty.at < 11.5


def test_a_trace_is_replayed(tmp_path: Path) -> None:
    (tmp_path / "trace.csv").write_text(
        "TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:17:03.0000000,7,2\n2023-11-16 18:17:04.5000000,9,1\n"
    )
    trace = str(tmp_path / "trace.csv")
    found = drawn(scenario(rate=None, arrivals="trace", trace=trace, speed=3.0))
    assert [(a.at, a.prompt_tokens, a.output_tokens) for a in found] == [(0.0, 7, 2), (pytest.approx(0.5), 9, 1)]
    assert len(drawn(scenario(0.3, rate=None, arrivals="trace", trace=trace, speed=3.0))) == 1


def test_admission_sees_the_clients_limit() -> None:
    arrival = drawn(scenario(1.0, max_tokens=4096))[0]
    assert arrival.limit == 4096 > arrival.output_tokens
