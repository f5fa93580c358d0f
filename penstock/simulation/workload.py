"""The requests of a scenario: a stream at a rate, a recorded trace, a closed loop; alone or as conversations.

Everything random is drawn from the scenario's seed when a request or a conversation begins, never when one ends, so the
same scenario is the same traffic under every policy and fleet.
"""

from __future__ import annotations

import itertools
import random
from bisect import bisect
from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from penstock.bench.arrivals import Planned, from_trace, positions
from penstock.config.schema import TierConfig
from penstock.planning.workload import curve
from penstock.simulation.arrival import Arrival, Segment, Source
from penstock.simulation.rate_curve import RateCurve, Surge
from penstock.simulation.scenario import RetryConfig, Scenario, TenantConfig, WorkloadConfig


@dataclass(frozen=True, slots=True)
class Tenant:
    name: str
    rank: int
    weight: float
    system: Segment | None
    input_tokens: int
    output_tokens: int


@dataclass(frozen=True, slots=True)
class Turn:
    """A later question of a conversation."""

    question: int
    answer: int
    pause: float


class Draw:
    """Draws tenants, lengths and conversations, and numbers every text."""

    def __init__(self, scenario: Scenario) -> None:
        self.work = scenario.workload
        self.rng = random.Random(scenario.seed)
        self._texts = itertools.count(1)
        self._max_tokens = scenario.engine.max_model_len
        self._turns: dict[str, deque[Turn]] = {}
        listed = tenants(self.work)
        self._tenants = {tenant.name: self._tenant(tenant, scenario.tiers) for tenant in listed}
        self._names = list(self._tenants)
        self._shares = list(itertools.accumulate(tenant.share for tenant in listed))
        self._sessions = itertools.count()

    def _tenant(self, tenant: TenantConfig, tiers: Iterable[TierConfig]) -> Tenant:
        tier = next(tier for tier in tiers if tier.name == tenant.tier)
        system = Segment(next(self._texts), self.work.system_tokens) if self.work.system_tokens else None
        inputs, outputs = tenant.input_tokens or self.work.input_tokens, tenant.output_tokens or self.work.output_tokens
        return Tenant(tenant.name, tier.priority, tier.weight, system, inputs, outputs)

    def first(self, at: float) -> Arrival:
        """A request, or the first one of a conversation."""
        tenant = self._who()
        session = ""
        if self.work.turns > 1:
            session = f"s{next(self._sessions)}"
            self._turns[session] = self._later_turns(tenant)
        question, answer = self._around(tenant.input_tokens), self._around(tenant.output_tokens)
        return self._arrival(at, tenant, self._prompt(tenant, question), answer, session)

    def planned(self, planned: Planned) -> Arrival:
        """A request whose length is given."""
        tenant = self._who()
        return self._arrival(planned.at, tenant, self._prompt(tenant, planned.input_len), planned.output_len)

    def next_turn(self, arrival: Arrival, finished_at: float) -> Arrival | None:
        """The next question of a conversation, with everything before it; None at its end, or when it is too long."""
        turns = self._turns.get(arrival.session)
        if not turns:
            self.give_up(arrival)
            return None
        turn = turns.popleft()
        prompt = (
            *arrival.prompt,
            Segment(arrival.answer, arrival.output_tokens),
            Segment(next(self._texts), turn.question),
        )
        if sum(segment.tokens for segment in prompt) + turn.answer > self._max_tokens:
            self.give_up(arrival)
            return None
        tenant = self._tenants[arrival.tenant]
        return self._arrival(finished_at + turn.pause, tenant, prompt, turn.answer, arrival.session)

    def _prompt(self, tenant: Tenant, question: int) -> tuple[Segment, ...]:
        own = Segment(next(self._texts), question)
        return (own,) if tenant.system is None else (tenant.system, own)

    def _arrival(
        self, at: float, tenant: Tenant, prompt: tuple[Segment, ...], answer: int, session: str = ""
    ) -> Arrival:
        return Arrival(
            at=at,
            prompt=prompt,
            output_tokens=answer,
            answer=next(self._texts) if session else 0,
            tenant=tenant.name,
            rank=tenant.rank,
            weight=tenant.weight,
            session=session,
            max_output_tokens=None if self.work.max_tokens is None else max(self.work.max_tokens, answer),
        )

    def give_up(self, arrival: Arrival) -> None:
        """The client leaves the conversation."""
        self._turns.pop(arrival.session, None)

    def _later_turns(self, tenant: Tenant) -> deque[Turn]:
        count = self.rng.randint(1, max(1, round(2 * self.work.turns - 1)))
        return deque(
            Turn(
                self._around(tenant.input_tokens),
                self._around(tenant.output_tokens),
                self.rng.expovariate(1 / self.work.think_s) if self.work.think_s else 0.0,
            )
            for _ in range(count - 1)
        )

    def _who(self) -> Tenant:
        place = bisect(self._shares, self.rng.random() * self._shares[-1]) if len(self._names) > 1 else 0
        return self._tenants[self._names[place]]

    def _around(self, mean: int) -> int:
        spread = self.work.spread
        return mean if not spread else max(1, round(mean * self.rng.uniform(1 - spread, 1 + spread)))


def tenants(work: WorkloadConfig) -> tuple[TenantConfig, ...]:
    """Those listed, or as many as asked for with shares by Zipf's law."""
    if work.tenants:
        return work.tenants
    if work.tenant_count == 1:
        return (TenantConfig(name="everyone"),)
    return tuple(TenantConfig(name=f"t{n}", share=1 / n**work.skew) for n in range(1, work.tenant_count + 1))


class Stream:
    """An open loop: requests arrive when they are due, whether or not earlier ones were answered. A conversation goes
    on when its last answer has come."""

    def __init__(self, draw: Draw, plan: Iterable[Arrival], retry: RetryConfig, seconds: float) -> None:
        self._draw = draw
        self._plan = plan
        self._retry = retry
        self._seconds = seconds
        # Of its own, so that refusals change nothing else that is drawn.
        self._rng = random.Random(draw.rng.random())

    def arrivals(self) -> Iterator[Arrival]:
        return iter(self._plan)

    def after(self, arrival: Arrival, finished_at: float) -> Arrival | None:
        return self._in_time(self._draw.next_turn(arrival, finished_at))

    def refused(self, arrival: Arrival, at: float, retry_after_s: float | None) -> Arrival | None:
        """The same request again: after a pause that doubles with each attempt and varies by a quarter, or the time
        that the client was told, if that is longer."""
        if arrival.attempt >= self._retry.attempts:
            self._draw.give_up(arrival)
            return None
        pause = self._retry.backoff_s * 2**arrival.attempt * self._rng.uniform(0.75, 1.25)
        if retry_after_s is not None and self._retry.obey_retry_after:
            pause = max(pause, retry_after_s)
        first_at = arrival.at if arrival.first_at is None else arrival.first_at
        return self._in_time(replace(arrival, at=at + pause, attempt=arrival.attempt + 1, first_at=first_at))

    def _in_time(self, arrival: Arrival | None) -> Arrival | None:
        return None if arrival is None or arrival.at >= self._seconds else arrival


class ClosedLoop(Stream):
    """A fixed number of requests in flight: each one that ends is followed by the next."""

    def __init__(self, draw: Draw, concurrency: int, requests: int | None, retry: RetryConfig, seconds: float) -> None:
        self._left = itertools.count() if requests is None else iter(range(requests))
        begin = [draw.first(0.0) for _ in itertools.islice(self._left, concurrency)]
        super().__init__(draw, begin, retry, seconds)

    def after(self, arrival: Arrival, finished_at: float) -> Arrival | None:
        return self._next(finished_at)

    def refused(self, arrival: Arrival, at: float, retry_after_s: float | None) -> Arrival | None:
        return super().refused(arrival, at, retry_after_s) or self._next(at + max(self._retry.backoff_s, 0.001))

    def _next(self, at: float) -> Arrival | None:
        return None if at >= self._seconds or next(self._left, None) is None else self._draw.first(at)


def source(scenario: Scenario) -> Source:
    """The scenario's requests, from the beginning."""
    work, seconds = scenario.workload, scenario.duration_s
    draw = Draw(scenario)
    if work.arrivals == "closed":
        return ClosedLoop(draw, work.concurrency, work.requests, work.retries, seconds)
    if work.arrivals == "trace":
        plan = (
            planned for planned in from_trace(Path(work.trace), work.requests, speed=work.speed) if planned.at < seconds
        )
        return Stream(draw, (draw.planned(planned) for planned in plan), work.retries, seconds)
    times = rates(scenario).times(positions(work.arrivals, random.Random(f"{scenario.seed} times"), burst=work.burst))
    firsts = (draw.first(at) for at in itertools.islice(times, work.requests))
    return Stream(draw, firsts, work.retries, seconds)


def rates(scenario: Scenario) -> RateCurve:
    """Requests per second over the time of an open loop."""
    work = scenario.workload
    return RateCurve(
        work.requests_per_s,
        scenario.duration_s,
        curve=curve(work.day),
        start_s=work.start_hour * 3600.0,
        surges=[Surge(spike.at_s, spike.at_s + spike.seconds, spike.factor) for spike in work.spikes],
    )
