"""An engine without a model: the real scheduler and KV blocks, with steps that take modelled time.

For benchmarks and drills of gateway and routing. Batching, chunked prefill, preemption and the prefix cache
are the engine's own code; only the forward pass is replaced, by its duration. `begin` and `end` run a step in simulated
time, `step` in real time.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass

from penstock.engine.batch import Batch
from penstock.engine.kv.allocator import BlockAllocator
from penstock.engine.kv.pool import BlockPool
from penstock.engine.request import Delta, EngineInfo, EngineLoad, FinishReason, Request, StepOutput
from penstock.engine.scheduler import Scheduler
from penstock.engine.sequence import Sequence

TOKEN = 97
"""The token that it generates."""


@dataclass(frozen=True, slots=True)
class Speed:
    """How long a step takes. The defaults are about those of an 8B model on one large GPU."""

    step_s: float = 0.008
    """Reading the weights, in every step."""
    prefill_token_s: float = 60e-6
    decode_s: float = 40e-6
    """Each decoding sequence."""
    context_token_s: float = 15e-9
    """Each token of context that a decoding sequence reads."""

    def seconds(self, batch: Batch) -> float:
        prefill = sum(chunk.length for chunk in batch.chunks if not chunk.decodes)
        context = sum(chunk.start for chunk in batch.chunks if chunk.decodes)
        return (
            self.step_s
            + prefill * self.prefill_token_s
            + batch.num_decodes * self.decode_s
            + context * self.context_token_s
        )


class TimedEngine:
    """The engine interface of `InProcessBackend`. Answers are `max_tokens` long."""

    adapters = None

    def __init__(
        self,
        *,
        num_blocks: int = 2048,
        block_size: int = 16,
        max_running: int = 64,
        token_budget: int = 1024,
        max_model_len: int = 8192,
        vocab_size: int = 50_000,
        speed: Speed | None = None,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self.speed = speed or Speed()
        self._clock = clock
        self._sleep = sleep
        self.scheduler = Scheduler(
            BlockAllocator(BlockPool(num_blocks + 1), block_size),
            max_running=max_running,
            token_budget=token_budget,
            max_model_len=max_model_len,
        )
        self.info = EngineInfo(
            model="synthetic",
            instance=uuid.uuid4().hex,
            max_model_len=max_model_len,
            vocab_size=vocab_size,
            block_size=block_size,
            num_blocks=num_blocks,
            max_running=max_running,
            device="none",
            dtype="none",
        )
        self.on_begun: Callable[[list[str]], None] = lambda request_ids: None
        self._batch: Batch | None = None
        self._deltas: list[Delta] = []
        self._steps = self._prompt_tokens = self._generated = 0

    @property
    def has_work(self) -> bool:
        return self.scheduler.has_work or bool(self._deltas)

    def submit(self, request: Request) -> None:
        if len(request.prompt) + request.params.max_tokens > self.scheduler.max_model_len:
            self._deltas.append(Delta(request.request_id, finish_reason="error", error="the context is too long"))
            return
        self._prompt_tokens += len(request.prompt)
        self.scheduler.add(request, self._clock())

    def abort(self, request_id: str) -> None:
        seq = self.scheduler.get(request_id)
        if seq is not None:
            self._finish(seq, "abort")

    def unload_adapter(self, name: str) -> None:
        raise ValueError(f"there is no adapter {name}")

    def begin(self) -> float | None:
        """Schedule the next step; returns its duration, None when nothing can run."""
        now = self._clock()
        for seq in self.scheduler.expired(now):
            self._finish(seq, "timeout")
        self._batch = self.scheduler.schedule(now)
        if begun := self.scheduler.take_begun():
            self.on_begun(begun)
        return None if self._batch is None else self.speed.seconds(self._batch)

    def end(self) -> StepOutput | None:
        """Finish the step that was begun."""
        batch, self._batch = self._batch, None
        if batch is not None:
            self._steps += 1
            for chunk in batch.chunks:
                if chunk.samples and not chunk.seq.finished:
                    self._sample(chunk.seq)
        deltas, self._deltas = self._deltas, []
        return StepOutput(deltas, self.load_snapshot()) if deltas else None

    def step(self) -> StepOutput | None:
        seconds = self.begin()
        if seconds is not None:
            self._sleep(seconds)
        return self.end()

    def spare_s(self) -> float:
        return 0.0

    def load_snapshot(self) -> EngineLoad:
        scheduler, pool = self.scheduler, self.scheduler.allocator.pool
        return EngineLoad(
            running=len(scheduler.running),
            waiting=scheduler.waiting,
            used_blocks=pool.used,
            cached_blocks=pool.cached,
            total_blocks=pool.capacity,
            steps=self._steps,
            prompt_tokens=self._prompt_tokens,
            generation_tokens=self._generated,
            prefix_query_tokens=scheduler.prefix_query_tokens,
            prefix_hit_tokens=scheduler.prefix_hit_tokens,
            preemptions=scheduler.preemptions,
        )

    def _sample(self, seq: Sequence) -> None:
        seq.pending -= 1
        seq.tokens.append(TOKEN)
        self._generated += 1
        if seq.row >= 0:
            self.scheduler.allocator.publish(seq)
        delta = Delta(seq.id, [TOKEN])
        if not seq.started:
            seq.started = True
            delta.cached_tokens = seq.cached_tokens or 0
            if seq.first_scheduled is not None:
                delta.queue_s = seq.first_scheduled - seq.arrived
                delta.prefill_s = self._clock() - seq.first_scheduled
        self._deltas.append(delta)
        if len(seq.tokens) - seq.prompt_len >= seq.params.max_tokens:
            delta.finish_reason = "length"
            self._retire(seq, "length")

    def _finish(self, seq: Sequence, reason: FinishReason) -> None:
        self._retire(seq, reason)
        self._deltas.append(Delta(seq.id, finish_reason=reason))

    def _retire(self, seq: Sequence, reason: FinishReason) -> None:
        seq.finish_reason = reason
        self.scheduler.finish(seq)
