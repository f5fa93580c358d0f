"""The engine: receive, schedule, run, emit, over and over.

Continuous batching in one sentence: at every step the scheduler picks whatever tokens are worth computing next, from
any mix of requests at any stage, the runner computes them in one forward pass, and requests join and leave between
steps. `_step()` below is the whole loop.

Overlap: on CUDA the step just launched is still running when `step()` goes on to collect the one before it, so the
host schedules and emits while the device computes. A sequence that turns out to have stopped has by then been computed
one token too far; that token is dropped. On CPU nothing is gained by that, and each step is collected at once.
A step that verifies draft tokens (speculation) is not launched ahead either: it needs to know all tokens before it, and
the next step needs to know how many were accepted.

A pipeline has as many steps in flight as it has stages, with overlap one more. The scheduler gives them different
sequences, so a step needs no token of those in flight: nothing is computed too far, and any of them may verify draft
tokens. Collecting a step then also samples: its hidden states come back from the last stage. Every stage runs the steps
in the order of their launch, so blocks that an ended sequence has in a step in flight may be used in the next.

A request that cannot be served fails alone: bad ones are refused on arrival, and when a step raises, only the sequence
that caused it is failed (`recovery`).
"""

from __future__ import annotations

import logging
import math
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from penstock.engine.adapters.pool import AdapterPool
from penstock.engine.adapters.spec import ADAPTER_UNKNOWN, NO_ADAPTERS
from penstock.engine.admission import Admission
from penstock.engine.batch import Batch
from penstock.engine.config import SAVE_S, EngineConfig
from penstock.engine.emission import Emission
from penstock.engine.grammar.constraints import Constraints, MakeCompiler
from penstock.engine.kv.erasure import Erasure
from penstock.engine.kv.exchange import BlockExchange
from penstock.engine.kv.persistence import Persistence
from penstock.engine.lead import Lead
from penstock.engine.parallel.restarts import RankRestarts
from penstock.engine.recovery import Recovery
from penstock.engine.request import (
    PROMPT_TOO_SLOW,
    WAITED,
    Delta,
    DeviceLoad,
    EngineInfo,
    EngineLoad,
    Request,
    StepOutput,
)
from penstock.engine.runner.runner import Runner
from penstock.engine.runner.step import PendingStep
from penstock.engine.scheduler import Scheduler
from penstock.engine.sequence import Sequence
from penstock.engine.speculative.speculation import Speculation
from penstock.errors import ConfigError, ReplicaLost

if TYPE_CHECKING:
    from penstock.engine.parallel.launch import Ranks
    from penstock.engine.parallel.machines import Machines

log = logging.getLogger(__name__)
_DISK_WAIT_S = 0.0005
"""How long a step that can do nothing waits for blocks from disk."""
_NO_WAIT_S = 5e-5
"""A step that is collected within this time was done before it was asked for."""


class DeviceMeter(Protocol):
    """Reads the memory and utilization of an engine's devices in the background."""

    @property
    def latest(self) -> list[DeviceLoad] | None:
        """The newest reading; None while there is none."""
        ...

    def close(self) -> None: ...


class Balancer(Protocol):
    """Evens out the load of ranks between steps."""

    def tick(self, now: float) -> None:
        """A step is about to be scheduled."""
        ...

    def report(self, load: EngineLoad) -> None: ...


class Engine:
    """One model. Not thread-safe: one thread owns it."""

    def __init__(
        self,
        config: EngineConfig,
        info: EngineInfo,
        scheduler: Scheduler,
        runner: Runner,
        *,
        overlap: bool,
        grammars: MakeCompiler | None = None,
        speculation: Speculation | None = None,
        ranks: Ranks | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.config = config
        self.info = info
        self.scheduler = scheduler
        self.runner = runner
        self.speculation = speculation
        self.ranks = ranks
        """The processes of the other devices, when there are several."""
        self.meter: DeviceMeter | None = None
        """Reads its GPUs; set by the process that hosts the engine."""
        self.exchange: BlockExchange | None = None
        """Gives KV blocks to other engines, or takes theirs; None when its role is to do everything itself."""
        self.persistence: Persistence | None = None
        """Saves what outlives the engine; None when nothing does."""
        self.balancer: Balancer | None = None
        """Moves experts between ranks; None when they are not spread over any."""
        self.on_begun: Callable[[list[str]], None] = lambda request_ids: None
        """Called with requests that have a `patience_s`, before the step that begins with their prompts, which may take
        long."""
        self.clock = clock
        self.steps = 0
        self._step_tokens = 0
        self._pipelined = scheduler.batches > 1
        self._depth = scheduler.batches - 1 if self._pipelined else int(overlap)
        """Steps that stay in flight when another is launched."""
        self._constraints = Constraints(grammars, info.vocab_size)
        self._admission = Admission(
            scheduler, self._constraints, vocab_size=info.vocab_size, max_waiting=config.max_waiting
        )
        self._emission = Emission(scheduler, lambda: self.clock(), self._forget)
        self._restarts = None if ranks is None else RankRestarts(ranks, self._start_over)
        self._recovery = Recovery(
            scheduler,
            runner.backend.memory,
            config.block_size,
            self._drain,
            lambda seq, why: self._emission.finish(seq, "error", why),
        )
        self._in_flight: deque[PendingStep] = deque()
        self._last_landed = 0.0
        self._lead = Lead()
        self._lingers = self._depth == 1 and not self._pipelined and speculation is None
        """Whether launches are put off; see `spare_s`."""
        self._catches_up = True
        self._closed = False

    @classmethod
    def load(
        cls,
        config: EngineConfig,
        progress: Callable[[str, float], None] | None = None,
        checkpoint: object | None = None,
        grammars: MakeCompiler | None = None,
        find_adapter: Callable[[str], Path] = Path,
        machines: Machines | None = None,
    ) -> Engine:
        """Read the checkpoint and make ready to run. `progress(phase, fraction)` reports how far it is; `grammars`
        makes the compiler for requests with a grammar, when the first of them comes; `find_adapter` turns an adapter's
        source into a local folder, and may download it (it runs on a loader thread); `machines` reaches those that
        `config` places ranks on."""
        from penstock.engine.startup.engine import load_engine

        return load_engine(config, progress, checkpoint, grammars, find_adapter, machines)

    def close(self, save_s: float = SAVE_S) -> None:
        """Stop the other ranks, the meter and the grammar compiler. The engine cannot be used afterwards. `save_s`:
        most time for saving what outlives it. Nothing happens the second time: its files may be another's by then."""
        if self._closed:
            return
        self._closed = True
        try:
            self.save(save_s)
        except Exception:  # a rank is lost; files and locks are closed all the same
            log.exception("the engine could not save its KV blocks")
        self._constraints.close()
        for host in self.scheduler.allocator.hosts:
            if host.disk is not None:
                host.disk.close()
        if self.persistence is not None:
            self.persistence.close()
        if self.meter is not None:
            self.meter.close()
        if self.ranks is not None:
            self.ranks.close()

    # --- requests

    @property
    def has_work(self) -> bool:
        waiting = self.scheduler.has_work or self._constraints.opening > 0
        waiting = waiting or (self.adapters is not None and self.adapters.busy)
        waiting = waiting or (self._restarts is not None and self._restarts.due)
        return waiting or bool(self._in_flight) or bool(self._emission.deltas)

    def submit(self, request: Request) -> None:
        """Queue a request. One that can never run is answered with an error delta."""
        refusal = self._admission.submit(request, self.clock())
        if refusal is not None:
            self._emission.deltas.append(refusal)

    def abort(self, request_id: str) -> None:
        """Stop a request and free its blocks now. Unknown or finished ids are ignored."""
        seq = self.scheduler.get(request_id)
        if seq is not None:
            self._emission.finish(seq, "abort")
        elif self._constraints.cancel(request_id):
            self._emission.deltas.append(Delta(request_id, finish_reason="abort"))

    @property
    def adapters(self) -> AdapterPool | None:
        """The LoRA adapters; None when the engine has no slots for any."""
        return self.scheduler.adapters

    def unload_adapter(self, name: str) -> None:
        """Forget an adapter. Requests that have it finish with it; those that still wait for it to be read fail."""
        if self.adapters is None:
            raise ConfigError(NO_ADAPTERS)
        for seq in self.adapters.unload(name):
            self._emission.finish(seq, "error", f"{ADAPTER_UNKNOWN} {name!r} any more")

    # --- the loop

    def step(self) -> StepOutput | None:
        """Launch the next step and collect what is due. None when there is nothing to report."""
        if self._restarts is None:
            return self._step()
        if not self._restarts.under_way:
            return self._restarts.step(self._step)
        now = self.clock()
        self._expire(now)
        self._refuse_overdue(now)
        self._restarts.wait()
        return self._output()

    @property
    def reviving(self) -> bool:
        """Whether a rank is being started again; nothing runs until then."""
        return self._restarts is not None and self._restarts.under_way

    def _step(self) -> StepOutput | None:
        now = self.clock()
        self._take_in(now)
        if self.balancer is not None:
            self.balancer.tick(now)
        batch = self.scheduler.schedule(now, self._drafts())
        if begun := self.scheduler.take_begun():
            self.on_begun(begun)
        if batch is not None:
            self._launch(batch, now)
        self._refuse_overdue(now)  # behind the schedule: what can begin at once is not too late
        if len(self._in_flight) > self._depth_behind(batch):
            self._collect(self._in_flight.popleft())
        if batch is None and not self._in_flight and not self._emission.deltas:
            self._wait_for_reads()
        return self._output()

    def _take_in(self, now: float) -> None:
        """What has happened since the last step: grammars were compiled, deadlines have passed, adapters were read."""
        if self._constraints.opening:
            self._emission.deltas.extend(self._admission.take_grammars(now))
        self._expire(now)
        if self.adapters is not None:
            ready, failed = self.adapters.poll(now)
            self.scheduler.resume(ready)
            for seq, why in failed:
                self._emission.finish(seq, "error", why)

    def _drafts(self) -> dict[Sequence, list[int]]:
        """Draft tokens to verify in the next step; if there are any, steps in flight are collected first, unless they
        have other sequences."""
        speculation = self.speculation
        if speculation is None:
            return {}
        if not self._pipelined:
            if self._in_flight and not speculation.plan(self.scheduler.decoding()):
                return {}
            self._drain()
        return speculation.propose(self.scheduler.decoding())

    def _launch(self, batch: Batch, began: float) -> None:
        """Hand a batch to the device. `began`: when the host began with this step."""
        with self._recovery.of(batch):
            if not batch.chunks:  # it only copies blocks
                self.runner.copy(batch)
                self.scheduler.landed(batch)
                return
            batch.masks = self._constraints.begin(batch)
            begun_at = self.clock()
            step = self.runner.run(batch)
            step.begun_at, step.launched_at = begun_at, self.clock()
            if batch.restores:
                copy_s = self.runner.copy_s
                self.scheduler.copied(batch, copy_s, step.launched_at - began - copy_s)
            self._in_flight.append(step)
            if self._lingers:
                self._lead.launched(self.scheduler.expected_s(batch), began, step.launched_at, batch.plain)

    def _depth_behind(self, batch: Batch | None) -> int:
        """Steps that may stay in flight now that this one was launched."""
        if batch is None or not batch.chunks:
            return 0  # nothing was launched, so there is time to collect
        if batch.speculative and not self._pipelined:
            return 0  # the next step depends on how many draft tokens are accepted
        return self._depth

    def _collect(self, step: PendingStep) -> None:
        """Turn a finished step into deltas, and finish the sequences that end here."""
        if step.sampling is not None:  # a pipeline's: its hidden states are back from the last stage
            with self._recovery.of(step.batch):
                step.finish()
            if step.sampling is not None:
                return  # it raised
        asked = self.clock()
        sampled = step.wait()
        now = self.clock()
        self.scheduler.landed(step.batch, step.took(now - max(step.begun_at, self._last_landed)))
        self._last_landed = now
        self._lead.landed(blocked=now - asked > _NO_WAIT_S, now=now)
        self.steps += 1
        self._step_tokens += step.batch.num_tokens
        self._emission.emit(sampled, self.speculation)
        if self.speculation is not None:
            self.speculation.step_done(step.batch)
            if not self.scheduler.has_work:
                self.speculation.pause()

    def _drain(self) -> None:
        """Collect all steps in flight."""
        while self._in_flight:
            self._collect(self._in_flight.popleft())

    def _output(self) -> StepOutput | None:
        """What is to be reported: all deltas since it was asked last."""
        if not self._emission.deltas:
            return None
        return StepOutput(self._emission.take(), self.load_snapshot())

    def _refuse_overdue(self, now: float) -> None:
        """What should have begun by now and has not, and what would begin and come too late."""
        for seq, seconds in self.scheduler.take_late():
            self._emission.finish(seq, "error", f"{PROMPT_TOO_SLOW} about {math.ceil(1e3 * seconds)} ms")
        for seq in self.scheduler.overdue(now):
            self._emission.finish(seq, "error", WAITED)

    def _expire(self, now: float) -> None:
        for seq in self.scheduler.expired(now):
            self._emission.finish(seq, "timeout")

    def _wait_for_reads(self) -> None:
        """Nothing can run before blocks or adapters have been read: do not spin meanwhile."""
        if self.scheduler.recalling:
            time.sleep(_DISK_WAIT_S)
        elif self.adapters is not None:
            self.adapters.wait()

    def _forget(self, seq: Sequence) -> None:
        if self.speculation is not None:
            self.speculation.forget(seq)

    def _start_over(self, lost: str) -> None:
        """A rank is gone, and the caches with it: all sequences are computed again."""
        log.error("%s; it is started again, and %d sequences too", lost, len(self.scheduler.running))
        self._in_flight.clear()
        self.scheduler.start_over()
        if self.speculation is not None:
            self.speculation.forget_caches()

    # --- between steps

    def spare_s(self) -> float:
        """How long the caller may wait for further requests before it asks for the next step: until shortly before the
        device is done with the one in flight, so that a prompt that comes meanwhile need not wait for another. 0 where
        there is nothing to gain, and as soon as the device is done: how long a step takes is only an estimate."""
        if not self._lingers or len(self._in_flight) != 1 or self.scheduler.waiting:
            return 0.0
        if self._constraints.opening or self._emission.deltas or self._in_flight[0].done:
            return 0.0
        return self._lead.spare_s(self.clock())

    def catch_up(self, spare_s: float) -> bool:
        """Use that time for what makes steps faster that are wanted often; whether something was done."""
        try:
            return self._catches_up and self.runner.executor.catch_up(spare_s)
        except Exception:
            log.exception("steps that are wanted often could not be prepared; others stand in for them")
            self._catches_up = False
            return False

    def improve(self, urgent: Callable[[], bool] = lambda: False) -> bool:
        """Use a moment without work for what makes later steps faster, for a twentieth of a second or so; False when
        there is nothing left to do. `urgent`: whether to break off, asked about every millisecond."""
        try:
            return not self.has_work and self.runner.executor.improve(urgent)
        except ReplicaLost:
            raise
        except Exception as error:  # such as no memory for another
            log.warning("no further steps are prepared; others stand in for them: %s", error)
            return False

    def settle(self) -> bool:
        """Use a moment without work to save what outlives the engine; False when there is nothing left to do."""
        if self.persistence is None or self.has_work:
            return False
        return self._settle() if self._restarts is None else bool(self._restarts.step(self._settle))

    def _settle(self) -> bool:
        assert self.persistence is not None
        try:
            return self.persistence.advance(self.clock())
        except ReplicaLost:
            raise
        except Exception:
            log.exception("KV blocks could not be copied to host memory; all that is cached is forgotten")
            self.forget_caches()
            return False

    def save(self, limit_s: float = SAVE_S, hurry: Callable[[], bool] = lambda: False) -> None:
        """Save what outlives the engine, within a limit and until `hurry` says so. Whatever still runs is aborted."""
        if self.persistence is None:
            return
        for request_id in self.scheduler.live:
            self.abort(request_id)
        self._drain()
        self._emission.deltas.clear()
        self.persistence.flush(limit_s, self.clock, hurry)

    # --- caches

    def erase(self, owner: str) -> Erasure:
        """Drop what the requests of an owner have left in the KV caches and behind them. See `kv.erasure`.
        Not while it is `reviving`."""
        return Erasure(self.scheduler.allocator.pool, owner, self.when_all_are_there)

    def when_all_are_there(self, act: Callable[[], None]) -> None:
        """Do something that needs all ranks, unless one of them is being started again."""
        if self._restarts is None:
            act()
        elif not self._restarts.under_way:
            self._restarts.step(act)

    def forget_caches(self, keep_disk: bool = False) -> None:
        """Nothing of the KV caches may be used again; no sequence is running. `keep_disk`: but what a disk keeps."""
        self.scheduler.allocator.pool.forget_all(keep_disk)
        if self.speculation is not None:
            self.speculation.forget_caches()

    # --- reports

    def load_snapshot(self) -> EngineLoad:
        scheduler, pool = self.scheduler, self.scheduler.allocator.pool
        load = EngineLoad(
            running=len(scheduler.running),
            waiting=scheduler.waiting + self._constraints.opening,
            used_blocks=pool.used,
            cached_blocks=pool.cached,
            total_blocks=pool.capacity,
            steps=self.steps,
            step_tokens=self._step_tokens,
            prompt_tokens=self._admission.prompt_tokens,
            generation_tokens=self._emission.generation_tokens,
            prefix_query_tokens=scheduler.prefix_query_tokens,
            prefix_hit_tokens=scheduler.prefix_hit_tokens,
            preemptions=scheduler.preemptions,
            decode_s=scheduler.pace.decode_s(len(scheduler.running)),
            adapters=None if self.adapters is None else self.adapters.load_snapshot(),
            devices=None if self.meter is None else self.meter.latest,
        )
        scheduler.report(load)
        for part in (self.speculation, self.exchange, self.balancer):
            if part is not None:
                part.report(load)
        return load

    def check_idle(self) -> None:
        """Assert that an engine without work holds nothing; for tests and soaks."""
        assert not self.has_work and self._constraints.opening == 0
        self.scheduler.check_idle()

    def reset_counters(self) -> None:
        """Forget what was counted and cached so far (the warm-up)."""
        self.steps = self._step_tokens = self._admission.prompt_tokens = self._emission.generation_tokens = 0
        self.scheduler.reset_counters()
        self._lead = Lead()
        self.forget_caches()
        if self.speculation is not None:
            self.speculation.reset_counters()
