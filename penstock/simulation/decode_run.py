"""Fast-forward: several plain decode steps at once.

While every running sequence decodes and nothing else can change, step i takes `first + i * slope` seconds: the batch
stays the same and each step reads one more token of context per sequence. `DecodeRun` holds such a run; `advance` does
to sequences and blocks what the steps would have done, in their order, so the pool cannot tell the difference.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass
from math import sqrt
from operator import itemgetter

from penstock.engine.kv.allocator import BlockAllocator
from penstock.engine.sequence import Sequence
from penstock.simulation.step_model import StepModel

LINEAR = 1e-9
"""Largest part of a step by which its time may differ from a straight line."""


@dataclass(slots=True)
class DecodeRun:
    """Steps of one batch that follow each other without a gap."""

    began: float
    steps: int
    size: int
    """Sequences in the batch."""
    first: float
    """Seconds of the first step."""
    slope: float
    """Seconds by which each step takes longer than the one before it."""

    @classmethod
    def of(cls, began: float, steps: int, size: int, context: int, model: StepModel) -> DecodeRun:
        """As many of `steps` as lie on a straight line; `context`: what the first step reads."""
        first = model.of(size, context, 0, 0, size)
        while steps > 1:
            span = steps - 1
            last = model.of(size, context + size * span, 0, 0, size)
            middle = model.of(size, context + size * (span // 2), 0, 0, size)
            slope = (last - first) / span
            if abs(first + slope * (span // 2) - middle) <= LINEAR * middle:
                return cls(began, steps, size, first, slope)
            steps //= 2
        return cls(began, 1, size, first, 0.0)

    def end(self, steps: int) -> float:
        """When that many steps are over."""
        return self.began + steps * self.first + self.slope * (steps * (steps - 1) / 2)

    def seconds(self, step: int) -> float:
        """How long a step takes, counted from 0."""
        return self.first + step * self.slope

    def done(self, now: float) -> int:
        """How many steps are over."""
        passed, slope = now - self.began, self.slope
        if slope * self.steps < 1e-6 * self.first:
            count = int(passed / self.first)
        else:
            half = self.first - slope / 2
            count = int((sqrt(half * half + 2 * slope * max(passed, 0.0)) - half) / slope)
        count = min(max(count, 0), self.steps)
        while count < self.steps and self.end(count + 1) <= now:
            count += 1
        while count > 0 and self.end(count) > now:
            count -= 1
        return count


def steps_that_fit(sequences: Collection[Sequence], steps: int, allocator: BlockAllocator) -> int:
    """For how many of `steps` decode steps there are free blocks."""
    size, free = allocator.block_size, allocator.pool.free
    if len(sequences) * (steps // size + 1) <= free:
        return steps
    phases = [0] * size
    for seq in sequences:
        phases[seq.computed % size] += 1
    fitting = 0
    while fitting < steps:
        needed = phases[-fitting % size]
        if needed > free:
            break
        free -= needed
        fitting += 1
    return fitting


def advance(sequences: Iterable[Sequence], steps: int, allocator: BlockAllocator, run: DecodeRun | None = None) -> None:
    """What `steps` collected decode steps and the scheduling of as many further ones do to running sequences. The host
    tier looks at the clock in every step, so with one `run` tells the times."""
    moved = list(sequences)
    if allocator.pool.host is not None or _repeats(moved, steps, allocator):
        _advance_in_order(moved, steps, allocator, run)
        return
    # Without names that exist already, the order in which blocks are taken and named makes no difference.
    size, pool, more = allocator.block_size, allocator.pool, bytes(steps)
    for seq in moved:
        seq.tokens.extend(more)
        seq.computed += steps
        missing = -(-seq.computed // size) - len(seq.blocks)
        if missing > 0:
            seq.blocks.extend(pool.allocate_many(missing))
    if allocator.prefix_cache:
        for seq in moved:
            full, named = len(seq.tokens) // size, seq.named
            if full > named:
                pool.name_many(seq.blocks[named:full], seq.block_names[named:full])
                seq.named = full


def _repeats(sequences: Iterable[Sequence], steps: int, allocator: BlockAllocator) -> bool:
    """Whether a block is filled whose text is cached already: two answers are the same."""
    size, find = allocator.block_size, allocator.pool.find
    for seq in sequences:
        for name in seq.block_names[seq.named : (len(seq.tokens) + steps) // size]:
            if find(name) is not None:
                return True
    return False


def _advance_in_order(
    sequences: Iterable[Sequence], steps: int, allocator: BlockAllocator, run: DecodeRun | None
) -> None:
    """Takes and names blocks in the order of the steps."""
    size, pool = allocator.block_size, allocator.pool
    starting: list[list[Sequence]] = [[] for _ in range(size)]
    filling: list[list[Sequence]] = [[] for _ in range(size)]
    more = bytes(steps)
    for seq in sequences:
        tokens = seq.tokens
        starting[seq.computed % size].append(seq)
        filling[len(tokens) % size].append(seq)
        tokens.extend(more)
        seq.computed += steps
    # (step, 0: take a block, 1: name one, whose): in a step, all blocks are taken before any is named.
    changes: list[tuple[int, int, list[Sequence]]] = []
    for phase in range(size):
        if starting[phase]:
            changes.extend((step, 0, starting[phase]) for step in range(-phase % size + 1, steps + 1, size))
        if filling[phase] and allocator.prefix_cache:
            changes.extend((step, 1, filling[phase]) for step in range(-phase % size or size, steps + 1, size))
    changes.sort(key=itemgetter(0, 1))
    ticked = 0
    allocate, name = pool.allocate, pool.name
    for step, kind, changed in changes:
        if pool.host is not None and run is not None:
            ticked = _tick(allocator, run, ticked, step)
        if kind == 0:
            for seq in changed:
                seq.blocks.append(allocate())
        else:
            for seq in changed:
                index = seq.named
                name(seq.blocks[index], seq.block_names[index])
                seq.named = index + 1
    if pool.host is not None and run is not None:
        _tick(allocator, run, ticked, steps)
        allocator.take_transfers()


def _tick(allocator: BlockAllocator, run: DecodeRun, ticked: int, step: int) -> int:
    for earlier in range(ticked + 1, step + 1):
        if earlier > 1:
            allocator.take_transfers()
        allocator.tick(run.end(earlier))
    return max(ticked, step)
