"""Messages from rank 0 to the others: one per step, a few kilobytes of integers.

The message carries the packed inputs of the step and the cells of the block tables that changed since the last
message; a rank that receives it can run its part of the decoder without asking back. Messages go through a socket
and not through the collectives, so that an idle rank sleeps without a deadline and notices at once when rank 0 is gone.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum
from multiprocessing.connection import Connection

import numpy as np
import torch

from penstock.engine.backends.interface import AttentionBatch, Ints


class Op(IntEnum):
    FORWARD = 1
    """Run the layers of a step."""
    HEAD = 2
    """Take part in the logits of some hidden states."""


_HEADER = 8
"""Integers before the arrays: operation, three lengths, three bounds, one unused."""


@dataclass(slots=True)
class Forward:
    """A step's inputs on the host."""

    token_ids: Ints
    positions: Ints
    slots: Ints
    query_starts: Ints
    context_lens: Ints
    rows: Ints
    cells: Ints
    """[3, n]: row, column and block of the block table cells that changed."""
    num_decodes: int
    max_query: int
    max_context: int

    def encode(self) -> bytes:
        header = np.array(
            [
                Op.FORWARD, len(self.token_ids), len(self.rows), self.cells.shape[1],
                self.num_decodes, self.max_query, self.max_context, 0,
            ],
            np.int64,
        )  # fmt: skip
        arrays = (self.token_ids, self.positions, self.slots, self.query_starts, self.context_lens, self.rows)
        return np.concatenate((header, *arrays, self.cells.reshape(-1)), dtype=np.int64).tobytes()

    @classmethod
    def decode(cls, data: Ints) -> Forward:
        _, tokens, sequences, cells, decodes, max_query, max_context, _ = map(int, data[:_HEADER])
        lengths = (tokens, tokens, tokens, sequences + 1, sequences, sequences, 3 * cells)
        ids, positions, slots, starts, contexts, rows, flat = np.split(data[_HEADER:], np.cumsum(lengths)[:-1])
        changed = flat.reshape(3, cells)
        return cls(ids, positions, slots, starts, contexts, rows, changed, decodes, max_query, max_context)

    def batch(self, block_tables: torch.Tensor) -> AttentionBatch:
        """The step on the device of `block_tables`, which must hold the new cells already."""
        device = block_tables.device

        def narrow(array: Ints) -> torch.Tensor:
            return torch.from_numpy(array.astype(np.int32)).to(device, non_blocking=True)

        return AttentionBatch(
            positions=torch.from_numpy(self.positions).to(device, non_blocking=True),
            slots=torch.from_numpy(self.slots).to(device, non_blocking=True),
            query_starts=narrow(self.query_starts),
            context_lens=narrow(self.context_lens),
            rows=narrow(self.rows),
            block_tables=block_tables,
            num_decodes=self.num_decodes,
            max_query=self.max_query,
            max_context=self.max_context,
        )


@dataclass(slots=True)
class Head:
    """Logits of `count` hidden states."""

    count: int

    def encode(self) -> bytes:
        return np.array([Op.HEAD, self.count, 0, 0, 0, 0, 0, 0], np.int64).tobytes()


def receive(connection: Connection) -> Forward | Head:
    """The next message; EOFError when rank 0 is gone."""
    # A copy, because the arrays are written to devices and must not be read-only.
    data = np.frombuffer(connection.recv_bytes(), np.int64).copy()
    return Forward.decode(data) if data[0] == Op.FORWARD else Head(int(data[1]))
