"""Streams that survive a broken connection and the death of their gateway: events with ids, and the header that claims
a stream back.

A client that wants this sends `Last-Event-ID: new`; its events then have ids, which name the stream and number its
events. When the connection breaks, it sends the same request again with the last id it has seen. Any gateway then asks
the engine for the tokens of the stream, derives its events again from the first token on, and sends those that come
after that id. For that, the events of such a stream depend on its tokens alone: they are read one by one, however many
arrive together. Invariant: nothing of a stream is used before the engine has confirmed that it is this very request, of
this client, and that nobody else goes on with it; so a foreign or made-up id is a 404, and a stream is charged once.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Iterator
from dataclasses import dataclass, replace

from penstock.backends.mailbox import Arrival
from penstock.engine.request import Delta, Request
from penstock.gateway.app.exchange import Exchange
from penstock.protocol.errors import ApiError, InvalidRequest, NotFound
from penstock.routing.registry import ServedModel

HEADER = b"last-event-id"
_ID = re.compile(rb"([0-9a-f]{32})\.([0-9]{1,9})")
ATTEMPTS = 20
PAUSE_S = 0.25
"""An engine misses a dead gateway within a step, and stops a request within one; until then it is asked again."""
_WITH_TOKEN = ("stop", "length", "complete")
"""How a request ends with a token of its own; other ends come alone, whenever they come."""


@dataclass(frozen=True, slots=True)
class Resumption:
    """What a client asks for: a stream that can be resumed, or one to go on with."""

    client: str
    """Who may resume it: a tenant, or the one user of a key that is bound to a user."""
    id: str = ""
    """The stream to go on with; empty: a new one."""
    seen: int = 0
    """Events that the client has."""


def goes_on(exchange: Exchange) -> bool:
    """Whether a request asks for a stream that has begun, and was counted then."""
    return exchange.header(HEADER) not in (None, b"new")


def asked_for(exchange: Exchange, *, stream: bool | None, **hindrances: object) -> Resumption | None:
    """What the header says; None without one. `hindrances`: parameters with which a stream cannot be resumed, and
    whether they are set."""
    header = exchange.header(HEADER)
    if header is None:
        return None
    if not stream:
        raise InvalidRequest("`Last-Event-ID` needs `stream: true`.", param="Last-Event-ID")
    for name, given in hindrances.items():
        if given:
            raise InvalidRequest(f"A stream with `{name}` cannot be resumed: send no `Last-Event-ID`.", param=name)
    client = f"{exchange.caller.tenant}\0{exchange.caller.only_user or ''}"
    if header == b"new":
        return Resumption(client)
    found = _ID.fullmatch(header)
    if found is None:
        raise InvalidRequest("`Last-Event-ID` must be `new` or the id of an event.", param="Last-Event-ID")
    exchange.answering = True
    return Resumption(client, found[1].decode(), int(found[2]))


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
                logprobs=claimed.logprobs,
                cached_tokens=claimed.cached_tokens if claimed.tokens else None,
            )
        if not claimed.running:
            break
        await asyncio.sleep(PAUSE_S)
    raise NotFound("There is no stream with this `Last-Event-ID` that can be resumed; send the request without it.")


def singly(arrival: Arrival) -> Iterator[Arrival]:
    """What has arrived, token by token."""
    delta, last = arrival.delta, len(arrival.delta.tokens) - 1
    if last < 1 and (last < 0 or delta.finish_reason is None or delta.finish_reason in _WITH_TOKEN):
        yield arrival
        return
    alone = delta.finish_reason is not None and delta.finish_reason not in _WITH_TOKEN
    for at, token in enumerate(delta.tokens):
        logprobs = None if delta.logprobs is None else delta.logprobs[at : at + 1]
        single = Delta(delta.request_id, [token], logprobs=logprobs)
        if at == 0:
            single.prompt_logprobs, single.cached_tokens = delta.prompt_logprobs, delta.cached_tokens
            single.queue_s, single.prefill_s = delta.queue_s, delta.prefill_s
        if at == last and not alone:
            single.finish_reason, single.decode_s = delta.finish_reason, delta.decode_s
        yield Arrival(arrival.index, single, arrival.at)
    if alone:
        end = Delta(delta.request_id, finish_reason=delta.finish_reason, error=delta.error, decode_s=delta.decode_s)
        yield Arrival(arrival.index, end, arrival.at)


class EventNumbers:
    """Writes ids into the events of one stream, and leaves out those that the client has."""

    __slots__ = ("_id", "_number", "_seen")

    def __init__(self, id: str, seen: int) -> None:
        self._id = id.encode()
        self._seen = seen
        self._number = 0

    def put(self, events: bytes) -> bytes:
        """`events`: as a renderer writes them, each with an empty line behind it."""
        numbered: list[bytes] = []
        for event in events.split(b"\n\n")[:-1]:
            self._number += 1
            if self._number > self._seen:
                numbered.append(b"id: %b.%d\n%b\n\n" % (self._id, self._number, event))
        return b"".join(numbered)
