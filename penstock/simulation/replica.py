"""One simulated engine: the real scheduler and KV blocks, with steps that take modelled time.

As in `engine.core`, with overlap the next step is scheduled when one begins, so what arrives meanwhile joins the step
after it. Uneventful decode steps are taken together (`decode_run`); whatever happens to the replica in the meantime
ends such a run at the next step's end, where the engine would have noticed it. Records are the same either way.

With stages each takes its share of a step's time, one step after the other, and as many steps are in flight as there
are stages; see `engine.core`. Such steps are simulated one by one.

Invariant: every job submitted here comes back exactly once, finished, expired or taken away (`evict`).
"""

from __future__ import annotations

from collections import Counter, deque
from dataclasses import dataclass
from functools import lru_cache
from typing import Protocol

from penstock.engine.batch import Batch
from penstock.engine.kv.allocator import BlockAllocator
from penstock.engine.kv.host import HostTier
from penstock.engine.kv.pool import BlockPool
from penstock.engine.pace import TILE, Pace
from penstock.engine.request import EngineInfo, EngineLoad, FinishReason
from penstock.engine.scheduler import Scheduler
from penstock.engine.sequence import Sequence
from penstock.errors import ConfigError
from penstock.routing.meter import ReplicaMeter
from penstock.simulation.decode_run import DecodeRun, advance, steps_that_fit
from penstock.simulation.events import Events
from penstock.simulation.gaps import GapCounts
from penstock.simulation.job import Job
from penstock.simulation.step_model import StepModel


@dataclass(frozen=True, slots=True)
class ReplicaSpec:
    """What a replica can hold and how fast it is. The defaults are the CUDA engine's."""

    step_time: StepModel
    num_blocks: int
    block_size: int = 16
    max_running: int = 256
    token_budget: int = 8448
    target_gap_s: float | None = None
    """The gap between tokens that prompts leave to streams; None: up to `token_budget`."""
    gap_is_default: bool = False
    """Whether nobody has asked for it; see `Pace`."""
    gap_yields_s: float | None = None
    """Prompts that wait, and take so long together, go before it."""
    prompt_tile: int = TILE
    """Prompts that are cut short for it are cut to a multiple of so many tokens."""
    max_model_len: int = 32_768
    prefix_cache: bool = True
    host_blocks: int = 0
    """Blocks of the host tier; 0: none."""
    host_idle_s: float = 30.0
    host_block_s: float = 0.0
    """Seconds to copy one block back from the host; a step waits for its blocks."""
    overlap: bool = True
    """Whether a step is scheduled while the one before it runs, as on CUDA."""
    stages: int = 1
    """Of a pipeline; `step_time` is that of a step through all of them."""

    def __post_init__(self) -> None:
        if self.num_blocks < 1 or self.block_size < 1 or self.max_running < 1 or self.token_budget < 1:
            raise ConfigError("a replica needs at least one KV block, one sequence and a token budget of 1")

    @property
    def window(self) -> int:
        """Most tokens of a sequence: its context window, or what the whole cache holds."""
        return min(self.max_model_len, self.num_blocks * self.block_size)

    @property
    def batches(self) -> int:
        """Steps in flight between which sequences take turns."""
        return self.stages + self.overlap if self.stages > 1 else 1


class ReplicaEvents(Protocol):
    """Who hears what happens on a replica."""

    def started(self, replica: Replica, job: Job, cached_tokens: int) -> None:
        """A job's first token on this replica has come."""
        ...

    def ended(self, replica: Replica, job: Job, reason: FinishReason) -> None: ...

    def stepped(self, replica: Replica) -> None:
        """Its load may have changed."""
        ...


@dataclass(slots=True)
class _Step:
    """A scheduled step and what it computes."""

    batch: Batch
    context: int
    prefill: int
    attended: int
    samples: int
    restored: int
    end: float = 0.0
    """When the last stage of a pipeline is done with it."""


class Replica:
    """An engine on the virtual clock."""

    def __init__(
        self, name: str, spec: ReplicaSpec, events: Events, listener: ReplicaEvents, fast_forward: bool = True
    ) -> None:
        self.name = name
        self.spec = spec
        self.jobs: dict[Sequence, Job] = {}
        host = HostTier(spec.host_blocks, spec.host_idle_s) if spec.host_blocks else None
        self.scheduler = Scheduler(
            BlockAllocator(BlockPool(spec.num_blocks + 1, host), spec.block_size, spec.prefix_cache),
            max_running=spec.max_running,
            token_budget=spec.token_budget,
            max_model_len=spec.window,
            batches=spec.batches,
            pace=Pace(
                spec.target_gap_s, default=spec.gap_is_default, yields_s=spec.gap_yields_s, tile=spec.prompt_tile
            ),
        )
        self.info = info_of(spec)
        self.load = EngineLoad(total_blocks=spec.num_blocks)
        """As of its last finished step, which is all that a gateway knows. Only the figures that change are kept."""
        self.steps = 0
        self.tokens = 0
        """Generated so far."""
        self._events = events
        self._listener = listener
        self._fast = fast_forward
        self._depth = spec.batches - 1 if spec.stages > 1 else int(spec.overlap)
        self._busy_until = [0.0] * spec.stages
        self._in_flight: deque[_Step] = deque()
        self._run: DecodeRun | None = None
        self._reported = 0
        """Steps of the run whose tokens have been counted in `tokens` and by the meters."""
        self._meters: list[tuple[ReplicaMeter, int]] | None = None
        """Of the run: who counts its jobs, and how many."""
        self._planned = 0
        """Tells the step end that is due from those planned earlier."""
        self._running = False

    @property
    def idle(self) -> bool:
        return not self.jobs

    def submit(self, job: Job) -> None:
        """Takes a job; it joins the next step that is scheduled."""
        seq = self.scheduler.add(job.request(self._events.now), self._events.now)
        seq.block_names = job.names
        self.jobs[seq] = job
        if not self._running:
            self._go()
        elif self._run is not None:
            self._cut(self._run)

    def evict(self) -> list[Job]:
        """Takes everything away: the engine dies. Returns the jobs that were on it."""
        now = self._events.now
        if self._run is not None:
            self._collect_run(min(self._run.done(now), self._run.steps - 1), lost=1)
        jobs = list(self.jobs.values())
        for seq in list(self.jobs):
            seq.finish_reason = "abort"
            self.scheduler.finish(seq)
        self.jobs.clear()
        for step in self._in_flight:
            self.scheduler.landed(step.batch)
        self._in_flight.clear()
        self._busy_until = [now] * self.spec.stages
        self._running = False
        self._planned += 1
        return jobs

    def progress(self) -> None:
        """Counts what the current run has generated up to now, for meters and load."""
        run = self._run
        if run is not None:
            done = min(run.done(self._events.now), run.steps - 1)
            if done > self._reported:
                self._report(run, done)

    def _report(self, run: DecodeRun, done: int) -> None:
        since, steps = run.end(self._reported), done - self._reported
        tokens = steps * run.size
        self._reported = done
        self.steps += steps
        self.tokens += tokens
        self.load.used_blocks = min(self.load.used_blocks + tokens // self.spec.block_size, self.load.total_blocks)
        if self._meters is None:
            self._meters = list(Counter(self.jobs[seq].meter for seq in self.scheduler.running).items())
        for meter, count in self._meters:
            meter.decoded(count * steps, run.end(done), since)

    def _go(self) -> None:
        """Schedules what may be scheduled now and lets the first scheduled step begin."""
        now, scheduler = self._events.now, self.scheduler
        for seq in scheduler.expired(now):
            self._end(seq, "timeout")
        while len(self._in_flight) <= self._depth:
            batch = scheduler.schedule(now)
            if batch is None:
                break
            step = _step(batch)
            if self.spec.stages > 1:
                step.end = self._through_stages(step)
            self._in_flight.append(step)
        self._running = bool(self._in_flight)
        if not self._running:
            return
        self._planned += 1
        if self.spec.stages > 1:
            self._events.at(self._in_flight[0].end, self._stepped, self._planned)
            return
        steps = self._uneventful() if self._fast else 1
        if steps > 1:
            head = self._in_flight[0]
            self._run = run = DecodeRun.of(now, steps, head.samples, head.context, self.spec.step_time)
            self._reported, self._meters = 0, None
            deadline = scheduler.next_deadline
            if deadline is not None and run.end(run.steps) >= deadline:
                steps = run.done(deadline)
                run.steps = min(steps + (run.end(steps) < deadline), run.steps)
            if run.steps > 1:
                self._events.at(run.end(run.steps), self._stepped, self._planned)
                return
            self._run = None
        self._events.at(now + self._seconds(self._in_flight[0]), self._stepped, self._planned)

    def _land(self, step: _Step) -> None:
        paced = self.spec.target_gap_s is not None
        self.scheduler.landed(step.batch, self._seconds(step) if paced else None)

    def _seconds(self, step: _Step) -> float:
        decodes = step.batch.num_decodes
        seconds = self.spec.step_time.of(decodes, step.context, step.prefill, step.attended, step.samples)
        return seconds + step.restored * self.spec.host_block_s

    def _through_stages(self, step: _Step) -> float:
        """When a step that is launched now leaves the last stage; each begins when it has done the step before."""
        share, at = self._seconds(step) / self.spec.stages, self._events.now
        for stage, busy_until in enumerate(self._busy_until):
            at = self._busy_until[stage] = max(at, busy_until) + share
        return at

    def _uneventful(self) -> int:
        """How many steps from here on, at most, run the same batch; the last of them may change something."""
        scheduler, allocator = self.scheduler, self.scheduler.allocator
        running = scheduler.running
        last = self._in_flight[-1].batch
        size = len(running)
        if (
            len(self._in_flight) <= self._depth
            or not last.plain
            or len(last.chunks) != size
            or self._in_flight[0].restored
        ):
            return 1
        if self._depth:
            first = self._in_flight[0].batch
            if not first.plain or [c.seq for c in first.chunks] != [c.seq for c in last.chunks]:
                return 1
        if scheduler.waiting and size < scheduler.max_running and size < scheduler.token_budget:
            # It waits for blocks, of which decodes only take more; but a preempted one may wait for its own last token.
            head = scheduler.next_waiting
            if head is None or head.pending:
                return 1
        depth, jobs = self._depth, self.jobs
        steps = 1 << 20
        for seq in running:
            if not seq.started:
                return 1
            job = jobs[seq]
            left = job.output - job.delivered
            if left < steps:
                steps = left
            left = seq.limit - len(seq.tokens) - depth
            if left < steps:
                steps = left
        if steps > 1:
            steps = 1 + steps_that_fit(running, steps - 1, allocator)
        return steps

    def _cut(self, run: DecodeRun) -> None:
        """Something has happened: the run ends with the step that runs now."""
        steps = min(run.done(self._events.now) + 1, run.steps)
        if steps < run.steps:
            run.steps = steps
            self._planned += 1
            self._events.at(run.end(steps), self._stepped, self._planned)

    def _stepped(self, planned: int) -> None:
        """A step has ended."""
        if planned != self._planned:
            return
        if self._run is None:
            self._collect(self._in_flight.popleft())
        else:
            self._collect_run(self._run.steps - 1)
            self._land(self._in_flight.popleft())
        self._go()
        load, scheduler = self.load, self.scheduler
        load.running, load.waiting = len(scheduler.running), scheduler.waiting
        load.used_blocks = scheduler.allocator.pool.used
        self._listener.stepped(self)

    def _collect_run(self, scheduled: int, lost: int = 0) -> None:
        """The run is over. After each of its first `scheduled` steps a further one was scheduled; then one more step
        brought its tokens, unless that was `lost`."""
        run = self._run
        assert run is not None
        steps = scheduled + 1 - lost
        if steps > self._reported:
            self._report(run, steps)
        self._run = None
        if steps <= 0:
            return
        scheduler, jobs = self.scheduler, self.jobs
        if scheduled:
            advance(scheduler.running, scheduled, scheduler.allocator, run)
        for step in self._in_flight:
            step.context += run.size * scheduled
        gaps = GapCounts.between(run.first, run.seconds(steps - 1), steps)
        longest, end = max(run.first, run.seconds(steps - 1)), run.end(steps)
        ended: list[Sequence] = []
        for seq in scheduler.running:
            job = jobs[seq]
            job.advance(steps, run, gaps, longest, end)
            if not lost:
                seq.pending -= 1
                seq.tokens.append(0)
                if job.delivered >= job.output or len(seq.tokens) >= seq.limit:
                    ended.append(seq)
        for seq in ended:
            self._complete(seq)

    def _collect(self, step: _Step) -> None:
        """Hands out the tokens of a finished step."""
        self._land(step)
        now, jobs = self._events.now, self.jobs
        self.steps += 1
        meters: dict[ReplicaMeter, int] = {}
        for chunk in step.batch.chunks:
            seq = chunk.seq
            if not chunk.samples or seq.finish_reason is not None:
                continue
            seq.pending -= 1
            seq.tokens.append(0)
            job = jobs[seq]
            meter = job.meter
            meters[meter] = meters.get(meter, 0) + 1
            if not seq.started:
                seq.started = True
                self._listener.started(self, job, seq.cached_tokens or 0)
            job.token(now)
            if job.delivered >= job.output or len(seq.tokens) >= seq.limit:
                self._complete(seq)
        for meter, count in meters.items():
            self.tokens += count
            meter.decoded(count, now, now)

    def _complete(self, seq: Sequence) -> None:
        """A sequence has its last token."""
        job = self.jobs[seq]
        if seq.row >= 0:
            self.scheduler.allocator.publish(seq)
        self._end(seq, "stop" if job.delivered >= job.output else "length")

    def _end(self, seq: Sequence, reason: FinishReason) -> None:
        seq.finish_reason = reason
        self.scheduler.finish(seq)
        job = self.jobs.pop(seq)
        job.preemptions += max(seq.epoch - 1, 0)
        self._listener.ended(self, job, reason)


def _step(batch: Batch) -> _Step:
    restored = len(batch.transfers.back) if batch.transfers else 0
    if batch.plain:
        size = batch.num_tokens
        return _Step(batch, sum([chunk.start for chunk in batch.chunks]) + size, 0, 0, size, restored)
    context = prefill = attended = samples = 0
    for chunk in batch.chunks:
        start, length = chunk.start, chunk.length
        if length == 1:
            context += start + 1
        else:
            prefill += length
            attended += length * start + length * (length + 1) // 2
        samples += chunk.samples
    return _Step(batch, context, prefill, attended, samples, restored)


@lru_cache(maxsize=64)
def info_of(spec: ReplicaSpec) -> EngineInfo:
    """What a gateway knows of the replica's size."""
    return EngineInfo(
        model="simulated",
        instance="simulated",
        max_model_len=spec.window,
        vocab_size=1,
        block_size=spec.block_size,
        num_blocks=spec.num_blocks,
        max_running=spec.max_running,
        device="none",
        dtype="none",
    )
