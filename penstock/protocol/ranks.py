"""The messages between rank 0 of an engine and a machine that runs some of its other ranks.

Rank 0 listens (ROUTER), each machine connects (DEALER), over the same encrypted and authenticated sockets as gateways
and engines use:

    machine                                rank 0
    Join             ──────────────────►            once per connection
                     ◄──────────────────  Joined    the ranks to start, and the configuration; or
                     ◄──────────────────  Refused   with the reason
    control, data    ◄─────────────────►            what the ranks say to each other, opaque here
                     ◄──────────────────  close, kill      a rank is to leave
    Ended            ──────────────────►            a rank has left
                     ◄──────────────────  Restart   one that has left is to be started again
    Bye              ◄─────────────────►            the sender leaves; everything between the two is over

A message has two frames, a head (`Frame` and a rank) and its content. Nothing in it is code: structs are MessagePack
checked against their types, the ranks' own messages are numbers or `engine.parallel.plain`.
"""

from __future__ import annotations

import struct
from enum import IntEnum
from typing import TypeAlias

import msgspec

from penstock.engine.config import EngineConfig
from penstock.engine.loading.digest import CheckpointDigest
from penstock.protocol.codec import ProtocolError

RANK_PROTOCOL = 2
BEAT_S = 0.25
"""How often rank 0 sends something to each machine: by failing, it learns that a connection is closed."""
SILENCE_S = 5.0
"""A connection on which nothing arrives for this long, not even a heartbeat, is lost."""

_HEAD = struct.Struct("<ii")
_RANK = struct.Struct("<i")


class Frame(IntEnum):
    """What a message is."""

    STRUCT = 0
    CONTROL = 1
    """Between rank 0 and a rank of the machine."""
    DATA = 2
    """Tensors between any two ranks; see `engine.parallel.link`."""
    CLOSE = 3
    """Rank 0 has closed its connection to a rank."""
    KILL = 4
    BEAT = 5


class Join(msgspec.Struct, frozen=True, tag="join"):
    """A machine offers to run the ranks that the placement gives it."""

    machine: str
    package: str
    """The version of Penstock."""
    model: CheckpointDigest
    draft: CheckpointDigest | None = None
    protocol: int = RANK_PROTOCOL


class Joined(msgspec.Struct, frozen=True, tag="joined"):
    """Start these ranks. Paths in `config` are rank 0's."""

    config: EngineConfig
    ranks: list[int]


class Refused(msgspec.Struct, frozen=True, tag="refused"):
    """Not with this engine."""

    reason: str
    final: bool = True
    """False: it may work later."""


class Ended(msgspec.Struct, frozen=True, tag="ended"):
    """A rank's process is gone."""

    rank: int
    code: int
    reason: str


class Restart(msgspec.Struct, frozen=True, tag="restart"):
    """Start a rank again that has ended, to meet the others as the `generation` that this makes of them."""

    rank: int
    config: EngineConfig
    generation: int


class Bye(msgspec.Struct, frozen=True, tag="bye"):
    """The sender leaves on purpose."""

    reason: str


RankMessage: TypeAlias = Join | Joined | Refused | Ended | Restart | Bye

_encoder = msgspec.msgpack.Encoder()
_decoder: msgspec.msgpack.Decoder[RankMessage] = msgspec.msgpack.Decoder(RankMessage)


def pack(frame: Frame, rank: int = -1, content: bytes = b"") -> list[bytes]:
    return [_HEAD.pack(frame, rank), content]


def pack_struct(message: RankMessage) -> list[bytes]:
    return pack(Frame.STRUCT, content=_encoder.encode(message))


def unpack(frames: list[bytes]) -> tuple[Frame, int, bytes]:
    """What a message is, the rank it concerns, its content."""
    try:
        head, content = frames
        number, rank = _HEAD.unpack(head)
        return Frame(number), rank, content
    except (ValueError, struct.error) as error:
        raise ProtocolError(f"not a message between ranks: {error}") from error


def destination(data: bytes) -> int:
    """The rank that the content of a `DATA` message is for: its first number (`engine.parallel.link`)."""
    if len(data) < _RANK.size:
        raise ProtocolError("not a message between ranks: it is for nobody")
    rank: int = _RANK.unpack_from(data)[0]
    return rank


def decode_struct(content: bytes) -> RankMessage:
    try:
        return _decoder.decode(content)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise ProtocolError(f"not a message between ranks: {error}") from error
