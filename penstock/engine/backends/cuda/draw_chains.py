"""Several draft tokens in one launch: decode steps of a drafter in a row, each fed with the token drawn before it.

Only the tokens themselves are unknown when the first of those steps is launched. Positions, slots and noise keys are
not, so all steps are captured as one graph, and the host waits once for all draft tokens instead of feeding the device
one short step after the other. A head of one layer takes less time to run than to launch; see `HeadProposer`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch
from torch import Tensor

from penstock.engine.backends.cuda.capture import record
from penstock.engine.backends.cuda.packed_inputs import Field, PackedInputs
from penstock.engine.noise import row_keys
from penstock.engine.runner.rows import Rows
from penstock.engine.sequence import Sequence

if TYPE_CHECKING:
    from penstock.engine.backends.cuda.decode_graphs import DecodeGraphs

_MOST_ROWS = 32
"""Sequences that draw together: with more of them, deep drafts do not pay."""


class Chain(NamedTuple):
    """What a graph is captured for."""

    rows: int
    steps: int


@dataclass(slots=True)
class _Captured:
    graph: torch.cuda.CUDAGraph
    inputs: PackedInputs
    tokens: Tensor
    """int64 [steps, rows]"""


class DrawChains:
    """Chains of up to `depth` decode steps over the rows and the cache of `graphs`."""

    def __init__(self, graphs: DecodeGraphs, depth: int) -> None:
        self._graphs = graphs
        self._captured: dict[Chain, _Captured] = {}
        self.depth = depth
        self.buckets = [size for size in graphs.buckets if size <= _MOST_ROWS]

    def fits(self, counts: Mapping[Sequence, int]) -> bool:
        return len(counts) <= self.buckets[-1] and max(counts.values()) <= self.depth

    def replay(self, counts: Mapping[Sequence, int]) -> Tensor:
        """Draw that many tokens of each sequence, behind the one its row drew last; [steps, sequences].

        The blocks of all tokens must be in the rows. A sequence that wants fewer than others leaves its place to the
        scratch row: what stands there in later steps means nothing.
        """
        graphs, rows = self._graphs, self._graphs.rows
        assert isinstance(rows, Rows)
        bucket = next(size for size in self.buckets if size >= len(counts))
        shape = Chain(bucket, max(counts.values()))
        captured = self._captured.get(shape) or self.capture(shape)
        values = {
            name: np.full((shape.steps, bucket), graphs.padding.get(name, 0), kind) for name, kind in graphs.fields
        }
        row = np.array([seq.row for seq in counts], np.int64)
        begin = np.array([len(seq.tokens) for seq in counts], np.int64)
        count = np.array(list(counts.values()), np.int64)
        size = graphs.kv.block_size
        for step in range(shape.steps):
            at = np.flatnonzero(count > step)
            mine, positions = row[at], begin[at] + step
            blocks = rows.host_tables[mine, positions // size].astype(np.int64)
            values["ids"][step, at] = -1
            values["positions"][step, at] = positions
            values["slots"][step, at] = blocks * size + positions % size
            values["keys"][step, at] = row_keys(rows.seeds[mine], positions + 1)
            values["contexts"][step, at] = positions + 1
            for name in ("rows", "rows64", "stores"):
                values[name][step, at] = mine
        captured.inputs.send({name: array.reshape(-1) for name, array in values.items()}, {})
        captured.graph.replay()
        return captured.tokens[:, : len(counts)]

    def capture_all(self) -> None:
        for bucket in reversed(self.buckets):
            for steps in range(self.depth, 0, -1):
                if Chain(bucket, steps) not in self._captured:
                    self.capture(Chain(bucket, steps))

    def capture(self, shape: Chain) -> _Captured:
        graphs = self._graphs
        device = graphs.kv.device
        fields = [Field(name, kind, shape.rows * shape.steps) for name, kind in graphs.fields]
        inputs = PackedInputs(fields, device)
        inputs.send({name: np.zeros(0, kind) for name, kind in graphs.fields}, graphs.padding)

        def part_of(part: slice, name: str, dtype: torch.dtype) -> Tensor:
            return inputs.view(name, dtype)[part]

        def draw() -> tuple[Tensor, Tensor]:
            parts = [slice(step * shape.rows, (step + 1) * shape.rows) for step in range(shape.steps)]
            tokens = torch.stack([graphs.step(partial(part_of, part), shape.rows)[1] for part in parts])
            return tokens, tokens

        recording = record(device, draw, graphs.pool, draw)
        captured = self._captured[shape] = _Captured(recording.graph, inputs, recording.results[0])
        return captured

    def forget(self) -> list[Chain]:
        """Drop every graph, because what they read is about to move; what they were for, largest first."""
        shapes = sorted(self._captured, reverse=True)
        self._captured.clear()
        self._graphs.pool.forget()
        return shapes
