"""The messages between a gateway worker and the coordinator in its supervisor, over one Unix socket per worker.

    worker                               coordinator
    Join              ──────────────────►            first
    Reserve           ──────────────────►
                      ◄──────────────────  Decided   one per reservation, in order of arrival
    Settle            ──────────────────►            no answer
    Change            ──────────────────►            tenants or keys were changed
                      ◄──────────────────  Changed   passed on to the others
    Noted             ──────────────────►            one of them has refreshed its keys
                      ◄──────────────────  Known     all have refreshed
    Report            ──────────────────►            every second, and when asked
                      ◄──────────────────  Ask       asks for current readings
    Collect           ──────────────────►
                      ◄──────────────────  Collected the readings of all workers
    Seek              ──────────────────►            timelines of recent requests
                      ◄──────────────────  Sought    passed on to the others
    Told              ──────────────────►            the timelines of one of them
                      ◄──────────────────  Found     the timelines of all
    Recall            ──────────────────►
                      ◄──────────────────  Recalled  the load of recent hours

A frame is its length in four bytes and the message in MessagePack.
"""

from __future__ import annotations

import asyncio
import struct
from typing import Generic, TypeAlias, TypeVar

import msgspec

from penstock.errors import PenstockError
from penstock.limits import Amounts, Decision, Limit
from penstock.telemetry.exposition import Readings
from penstock.telemetry.load_history import ModelHistory
from penstock.telemetry.timeline import Shown, TraceQuery

LARGEST = 64 * 2**20
_length = struct.Struct("!I")


class Join(msgspec.Struct, frozen=True, tag="join"):
    worker: int


class Reserve(msgspec.Struct, frozen=True, tag="reserve"):
    call: int
    id: str
    limits: list[Limit]
    amounts: Amounts


class Settle(msgspec.Struct, frozen=True, tag="settle"):
    id: str
    limits: list[Limit]
    reserved: Amounts
    used: Amounts


class Change(msgspec.Struct, frozen=True, tag="change"):
    """Tenants or keys were changed."""

    call: int


class Changed(msgspec.Struct, frozen=True, tag="changed"):
    number: int


class Noted(msgspec.Struct, frozen=True, tag="noted"):
    number: int
    """Which `Changed` this answers."""


class Known(msgspec.Struct, frozen=True, tag="known"):
    call: int


class Report(msgspec.Struct, frozen=True, tag="report"):
    readings: list[Readings]
    asked: int = 0
    """Which `Ask` this answers; 0: none."""


class Collect(msgspec.Struct, frozen=True, tag="collect"):
    call: int
    readings: list[Readings]
    """The readings of the worker that asks."""


class Decided(msgspec.Struct, frozen=True, tag="decided"):
    call: int
    decision: Decision


class Ask(msgspec.Struct, frozen=True, tag="ask"):
    number: int


class Collected(msgspec.Struct, frozen=True, tag="collected"):
    call: int
    readings: list[Readings]


class Seek(msgspec.Struct, frozen=True, tag="seek"):
    call: int
    query: TraceQuery


class Sought(msgspec.Struct, frozen=True, tag="sought"):
    number: int
    query: TraceQuery


class Told(msgspec.Struct, frozen=True, tag="told"):
    number: int
    """Which `Sought` this answers."""
    traces: list[Shown]


class Found(msgspec.Struct, frozen=True, tag="found"):
    call: int
    traces: list[Shown]


class Recall(msgspec.Struct, frozen=True, tag="recall"):
    call: int


class Recalled(msgspec.Struct, frozen=True, tag="recalled"):
    call: int
    models: dict[str, ModelHistory]


ToCoordinator: TypeAlias = Join | Reserve | Settle | Change | Noted | Report | Collect | Seek | Told | Recall
ToWorker: TypeAlias = Decided | Changed | Known | Ask | Collected | Sought | Found | Recalled
T = TypeVar("T")

_encoder = msgspec.msgpack.Encoder()


class CoordinatorProtocolError(PenstockError):
    """The peer sent something that is not in this protocol."""


def frame(message: ToCoordinator | ToWorker) -> bytes:
    body = _encoder.encode(message)
    return _length.pack(len(body)) + body


class Frames(Generic[T]):
    """Reads messages from a stream."""

    def __init__(self, stream: asyncio.StreamReader, decoder: msgspec.msgpack.Decoder[T]) -> None:
        self._stream = stream
        self._decoder = decoder

    async def next(self) -> T | None:
        """The next message; None at the end of the stream."""
        try:
            (size,) = _length.unpack(await self._stream.readexactly(_length.size))
            if size > LARGEST:
                raise CoordinatorProtocolError(f"a message of {size} bytes")
            return self._decoder.decode(await self._stream.readexactly(size))
        except (asyncio.IncompleteReadError, ConnectionError):
            return None
        except msgspec.MsgspecError as error:
            raise CoordinatorProtocolError(f"an unreadable message: {error}") from error


coordinator_decoder: msgspec.msgpack.Decoder[ToCoordinator] = msgspec.msgpack.Decoder(ToCoordinator)
worker_decoder: msgspec.msgpack.Decoder[ToWorker] = msgspec.msgpack.Decoder(ToWorker)
