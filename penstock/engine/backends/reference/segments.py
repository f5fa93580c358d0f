"""How a step is cut where layers go from state to state: behind every token whose state is kept.

What follows another segment of its sequence comes in a later wave. Single tokens of a wave are computed together.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import pairwise, zip_longest

import torch
from torch import Tensor

from penstock.engine.backends.interface import AttentionBatch


@dataclass(frozen=True, slots=True)
class Segment:
    """Consecutive tokens of one sequence."""

    begin: int
    end: int
    """In the packed tokens."""
    start: int
    """Position of the first one."""
    read: int
    write: int
    """Slots of states."""
    row: int
    """In the block tables."""


@dataclass(frozen=True, slots=True)
class Singles:
    """Segments of one token."""

    at: Tensor
    """int64 [N]: in the packed tokens; so are the others."""
    positions: Tensor
    reads: Tensor
    writes: Tensor
    tables: Tensor
    """[N, max_blocks]."""
    starts: list[int]
    """The positions, on the host."""
    _completing: dict[int, Tensor] = field(default_factory=dict)

    @property
    def longest(self) -> int:
        """The largest context, the tokens themselves included."""
        return max(self.starts) + 1

    def completing(self, rate: int) -> Tensor:
        """int64 [n]: which of them are the last of `rate` tokens. Nothing waits for the device."""
        if rate not in self._completing:
            which = [at for at, start in enumerate(self.starts) if (start + 1) % rate == 0]
            self._completing[rate] = torch.tensor(which, dtype=torch.int64, device=self.at.device)
        return self._completing[rate]

    def split(self, size: int) -> list[Singles]:
        if len(self.at) <= size:
            return [self]
        parts = [slice(begin, begin + size) for begin in range(0, len(self.at), size)]
        return [
            Singles(
                self.at[part],
                self.positions[part],
                self.reads[part],
                self.writes[part],
                self.tables[part],
                self.starts[part],
            )
            for part in parts
        ]


@dataclass(frozen=True, slots=True)
class Wave:
    singles: Singles | None
    runs: list[Segment]
    """Of several tokens."""


def waves_of(batch: AttentionBatch, *, alone: bool) -> list[Wave]:
    """Those of a step, made once for all its layers. `alone`: token by token, and nothing together."""
    if batch.waves is None:
        by_run = _by_run(batch, alone)
        if alone:
            batch.waves = [_wave([one], batch) for run in by_run for one in run]
        else:
            batch.waves = [_wave([one for one in wave if one is not None], batch) for wave in zip_longest(*by_run)]
    found: list[Wave] = batch.waves
    return found


def _by_run(batch: AttentionBatch, alone: bool) -> list[list[Segment]]:
    states = batch.states
    assert states is not None, "these layers need to know where their states are"
    lasts, reads, writes = torch.stack((states.last, states.reads, states.writes)).tolist()
    positions, starts, rows = batch.positions.tolist(), batch.query_starts.tolist(), batch.rows.tolist()
    row_of = [row for row, (begin, end) in zip(rows, pairwise(starts), strict=True) for _ in range(begin, end)]
    runs, at = [], 0
    while at < len(row_of):
        last, read, run = lasts[at], reads[at], list[Segment]()
        assert last >= at, "a run ends before it begins"
        begin = at
        for token in range(at, last + 1):
            if not (alone or writes[token] or token == last):
                continue
            # What nobody keeps goes where the run's next state goes, to be read from there.
            write = next((slot for slot in writes[token : last + 1] if slot), 0)
            run.append(Segment(begin, token + 1, positions[begin], read, write, row_of[begin]))
            begin, read = token + 1, write
        runs.append(run)
        at = last + 1
    return runs


def _wave(segments: list[Segment], batch: AttentionBatch) -> Wave:
    device = batch.positions.device
    ones = [one for one in segments if one.end - one.begin == 1]
    longer = [one for one in segments if one.end - one.begin > 1]
    if not ones:
        return Wave(None, longer)
    at, start, read, write, row = torch.tensor(
        [[one.begin, one.start, one.read, one.write, one.row] for one in ones], device=device
    ).t()
    tables = batch.block_tables[row]
    return Wave(Singles(at, start, read, write, tables, [one.start for one in ones]), longer)
