"""The offline engine benchmark: a workload through `Engine.step()` in this process, nothing in between.

Times are taken between steps from outside the engine, and every request must come back with exactly the
tokens asked for, so that a run which lost work cannot look fast. Bytes and operations are counted from the
model's configuration (`shapes`), not from the engine's own counters.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

from penstock.bench import stats
from penstock.bench.shapes import Cost
from penstock.bench.workloads import Workload
from penstock.engine.request import Delta, EngineInfo, EngineLoad, Request, StepOutput
from penstock.errors import PenstockError


class BenchError(PenstockError):
    """The measured system did not do all of its work."""

    exit_status = 1


class Steppable(Protocol):
    """The part of `penstock.engine.core.Engine` that a benchmark drives."""

    @property
    def info(self) -> EngineInfo: ...
    @property
    def has_work(self) -> bool: ...
    def submit(self, request: Request) -> None: ...
    def step(self) -> StepOutput | None: ...
    def spare_s(self) -> float: ...
    def load_snapshot(self) -> EngineLoad: ...


@dataclass(frozen=True, slots=True)
class Step:
    """One step as seen from outside."""

    seconds: float
    sampled: int
    context: int
    """Tokens of context behind the sampled tokens: what decode attention read."""
    decode_only: bool


@dataclass(slots=True)
class Trace:
    """Everything one run of a workload did."""

    prompt_tokens: int = 0
    output_tokens: int = 0
    seconds: float = 0.0
    ttft: list[float] = field(default_factory=list)
    latency: list[float] = field(default_factory=list)
    steps: list[Step] = field(default_factory=list)
    preemptions: int = 0


@dataclass(slots=True)
class _Flight:
    """A submitted request that is not finished."""

    request: Request
    submitted: float
    produced: int = 0


class Run:
    """Drives one workload through an engine, closed loop or all at once."""

    def __init__(
        self,
        engine: Steppable,
        requests: Sequence[Request],
        concurrency: int | None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.engine = engine
        self.clock = clock
        self.queue = deque(requests)
        self.limit = concurrency or len(requests)
        self.flights: dict[str, _Flight] = {}
        self.without_token = 0
        self.trace = Trace(prompt_tokens=sum(len(request.prompt) for request in requests))

    def __call__(self, progress: Callable[[int], None] | None = None) -> Trace:
        """Runs to the end; `progress` gets the number of output tokens so far, a few times a second."""
        preemptions = self.engine.load_snapshot().preemptions
        begin = last = told = self.clock()
        self._refill(begin)
        while self.flights:
            output = self.engine.step()
            now = self.clock()
            if output is None:
                self._idle()
                continue
            # From one return to the next: an engine that overlaps its steps works between the calls too.
            self._account(output, now - last, now)
            last = now
            self._refill(now)
            if progress is not None and now - told > 0.2:
                told = now
                progress(self.trace.output_tokens)
        self.trace.seconds = self.clock() - begin
        self.trace.preemptions = self.engine.load_snapshot().preemptions - preemptions
        return self.trace

    def _refill(self, now: float) -> None:
        while self.queue and len(self.flights) < self.limit:
            request = self.queue.popleft()
            self.flights[request.request_id] = _Flight(request, now)
            self.without_token += 1
            self.engine.submit(request)

    def _idle(self) -> None:
        """A step with nothing to do is fine only while the engine still waits for its own work."""
        if not self.engine.has_work:
            lost = ", ".join(list(self.flights)[:3])
            raise BenchError(f"the engine is idle but {len(self.flights)} requests have not finished ({lost}, ...)")

    def _account(self, output: StepOutput, seconds: float, now: float) -> None:
        sampled = context = firsts = 0
        for delta in output.deltas:
            flight = self.flights[delta.request_id]
            if delta.tokens:
                if flight.produced == 0:
                    firsts += 1
                    self.trace.ttft.append(now - flight.submitted)
                flight.produced += len(delta.tokens)
                sampled += len(delta.tokens)
                context += len(flight.request.prompt) + flight.produced
            if delta.finish_reason is not None:
                self._finish(flight, delta, now)
        self.trace.output_tokens += sampled
        self.without_token -= firsts
        # A step that computed part of a prompt either produced a first token or left a request that is no
        # longer waiting and has none yet.
        prefilling = self.without_token - output.load.waiting
        self.trace.steps.append(Step(seconds, sampled, context, decode_only=firsts == 0 and prefilling <= 0))

    def _finish(self, flight: _Flight, delta: Delta, now: float) -> None:
        wanted = flight.request.params.max_tokens
        if delta.finish_reason != "length" or flight.produced != wanted:
            why = delta.error or f"finish_reason {delta.finish_reason!r}"
            raise BenchError(f"request {delta.request_id} gave {flight.produced} of {wanted} tokens and stopped: {why}")
        self.trace.latency.append(now - flight.submitted)
        del self.flights[delta.request_id]


@dataclass(frozen=True, slots=True)
class Metrics:
    """A run in figures. Bound shares need a `Cost` and `Bounds`; see `summarize`."""

    seconds: float
    output_tps: float
    total_tps: float
    steps: int
    step_ms: float
    """Median step; of decode-only steps where there are any."""
    ttft_ms: float
    ttft_p99_ms: float
    gbps: float | None
    """Bytes of weights and KV read per second in decode-only steps."""
    tflops: float
    """Operations of the matrices per second over the whole run."""
    memory_share: float | None
    """`gbps` over the read bound."""
    bound_share: float
    """Least time the run could take on this device (reading for decode-only steps, the larger of reading and
    computing for the others) over the time it took."""
    preemptions: int


def summarize(trace: Trace, cost: Cost, read_gbps: float, matmul_tflops: float) -> Metrics:
    decode = [step for step in trace.steps if step.decode_only]
    mixed = [step for step in trace.steps if not step.decode_only]
    decode_s = sum(step.seconds for step in decode)
    decode_bytes = sum(
        cost.weights(step.sampled) + cost.context(step.context) + cost.states(step.sampled) for step in decode
    )
    mixed_sampled = sum(step.sampled for step in mixed)
    mixed_tokens = trace.prompt_tokens + mixed_sampled - len(trace.ttft)
    mixed_flops = cost.flops(mixed_tokens, mixed_sampled)
    flops = mixed_flops + sum(cost.flops(step.sampled, step.sampled) for step in decode)
    reading = len(mixed) * cost.weights(mixed_tokens // max(1, len(mixed))) / (read_gbps * 1e9)
    computing = mixed_flops / (matmul_tflops * 1e12)
    least_s = decode_bytes / (read_gbps * 1e9) + max(reading, computing)
    gbps = decode_bytes / decode_s / 1e9 if decode else None
    ttft = stats.percentiles(trace.ttft)
    step = stats.percentiles(step.seconds for step in decode or trace.steps)
    assert ttft is not None and step is not None, "a finished run has steps and first tokens"
    return Metrics(
        seconds=trace.seconds,
        output_tps=trace.output_tokens / trace.seconds,
        total_tps=(trace.prompt_tokens + trace.output_tokens) / trace.seconds,
        steps=len(trace.steps),
        step_ms=step.p50 * 1e3,
        ttft_ms=ttft.p50 * 1e3,
        ttft_p99_ms=ttft.p99 * 1e3,
        gbps=gbps,
        tflops=flops / trace.seconds / 1e12,
        memory_share=gbps / read_gbps if gbps is not None else None,
        bound_share=least_s / trace.seconds,
        preemptions=trace.preemptions,
    )


def run(
    engine: Steppable,
    workload: Workload,
    *,
    salt: str,
    progress: Callable[[int], None] | None = None,
    adapters: Sequence[str] = (),
    clock: Callable[[], float] = time.perf_counter,
) -> Trace:
    """One measured run; `salt` must differ between runs of a workload, or prefixes would be reused. With `adapters`
    the requests take them in turn."""
    info = engine.info
    if workload.longest > info.max_model_len:
        raise BenchError(
            f"workload {workload.name} needs a context of {workload.longest} tokens; "
            f"{info.model} is loaded with {info.max_model_len}"
        )
    before = engine.load_snapshot().prefix_hit_tokens
    requests = workload.build(info.vocab_size, salt=f"{workload.name}-{salt}")
    if adapters:
        requests = [replace(request, adapter=adapters[i % len(adapters)]) for i, request in enumerate(requests)]
    trace = Run(engine, requests, workload.concurrency, clock)(progress)
    reused = engine.load_snapshot().prefix_hit_tokens - before
    if reused:
        raise BenchError(f"{reused} prompt tokens of workload {workload.name} came from the cache: not a fair run")
    return trace
