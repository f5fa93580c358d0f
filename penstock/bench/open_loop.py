"""Goodput of the engine alone: the highest rate of arrivals at which nearly every request keeps its latency objectives,
for several targets of the gap between tokens.

Requests arrive at random (Poisson) whatever the engine does, so a queue that grows shows as a time to the first token.
A request keeps its objectives when its first token comes in time and 99% of the gaps between its tokens are short
enough.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

from penstock.bench import stats
from penstock.bench.engine import BenchError, Steppable
from penstock.bench.goodput import AtRate
from penstock.bench.workloads import Workload
from penstock.engine.request import Request

_TICK_S = 0.001


@dataclass(slots=True)
class Timed:
    """One request: when it was due, and when its tokens came."""

    due: float
    tokens: list[float] = field(default_factory=list)

    @property
    def ttft(self) -> float:
        return self.tokens[0] - self.due

    @property
    def gaps(self) -> list[float]:
        return [after - before for before, after in pairwise(self.tokens)]

    def keeps(self, ttft_s: float, gap_s: float) -> bool:
        gaps = sorted(self.gaps)
        return self.ttft <= ttft_s and (not gaps or stats.percentile(gaps, 0.99) <= gap_s)


@dataclass(frozen=True, slots=True)
class Goodput:
    """What one target gives."""

    target: str
    highest: float
    """Requests per second."""
    at_once: float | None
    """Output tokens per second with all requests at once; None: not measured."""
    runs: list[AtRate]


def arrivals(count: int, rate: float, seed: int = 0) -> list[float]:
    """Seconds after the start, in order."""
    rng, at, found = random.Random(seed), 0.0, []
    for _ in range(count):
        at += rng.expovariate(rate)
        found.append(at)
    return found


def drive(
    engine: Steppable,
    requests: Sequence[Request],
    due: Sequence[float],
    *,
    clock: Callable[[], float] = time.perf_counter,
    sleep: Callable[[float], None] = time.sleep,
) -> list[Timed]:
    """Submit each request when it is due, and run until all have ended."""
    timed = {request.request_id: Timed(at) for request, at in zip(requests, due, strict=True)}
    begun, next_one = clock(), 0
    while next_one < len(requests) or engine.has_work:
        now = clock() - begun
        while next_one < len(requests) and due[next_one] <= now:
            engine.submit(requests[next_one])
            next_one += 1
        if not engine.has_work:
            sleep(max(due[next_one] - now, 0.0))
            continue
        spare = engine.spare_s()  # as the process that hosts an engine does
        if spare >= _TICK_S:
            until = due[next_one] - now if next_one < len(requests) else spare
            sleep(max(min(_TICK_S, until), 0.0))
            continue
        output = engine.step()
        if output is None:
            continue
        now = clock() - begun
        for delta in output.deltas:
            if delta.error:
                raise BenchError(f"{delta.request_id}: {delta.error}")
            if delta.tokens:
                timed[delta.request_id].tokens.append(now)
    return list(timed.values())


def at_rate(engine: Steppable, workload: Workload, rate: float, ttft_s: float, gap_s: float, salt: str) -> AtRate:
    requests = workload.build(engine.info.vocab_size, salt=salt)
    timed = drive(engine, requests, arrivals(len(requests), rate))
    ttft = stats.percentiles(one.ttft for one in timed)
    gap = stats.percentiles(gap for one in timed for gap in one.gaps)
    assert ttft is not None and gap is not None, "a workload has requests with several tokens"
    end = max(one.tokens[-1] for one in timed)
    return AtRate(
        rate=rate,
        kept=sum(one.keeps(ttft_s, gap_s) for one in timed) / len(timed),
        ttft=ttft,
        gap=gap,
        tokens_per_s=sum(len(one.tokens) for one in timed) / end,
    )
