"""The steps that the engine takes for a workload, without computing any: the real scheduler over blocks that nobody
fills. What a step would cost is then a question for `planning.step_time`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator

from penstock.bench.workloads import Workload
from penstock.engine.batch import Batch
from penstock.engine.kv.allocator import BlockAllocator
from penstock.engine.kv.pool import BlockPool
from penstock.engine.request import Request, SamplingParams
from penstock.engine.scheduler import Scheduler
from penstock.planning.step_time import StepWork, attended

_BLOCK = 16


def walk(
    workload: Workload, *, max_running: int, token_budget: int, num_blocks: int | None = None
) -> Iterator[StepWork]:
    """Step by step, as `bench.engine.run` drives an engine of these limits; without `num_blocks` memory never ends."""
    enough = sum(-(-(inputs + outputs) // _BLOCK) for inputs, outputs in workload.lengths())
    scheduler = Scheduler(
        BlockAllocator(BlockPool((num_blocks or enough) + 1), _BLOCK, prefix_cache=False),
        max_running=workload.max_running or max_running,
        token_budget=token_budget,
        max_model_len=workload.longest + 1,
    )
    queue = deque(
        Request(str(index), [0] * inputs, SamplingParams(max_tokens=outputs))
        for index, (inputs, outputs) in enumerate(workload.lengths())
    )
    free = workload.concurrency or len(queue)
    while queue or scheduler.has_work:
        while queue and free:
            scheduler.add(queue.popleft(), 0.0)
            free -= 1
        batch = scheduler.schedule(0.0)
        assert batch is not None, "a workload without adapters and deadlines always has a next step"
        yield work_of(batch)
        free += _sample(scheduler, batch)


def work_of(batch: Batch) -> StepWork:
    """What a batch computes."""
    context = prefill = positions = samples = 0
    for chunk in batch.chunks:
        samples += 1 + len(chunk.drafts) if chunk.samples else 0
        if chunk.decodes:
            context += attended(chunk.start, chunk.length)
        else:
            prefill += chunk.length
            positions += attended(chunk.start, chunk.length)
    return StepWork(batch.num_decodes, context, prefill, positions, samples)


def _sample(scheduler: Scheduler, batch: Batch) -> int:
    """Appends a token to each sequence that samples; returns how many ended with it."""
    ended = 0
    for chunk in batch.chunks:
        if not chunk.samples:
            continue
        seq = chunk.seq
        seq.pending -= 1
        seq.tokens.append(0)
        if len(seq.tokens) >= seq.limit:
            seq.finish_reason = "length"
            scheduler.finish(seq)
            ended += 1
    return ended
