"""Where the events of a stream begin and end: server-sent events, and JSON by line.

Parsers are plain objects that take bytes in any split: in the middle of a character, of a line end, of an event.
Invariant: at most `LONGEST` bytes are held; a server that sends more without an event is cut off.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple, Protocol

from penstock.protocol.errors import EngineLost

LONGEST = 8 * 2**20


class Event(NamedTuple):
    """One event: its type, if the server named one, and its data."""

    kind: str
    data: bytes


class Frames(Protocol):
    """Splits a stream into events."""

    def push(self, part: bytes) -> Iterable[Event]: ...

    def end(self) -> Iterable[Event]:
        """What is left when the connection is closed."""
        ...


class Lines:
    """Splits bytes at `\\n`, `\\r\\n` or `\\r`."""

    __slots__ = ("_rest",)

    def __init__(self) -> None:
        self._rest = b""

    @property
    def empty(self) -> bool:
        """Whether no line has begun."""
        return not self._rest

    def push(self, part: bytes) -> list[bytes]:
        rest = self._rest + part if self._rest else part
        if b"\r" in rest:
            held = rest.endswith(b"\r")  # it may be half of a `\r\n`
            whole = rest[:-1] if held else rest
            rest = whole.replace(b"\r\n", b"\n").replace(b"\r", b"\n") + (b"\r" if held else b"")
        *lines, self._rest = rest.split(b"\n")
        if len(self._rest) > LONGEST:
            raise EngineLost("The remote server of this model sent an endless line.")
        return lines

    def end(self) -> list[bytes]:
        rest, self._rest = self._rest.rstrip(b"\r"), b""
        return [rest] if rest else []


class SseFrames:
    """Server-sent events: `event:` and `data:` lines, a blank line ends an event; comments keep a connection open."""

    __slots__ = ("_data", "_kind", "_lines", "_size")

    def __init__(self) -> None:
        self._lines = Lines()
        self._kind = ""
        self._data: list[bytes] = []
        self._size = 0

    def push(self, part: bytes) -> list[Event]:
        if (  # by far the most: one event with one line of data
            part.startswith(b"data: ")
            and part.find(b"\n") == len(part) - 2
            and part.endswith(b"\n\n")
            and b"\r" not in part
            and self._lines.empty
            and not self._data
            and not self._kind
        ):
            return [Event("", part[6:-2])]
        return [event for line in self._lines.push(part) if (event := self._take(line)) is not None]

    def end(self) -> list[Event]:
        lines = (*self._lines.end(), b"")  # servers exist that leave out the last blank line
        return [event for line in lines if (event := self._take(line)) is not None]

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

    def push(self, part: bytes) -> list[Event]:
        return [Event("", line) for line in self._lines.push(part) if line.strip()]

    def end(self) -> list[Event]:
        return [Event("", line) for line in self._lines.end() if line.strip()]


class WholeFrames:
    """An answer that is not streamed: one event, when the connection is closed."""

    __slots__ = ("_parts",)

    def __init__(self) -> None:
        self._parts = bytearray()

    def push(self, part: bytes) -> list[Event]:
        self._parts += part
        if len(self._parts) > LONGEST:
            raise EngineLost("The remote server of this model sent an endless answer.")
        return []

    def end(self) -> list[Event]:
        return [Event("", bytes(self._parts))]
