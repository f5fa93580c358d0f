"""What happens when a step raises: only the sequence that caused it fails.

A step that raises is undone, and its sequences are run again one by one; the one that raises alone is failed. One that
ran out of device memory is tried again in smaller steps. Nothing that it may have left on the device is used again.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

from penstock.engine.backends.interface.device import DeviceMemory
from penstock.engine.batch import Batch
from penstock.engine.scheduler import Scheduler
from penstock.engine.sequence import Sequence
from penstock.errors import ReplicaLost

log = logging.getLogger(__name__)


class Recovery:
    """`least_tokens`: a step of so few tokens is not made smaller. `drain` collects all steps in flight; `fail` ends a
    sequence with the reason."""

    def __init__(
        self,
        scheduler: Scheduler,
        memory: DeviceMemory,
        least_tokens: int,
        drain: Callable[[], None],
        fail: Callable[[Sequence, str], None],
    ) -> None:
        self._scheduler = scheduler
        self._memory = memory
        self._least_tokens = least_tokens
        self._drain = drain
        self._fail = fail

    @contextmanager
    def of(self, batch: Batch) -> Iterator[None]:
        """Around the running of a batch: what is raised there ends here, unless a rank is lost."""
        try:
            yield
        except ReplicaLost:
            raise  # no sequence caused it, and none can be run again here
        except torch.OutOfMemoryError as error:
            self._shrink(batch, error)
        except Exception as error:
            log.exception("step of %d sequences failed", len(batch.chunks))
            if _is_of_device(error):  # nobody knows what it still did
                self._scheduler.allocator.pool.forget_all()
            self._isolate(batch, f"{type(error).__name__}: {error}")

    def _shrink(self, batch: Batch, error: Exception) -> None:
        """Out of device memory: compute less per step from now on, and start this step's sequences again."""
        if self._scheduler.token_budget <= self._least_tokens:
            self._isolate(batch, f"out of memory even for small steps: {error}")
            return
        budget = self._scheduler.token_budget = max(self._least_tokens, self._scheduler.token_budget // 2)
        log.warning("out of memory in a step of %d tokens; token budget is now %d", batch.num_tokens, budget)
        for seq in self._unwind(batch):
            self._scheduler.preempt(seq)
        self._memory.trim()

    def _isolate(self, batch: Batch, message: str) -> None:
        """A sequence that was alone in the step has caused it, unless that was a copy from the host; otherwise try each
        of them alone, and without such copies."""
        sequences = self._unwind(batch)
        if len(batch.chunks) != 1 or batch.speculative or batch.fills:
            self._scheduler.isolate(sequences)
            return
        for seq in sequences:
            self._fail(seq, f"the engine could not run this request ({message})")

    def _unwind(self, batch: Batch) -> list[Sequence]:
        """Undo a batch that did not run; its running sequences. Prefixes cached on the device cannot be trusted any
        more; those on the host and on disk can, but for what this batch was to copy."""
        self._drain()
        self._scheduler.distrust(batch)
        for chunk in batch.chunks:
            if chunk.samples and not chunk.seq.finished:
                chunk.seq.pending -= 1
        self._scheduler.landed(batch)
        return [chunk.seq for chunk in batch.chunks if not chunk.seq.finished and chunk.seq.row >= 0]


def _is_of_device(error: Exception) -> bool:
    """Whether the device itself failed, and not what was asked of it."""
    return isinstance(error, torch.AcceleratorError) or any(
        sign in str(error) for sign in ("CUDA error", "Triton Error [CUDA]")
    )
