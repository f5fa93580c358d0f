"""Streams that survive the death of their gateway: events with ids, and the header that claims a stream back.

A client that wants this sends `Last-Event-ID: new`; its events then have ids, which name the stream and the characters
shown so far. When the connection breaks, it sends the same request again with the last id it has seen. Any gateway then
asks the engine for the tokens of the stream, derives the text again from the first token on, and sends what comes after
that id. Invariant: nothing of a stream is used before the engine has confirmed that this very request, of this tenant,
was broken off by the death of its gateway; so a foreign or made-up id is a 404, and a stream is charged once.
"""

from __future__ import annotations

import asyncio
import re
from dataclasses import dataclass, replace

from penstock.engine.request import Delta, Request
from penstock.gateway.app.exchange import Exchange
from penstock.gateway.generation.choice import Piece
from penstock.gateway.generation.renderer import Renderer
from penstock.protocol.errors import ApiError, InvalidRequest, NotFound
from penstock.routing.registry import ServedModel

HEADER = b"last-event-id"
_ID = re.compile(rb"([0-9a-f]{32})\.([0-9]{1,9})")
ATTEMPTS = 20
PAUSE_S = 0.25
"""An engine misses a dead gateway within a step; until then it is asked again."""


@dataclass(frozen=True, slots=True)
class Resumption:
    """What a client asks for: a stream that can be resumed, or one to go on with."""

    id: str = ""
    """The stream to go on with; empty: a new one."""
    seen: int = 0
    """Characters that the client has."""


def asked_for(exchange: Exchange, *, possible: bool) -> Resumption | None:
    """What the header says; None without one. `possible`: whether a stream of this request can be resumed."""
    header = exchange.header(HEADER)
    if header is None:
        return None
    if not possible:
        raise InvalidRequest(
            "`Last-Event-ID` needs `stream: true`, one choice, and no tools, logprobs, sources or conversation.",
            param="Last-Event-ID",
        )
    if header == b"new":
        return Resumption()
    found = _ID.fullmatch(header)
    if found is None:
        raise InvalidRequest("`Last-Event-ID` must be `new` or the id of an event.", param="Last-Event-ID")
    return Resumption(found[1].decode(), int(found[2]))


async def claim(model: ServedModel, resumption: Resumption, request: Request) -> tuple[Request, Delta]:
    """The request that goes on with a stream, and what the engine had produced for it."""
    for _ in range(ATTEMPTS):
        try:
            claimed = await asyncio.wait_for(model.backend.claim(resumption.id, request), 5.0)
        except (ApiError, TimeoutError):
            break
        if claimed.found:
            resumed = replace(
                request,
                request_id=claimed.request_id,
                params=replace(request.params, seed=claimed.seed),
                produced=claimed.tokens,
            )
            return resumed, Delta(
                claimed.request_id,
                list(claimed.tokens),
                finish_reason=claimed.finish_reason,
                cached_tokens=claimed.cached_tokens,
            )
        if not claimed.running:
            break
        await asyncio.sleep(PAUSE_S)
    raise not_resumable()


def not_resumable() -> NotFound:
    return NotFound("There is no stream with this `Last-Event-ID` that can be resumed; send the request without it.")


class NumberedEvents:
    """Writes the events of one stream with ids, and leaves out what the client has seen."""

    __slots__ = ("_id", "_renderer", "_seen", "_shown")

    @property
    def resumes(self) -> bool:
        """Whether the client has the beginning."""
        return self._seen > 0

    def __init__(self, id: str, seen: int, renderer: Renderer) -> None:
        self._id = id.encode()
        self._seen = seen
        self._shown = 0
        self._renderer = renderer

    def event(self, piece: Piece) -> bytes:
        before = self._shown
        self._shown += len(piece.text)
        if before < self._seen:
            piece.text = piece.text[self._seen - before :]
            if not piece.text and piece.finish_reason is None:
                return b""
        return b"id: %b.%d\n" % (self._id, self._shown) + self._renderer.event(piece)
