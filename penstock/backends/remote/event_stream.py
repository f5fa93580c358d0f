"""The binary framing of Amazon's event streams.

A message is a prelude (total length, headers length, its CRC-32), headers, a payload and the CRC-32 of all before it.
Invariant: nothing of a message is used before both checksums match.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Iterator

from penstock.backends.remote.failure import garbage
from penstock.backends.remote.frames import LONGEST, Event
from penstock.protocol.errors import EngineLost

PRELUDE = struct.Struct(">III")
OVERHEAD = PRELUDE.size + 4
MOST_HEADERS = 128 * 1024
_FIXED = {0: 0, 1: 0, 2: 1, 3: 2, 4: 4, 5: 8, 8: 8, 9: 16}
"""Sizes of header values by type: true, false, byte, short, integer, long, timestamp, UUID."""
_BYTES, _TEXT = 6, 7


class EventStreamFrames:
    """Splits a stream into messages. The type of an event is that of its `:event-type` header; exceptions and errors
    have the prefix `!`."""

    __slots__ = ("_buffer",)

    def __init__(self) -> None:
        self._buffer = bytearray()

    def push(self, part: bytes) -> Iterator[Event]:
        self._buffer += part
        while len(self._buffer) >= PRELUDE.size:
            total, headers, checksum = PRELUDE.unpack_from(self._buffer)
            if zlib.crc32(self._buffer[:8]) != checksum:
                raise garbage()
            if not OVERHEAD + headers <= total <= LONGEST or headers > MOST_HEADERS:
                raise garbage()
            if len(self._buffer) < total:
                return
            message = bytes(self._buffer[:total])
            del self._buffer[:total]
            if zlib.crc32(message[:-4]) != int.from_bytes(message[-4:], "big"):
                raise garbage()
            yield _event(read_headers(message[PRELUDE.size : PRELUDE.size + headers]), message[12 + headers : -4])

    def end(self) -> Iterator[Event]:
        if self._buffer:
            raise EngineLost("The remote server of this model closed the connection.")
        return iter(())


def _event(headers: dict[str, str], payload: bytes) -> Event:
    kind = headers.get(":message-type", "event")
    if kind == "exception":
        return Event("!" + headers.get(":exception-type", ""), payload)
    if kind == "error":
        return Event("!" + headers.get(":error-code", ""), headers.get(":error-message", "").encode())
    return Event(headers.get(":event-type", ""), payload)


def read_headers(data: bytes) -> dict[str, str]:
    """The headers that are text; the others are passed over."""
    found: dict[str, str] = {}
    at = 0
    try:
        while at < len(data):
            end = at + 1 + data[at]
            name, kind, at = data[at + 1 : end].decode(), data[end], end + 1
            if kind in (_BYTES, _TEXT):
                size = int.from_bytes(data[at : at + 2], "big")
                at += 2
                if at + size > len(data):
                    raise garbage()
                if kind == _TEXT:
                    found[name] = data[at : at + size].decode()
            else:
                size = _FIXED[kind]
            at += size
    except (IndexError, KeyError, UnicodeDecodeError) as error:
        raise garbage() from error
    if at != len(data):
        raise garbage()
    return found
