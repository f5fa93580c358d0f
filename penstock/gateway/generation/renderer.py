"""How an API family writes what was generated: the interface of every renderer."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable
from typing import Any

from penstock.gateway.app.exchange import EVENT_STREAM, encode_json
from penstock.gateway.generation.choice import Piece
from penstock.protocol.errors import ApiError, limit_headers

KEEP_ALIVE = b": keep-alive\n\n"
DONE = b"data: [DONE]\n\n"


class Renderer(ABC):
    """Writes one answer, as a stream of events or whole."""

    _head: dict[str, Any]
    """What all objects of the answer have in common, among it the `id`."""
    content_type = EVENT_STREAM
    """Of a stream."""
    keep_alive = KEEP_ALIVE
    """Sent by a stream that has been silent for a while."""

    admitted: Callable[[], Awaitable[None]] | None = None
    """Called when the limits are reserved and the generation runs, or waits for its turn."""

    @property
    def head(self) -> dict[str, Any]:
        return self._head

    @property
    def response_id(self) -> str:
        return str(self._head["id"])

    @abstractmethod
    def opening(self) -> bytes:
        """The first events of a stream."""

    @abstractmethod
    def event(self, piece: Piece) -> bytes:
        """One piece of a choice, as an event."""

    @abstractmethod
    def closing(self) -> bytes:
        """The end of the stream, after the last piece."""

    @abstractmethod
    def whole(self, pieces: list[list[Piece]]) -> bytes:
        """The body of an answer that is not streamed; `pieces` per choice."""

    def limit_reached(self, limit: str, scope: str) -> bytes:
        """Before the end of a stream: which limit of this server ended the answer, and whose it is; comments, which
        clients skip."""
        lines = (f": {name}: {value}\n" for name, value in limit_headers(limit, scope).items())
        return "".join(lines).encode() + b"\n"

    def failure(self, error: ApiError) -> bytes:
        """The last event of a stream that failed."""
        return b"data: " + encode_json(error.body()) + b"\n\n"

    async def before_end(self) -> None:
        """Called when the end has been rendered, before it is sent."""
        return
