"""Messages between rank 0 and the others: one per step, a few kilobytes of integers, and calls for all that is rare.

A step's message carries its packed inputs and the cells of the block tables that changed since the last one; a rank
that receives it can run its part of the decoder without asking back. A call names something else to do between two
steps (copy blocks, bring in an adapter, fall asleep) and is answered. Messages go through a socket and not through the
collectives, so that an idle rank sleeps without a deadline and notices at once when rank 0 is gone.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field
from enum import IntEnum
from multiprocessing.connection import Connection
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from penstock.engine.backends.interface import AttentionBatch, Ints, StateBatch, attended
from penstock.engine.kv.host import Transfers
from penstock.engine.parallel import plain


class Op(IntEnum):
    FORWARD = 1
    """Run the layers of a step."""
    HEAD = 2
    """Take part in the logits of some hidden states."""
    CALL = 3
    """Do something else."""
    MOVE = 4
    """Copy blocks to and from host memory."""
    REPLAY = 5
    """Run a captured step."""
    CAPTURE = 6
    """Capture a step."""


TARGET, DRAFT = 0, 1
"""Which model of the engine a message is about."""
_HEADER = 10
"""Integers before the arrays: operation, model, three lengths, three bounds, adapters, states."""


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
    model: int = TARGET
    adapter_slots: Ints | None = None
    """Of each token, -1 where there is none; None when no sequence of the step uses an adapter."""
    narrow: bool = False
    """Whether all adapters of the step are; see `LoadedAdapter`."""
    further: bool = False
    """Whether some adapter of the step touches linears that few do; see `Site`."""
    altered: bool = False
    """Whether some changes single outputs; see `AdaptedModel`."""
    states: Ints | None = None
    """See `HostBatch`."""

    def encode(self) -> bytes:
        adapted = 0 if self.adapter_slots is None else 3 + self.altered if self.further else 2 - self.narrow
        header = np.array(
            [
                Op.FORWARD, self.model, len(self.token_ids), len(self.rows), self.cells.shape[1],
                self.num_decodes, self.max_query, self.max_context, adapted, self.states is not None,
            ],
            np.int64,
        )  # fmt: skip
        arrays = [self.token_ids, self.positions, self.slots, self.query_starts, self.context_lens, self.rows]
        arrays.append(self.cells.reshape(-1))
        if self.states is not None:
            arrays.append(self.states.reshape(-1))
        if self.adapter_slots is not None:
            arrays.append(self.adapter_slots)
        return np.concatenate((header, *arrays), dtype=np.int64).tobytes()

    @classmethod
    def decode(cls, data: Ints) -> Forward:
        _, model, tokens, sequences, cells, decodes, max_query, max_context, adapted, stateful = map(
            int, data[:_HEADER]
        )
        lengths = (tokens, tokens, tokens, sequences + 1, sequences, sequences, 3 * cells, 4 * tokens * stateful)
        parts = np.split(data[_HEADER:], np.cumsum(lengths))
        ids, positions, slots, starts, contexts, rows, flat, states, adapters = parts
        return cls(
            ids,
            positions,
            slots,
            starts,
            contexts,
            rows,
            flat.reshape(3, cells),
            decodes,
            max_query,
            max_context,
            model=model,
            adapter_slots=adapters if adapted else None,
            narrow=adapted == 1,
            further=adapted >= 3,
            altered=adapted == 4,
            states=states.reshape(4, tokens) if stateful else None,
        )

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
            total_context=int(self.context_lens[self.num_decodes :].sum()),
            attended=attended(self.query_starts, self.context_lens, self.num_decodes),
            longest=int(self.context_lens.max(initial=0)),
            states=None if self.states is None else StateBatch(*map(narrow, self.states)),
        )


@dataclass(slots=True)
class Head:
    """Logits of `count` hidden states."""

    count: int
    model: int = TARGET
    adapter_slots: Ints | None = None
    """Of each of them; None: the head has no adapters in this step."""

    def encode(self) -> bytes:
        slots = () if self.adapter_slots is None else self.adapter_slots
        return np.array([Op.HEAD, self.model, self.count, *slots], np.int64).tobytes()

    @classmethod
    def decode(cls, data: Ints) -> Head:
        slots = data[3:]
        return cls(int(data[2]), int(data[1]), slots if len(slots) else None)


@dataclass(slots=True)
class Replay:
    """A captured step: which one, and its packed inputs as they go to the device."""

    kind: int
    shape: tuple[int, int]
    cells: Ints
    """As in `Forward`."""
    inputs: npt.NDArray[np.uint8]
    model: int = TARGET

    def encode(self) -> bytes:
        header = (Op.REPLAY, self.model, self.kind, *self.shape, self.cells.shape[1])
        return np.array(header, np.int64).tobytes() + self.cells.tobytes() + self.inputs.tobytes()

    @classmethod
    def decode(cls, raw: bytes) -> Replay:
        _, model, kind, first, second, cells = map(int, np.frombuffer(raw, np.int64, 6))
        end = 8 * (6 + 3 * cells)
        changed = np.frombuffer(raw[48:end], np.int64).reshape(3, cells).copy()
        return cls(kind, (first, second), changed, np.frombuffer(raw, np.uint8, offset=end), model)


@dataclass(slots=True)
class Capture:
    """A step to capture, while rank 0 does."""

    kind: int
    shape: tuple[int, int]
    model: int = TARGET

    def encode(self) -> bytes:
        return np.array([Op.CAPTURE, self.model, self.kind, *self.shape], np.int64).tobytes()


@dataclass(slots=True)
class Move:
    """Copies between the cache and the host tier that the next step depends on."""

    transfers: Transfers
    states: bool = False
    """Whether they are of states, and not of blocks."""

    def encode(self) -> bytes:
        out, back = self.transfers.out, self.transfers.back
        numbers = [
            Op.MOVE,
            self.states,
            len(out),
            *itertools.chain.from_iterable(out),
            *itertools.chain(back, back.values()),
        ]
        return np.array(numbers, np.int64).tobytes()

    @classmethod
    def decode(cls, data: Ints) -> Move:
        end = 3 + 2 * int(data[2])
        blocks, slots = data[end:].reshape(2, -1).tolist()
        pairs = data[3:end].reshape(-1, 2).tolist()
        transfers = Transfers([(block, slot) for block, slot in pairs], dict(zip(blocks, slots, strict=True)))
        return cls(transfers, bool(data[1]))


@dataclass(frozen=True, slots=True)
class Call:
    """Something to do between two steps, by name; see `rank.RankServer`."""

    number: int
    name: str
    args: tuple[Any, ...]

    def encode(self) -> bytes:
        return np.int64(Op.CALL).tobytes() + plain.encode((self.number, self.name, self.args))


@plain.record
@dataclass(frozen=True, slots=True)
class Report:
    """A rank's message while it starts: a number to agree on, or why it cannot go on."""

    count: int = 0
    choices: dict[str, Any] = field(default_factory=dict)
    """What it has chosen by itself, and must have chosen like rank 0."""
    problem: str = ""
    on_purpose: bool = False
    """Whether the problem is its own and a `PenstockError`, to be shown to the operator: neither a bug nor that another
    rank is gone."""


@plain.record
@dataclass(frozen=True, slots=True)
class Reply:
    """What a call came to on one rank."""

    number: int
    value: Any = None
    problem: str = ""
    """Why it was refused; empty when it was not."""


def receive(connection: Connection) -> Forward | Head | Move | Call | Replay | Capture:
    """The next message; EOFError when rank 0 is gone."""
    raw = connection.recv_bytes()
    operation = int(np.frombuffer(raw, np.int64, 1)[0])
    if operation == Op.CALL:
        return Call(*plain.decode(raw[8:]))
    if operation == Op.REPLAY:
        return Replay.decode(raw)
    # A copy, because the arrays are written to devices and must not be read-only.
    data = np.frombuffer(raw, np.int64).copy()
    if operation == Op.MOVE:
        return Move.decode(data)
    if operation == Op.CAPTURE:
        model, kind, first, second = map(int, data[1:])
        return Capture(kind, (first, second), model)
    return Forward.decode(data) if operation == Op.FORWARD else Head.decode(data)
