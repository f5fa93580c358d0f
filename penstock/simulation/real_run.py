"""A trace through a real engine in this process, to be set beside the simulation of the same trace.

Requests are submitted when they are due, whether or not earlier ones were answered. An engine finishes a step before it
looks at what came meanwhile, as in a server, so a request's time begins when it was due, not when it was submitted.

The clock is the wall's, or the processor time of this process: then an engine of one thread is measured as if nothing
else ran on the machine, and the time between two requests is skipped instead of slept through.
"""

from __future__ import annotations

import random
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from penstock.bench.arrivals import Planned
from penstock.bench.engine import BenchError, Steppable
from penstock.bench.stats import percentile
from penstock.engine.request import Request, SamplingParams
from penstock.simulation.gaps import GapCounts

IDLE_S = 0.02
"""Longest sleep while nothing is due."""


@dataclass(slots=True)
class Observed:
    """What the users of a run saw."""

    ttft: list[float] = field(default_factory=list)
    gaps: GapCounts = field(default_factory=GapCounts)
    output_tokens: int = 0
    seconds: float = 0.0
    """From the first request's arrival to the last token."""

    def figures(self) -> dict[str, float]:
        ttft = sorted(self.ttft)
        return {
            "TTFT p50, ms": 1e3 * percentile(ttft, 0.5),
            "TTFT p95, ms": 1e3 * percentile(ttft, 0.95),
            "gap p50, ms": 1e3 * (self.gaps.percentile(0.5) or 0.0),
            "gap p95, ms": 1e3 * (self.gaps.percentile(0.95) or 0.0),
            "output tok/s": self.output_tokens / self.seconds,
        }


@dataclass(slots=True)
class _Flight:
    due: float
    wanted: int
    produced: int = 0
    last: float = 0.0


def real_run(
    engine: Steppable,
    plan: Sequence[Planned],
    *,
    seed: int = 0,
    processor_time: bool = False,
    progress: Callable[[int], None] | None = None,
) -> Observed:
    """Runs the plan to its end. `progress` gets the number of requests that have ended."""
    rng, ids = random.Random(seed), range(engine.info.vocab_size)
    queue = deque(
        (
            planned.at,
            Request(
                f"real-{seed}-{index}",
                rng.choices(ids, k=planned.input_len),
                SamplingParams(max_tokens=planned.output_len, temperature=0.0),
                cache_salt=f"real-{seed}",
            ),
        )
        for index, planned in enumerate(plan)
    )
    observed, ended = Observed(), 0
    flights: dict[str, _Flight] = {}
    clock = time.process_time if processor_time else time.perf_counter
    begin = clock()
    while queue or flights:
        now = clock() - begin
        while queue and queue[0][0] <= now:
            due, request = queue.popleft()
            flights[request.request_id] = _Flight(due, request.params.max_tokens)
            engine.submit(request)
        if not flights:
            if processor_time:
                begin = clock() - queue[0][0]
            else:
                time.sleep(min(max(queue[0][0] - now, 0.0), IDLE_S))
            continue
        output = engine.step()
        if output is None:
            if not engine.has_work:
                raise BenchError(f"the engine is idle but {len(flights)} requests have not finished")
            continue
        now = clock() - begin
        for delta in output.deltas:
            flight = flights[delta.request_id]
            if delta.tokens:
                if flight.produced == 0:
                    observed.ttft.append(now - flight.due)
                else:
                    observed.gaps.add(now - flight.last)
                flight.produced += len(delta.tokens)
                flight.last = now
                observed.output_tokens += len(delta.tokens)
            if delta.finish_reason is not None:
                if flight.produced != flight.wanted:
                    raise BenchError(f"request {delta.request_id} gave {flight.produced} of {flight.wanted} tokens")
                del flights[delta.request_id]
                ended += 1
                if progress is not None:
                    progress(ended)
    observed.seconds = clock() - begin
    return observed
