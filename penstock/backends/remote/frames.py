"""Where the events of a stream begin and end: server-sent events, and JSON by line.

Parsers are plain objects that take bytes in any split: in the middle of a character, of a line end, of an event.
Invariant: at most `LONGEST` bytes are held; a server that sends more without an event is cut off.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple, Protocol

from penstock.protocol.errors import EngineLost

LONGEST = 8 * 2**20


class Event(NamedTuple):
    """One event: its type, if the server named one, and its data."""

    kind: str
    data: bytes


class Frames(Protocol):
    """Splits a stream into events."""

    def push(self, part: bytes) -> Iterator[Event]: ...

    def end(self) -> Iterator[Event]:
        """What is left when the connection is closed."""
        ...


class Lines:
    """Splits bytes at `\\n`, `\\r\\n` or `\\r`."""

    __slots__ = ("_rest",)

    def __init__(self) -> None:
        self._rest = b""

    def push(self, part: bytes) -> Iterator[bytes]:
        rest = self._rest + part
        if b"\r" in rest:
            held = rest.endswith(b"\r")  # it may be half of a `\r\n`
            whole = rest[:-1] if held else rest
            rest = whole.replace(b"\r\n", b"\n").replace(b"\r", b"\n") + (b"\r" if held else b"")
        *lines, self._rest = rest.split(b"\n")
        if len(self._rest) > LONGEST:
            raise EngineLost("The remote server of this model sent an endless line.")
        yield from lines

    def end(self) -> Iterator[bytes]:
        rest, self._rest = self._rest.rstrip(b"\r"), b""
        if rest:
            yield rest


class SseFrames:
    """Server-sent events: `event:` and `data:` lines, a blank line ends an event; comments keep a connection open."""

    __slots__ = ("_data", "_kind", "_lines", "_size")

    def __init__(self) -> None:
        self._lines = Lines()
        self._kind = ""
        self._data: list[bytes] = []
        self._size = 0

    def push(self, part: bytes) -> Iterator[Event]:
        for line in self._lines.push(part):
            event = self._take(line)
            if event is not None:
                yield event

    def end(self) -> Iterator[Event]:
        for line in (*self._lines.end(), b""):  # servers exist that leave out the last blank line
            event = self._take(line)
            if event is not None:
                yield event

    def _take(self, line: bytes) -> Event | None:
        if not line:
            kind, data = self._kind, self._data
            self._kind, self._data, self._size = "", [], 0
            return Event(kind, b"\n".join(data)) if data else None
        name, _, value = line.partition(b":")
        value = value.removeprefix(b" ")
        if name == b"data":
            self._size += len(value)
            if self._size > LONGEST:
                raise EngineLost("The remote server of this model sent an endless event.")
            self._data.append(value)
        elif name == b"event":
            self._kind = value.decode("utf-8", "replace").strip()
        return None


class NdjsonFrames:
    """One JSON value per line."""

    __slots__ = ("_lines",)

    def __init__(self) -> None:
        self._lines = Lines()

    def push(self, part: bytes) -> Iterator[Event]:
        for line in self._lines.push(part):
            if line.strip():
                yield Event("", line)

    def end(self) -> Iterator[Event]:
        for line in self._lines.end():
            if line.strip():
                yield Event("", line)


class WholeFrames:
    """An answer that is not streamed: one event, when the connection is closed."""

    __slots__ = ("_parts",)

    def __init__(self) -> None:
        self._parts = bytearray()

    def push(self, part: bytes) -> Iterator[Event]:
        self._parts += part
        if len(self._parts) > LONGEST:
            raise EngineLost("The remote server of this model sent an endless answer.")
        return iter(())

    def end(self) -> Iterator[Event]:
        yield Event("", bytes(self._parts))
