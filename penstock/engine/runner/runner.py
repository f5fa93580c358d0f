"""Runs the steps of one model: copies that a step depends on first, then the step itself by the backend's executor.

`run` returns without waiting. Where the device works by itself, results are copied to pinned memory behind the step and
`PendingStep.wait` blocks on their event; the next step takes the sampled tokens from the device rows, so it can be
launched before the host has seen them.
"""

from __future__ import annotations

import time

from penstock.engine.adapters.runtime import AdapterRuntime
from penstock.engine.backends.backend import Backend
from penstock.engine.batch import Batch
from penstock.engine.kv.cache import KVCache
from penstock.engine.kv.mover import BlockMover
from penstock.engine.models.decoder import Decoder
from penstock.engine.runner.eager import EagerExecutor
from penstock.engine.runner.executor import Executor
from penstock.engine.runner.inputs import InputBuilder
from penstock.engine.runner.resources import RunnerResources
from penstock.engine.runner.rows import Rows
from penstock.engine.runner.step import PendingStep


class Runner:
    """Owns the decoder, the KV cache and the device rows."""

    def __init__(
        self,
        backend: Backend,
        decoder: Decoder,
        kv: KVCache,
        *,
        max_rows: int,
        max_model_len: int,
        block_size: int,
        max_verified: int = 0,
        adapters: AdapterRuntime | None = None,
        followed: int = ~0,
        deterministic: bool = False,
        several_ranks: bool = False,
        deferred: bool = False,
        mover: BlockMover | None = None,
        state_mover: BlockMover | None = None,
        scores_prompts: bool = True,
        drawn_ahead: int = 0,
    ) -> None:
        """`max_verified`: most decoded tokens in a step that verifies draft tokens. `followed`: see `Rows`. `deferred`:
        several steps are in flight in a pipeline, each samples when it is waited for. `mover`: makes the copies to and
        from the host, `state_mover` those of states. `scores_prompts`, `drawn_ahead`: see `RunnerResources`."""
        self.backend = backend
        self._deferred = deferred
        self._timed = not deferred and not several_ranks
        self.decoder = decoder
        self.adapters = adapters
        self.kv = kv
        self.mover = mover
        self.copy_s = 0.0
        """How long the last copies of blocks kept the host busy."""
        self.state_mover = state_mover
        # One row more than sequences can have: the scratch row that pads CUDA graphs.
        vocabulary = decoder.config.vocab_size + (0 if adapters is None else adapters.room)
        self.rows = Rows(max_rows + 1, max_model_len, vocabulary, backend, block_size, followed, deterministic)
        self.inputs = InputBuilder(self.rows, block_size, keep_host=several_ranks, alone=deterministic)
        resources = RunnerResources(
            backend, decoder, kv, self.rows, self.inputs, adapters, max_rows, max_verified, drawn_ahead, scores_prompts
        )
        # Other ranks that cannot follow captured steps launch every step themselves: nothing of it is recorded here.
        eager = decoder.launched_eagerly or (several_ranks and decoder.followers is None)
        self.executor: Executor = EagerExecutor(resources, deferred=deferred) if eager else backend.executor(resources)

    def copy(self, batch: Batch) -> None:
        """Make the copies of a step, between device and host."""
        if batch.transfers is not None:
            assert self.mover is not None
            began = time.perf_counter()
            self.mover.run(batch.transfers)
            self.copy_s = time.perf_counter() - began
        if batch.state_transfers is not None:
            assert self.state_mover is not None
            self.state_mover.run(batch.state_transfers)

    def run(self, batch: Batch) -> PendingStep:
        """Launch one step."""
        began = self.backend.mark() if self._timed else None
        self.copy(batch)
        if self.adapters is not None:
            self.adapters.fill_slots()
        step = self.executor.run(batch)
        step.began = began
        if step.event is None and not self._deferred:
            # A step that samples nothing is waited for too: a long prompt must not get further ahead than others.
            step.event = self.backend.mark()
        return step
