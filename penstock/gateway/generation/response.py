"""The HTTP response of a generation, streamed or whole: one loop each, shared by every API family.

A stream's status line waits for the first token, so that an early failure is a real status code; after
`hold_status_s` it goes out with comment lines instead. An error after the first byte is one event with the error
object, then the stream ends without `[DONE]`. A slow reader makes only its own coroutine wait; tokens gather in the
mailbox of the generation meanwhile and go out together.
"""

from __future__ import annotations

import logging
from time import monotonic
from typing import NamedTuple

from penstock.gateway.accounting.charges import OpenAccount
from penstock.gateway.app.exchange import Exchange
from penstock.gateway.generation.base import Generation
from penstock.gateway.generation.choice import Piece
from penstock.gateway.generation.renderer import Renderer
from penstock.gateway.generation.resumption import EventNumbers
from penstock.gateway.generation.settings import GenerationSettings
from penstock.protocol.errors import ApiError, limit_headers
from penstock.telemetry.metrics import Metrics

OF_MODEL = ("context_window", "sampling.max_tokens")

log = logging.getLogger("penstock.gateway")


class EndingLimit(NamedTuple):
    """The limit that ended an answer, and whose it is."""

    name: str
    scope: str

    def headers(self) -> list[tuple[bytes, bytes]]:
        return [(name.encode(), value.encode()) for name, value in limit_headers(*self).items()]


async def send_whole(exchange: Exchange, generation: Generation, renderer: Renderer, account: OpenAccount) -> None:
    pieces: list[list[Piece]] = [[] for _ in generation.choices]
    while True:
        for piece in await generation.shown():
            pieces[piece.index].append(piece)
        if generation.all_shown:
            break
        account.note()
    await account.ended(generation.outcome or "stop")
    if ended := note_limit(exchange, generation):
        exchange.extra_headers += ended.headers()
    began = monotonic()
    try:
        body = renderer.whole(pieces)
        await renderer.before_end()
        await exchange.reply(200, body)
    finally:
        exchange.timeline.note("reply", began)


async def send_stream(
    exchange: Exchange,
    generation: Generation,
    renderer: Renderer,
    account: OpenAccount,
    settings: GenerationSettings,
    metrics: Metrics,
    numbers: EventNumbers | None = None,
) -> None:
    """`numbers`: of the events of a stream that can be resumed."""
    pieces = await generation.shown(settings.hold_status_s)
    generation.commit()
    begins = account.begun  # then the first text need not wait for the ledger
    if generation.all_shown and not begins:  # its beginning and its end are written together
        await account.ended(generation.outcome or "stop")
    elif not begins:
        await account.opened()
    begun = monotonic()
    await exchange.start_stream(renderer.content_type)
    try:
        data = renderer.opening()
        while True:
            data += b"".join(map(renderer.event, pieces))
            if generation.all_shown:
                if begins and data:  # the whole text, whose end is to be settled first
                    await exchange.write(data if numbers is None else numbers.put(data))
                    data = b""
                await account.ended(generation.outcome or "stop")
                if ended := note_limit(exchange, generation):
                    data += renderer.limit_reached(*ended)
                data += renderer.closing()
                await renderer.before_end()
                await exchange.end_stream(data if numbers is None else numbers.put(data))
                return
            account.note()
            if numbers is not None:
                data = numbers.put(data)
            await exchange.write(data or renderer.keep_alive)
            data, begins = b"", False
            pieces = await generation.shown(settings.keep_alive_s)
    except ApiError as error:
        await send_failure(exchange, renderer, error, metrics)
    finally:
        exchange.timeline.note("stream", begun)


def note_limit(exchange: Exchange, generation: Generation) -> EndingLimit | None:
    """The limit of this server that ended an answer, which is logged; None: none did."""
    limit = generation.limit
    return ending(exchange, generation, limit) if limit else None


def ending(exchange: Exchange, generation: Generation, limit: str) -> EndingLimit:
    scope = exchange.limit_scopes.get(limit) or ("model" if limit in OF_MODEL else "server")
    caller = exchange.caller
    facts = {"limit": limit, "scope": scope, "model": generation.model.name}
    log.info("a limit ended an answer", extra={**facts, "tenant": caller.tenant, "tier": caller.tier})
    return EndingLimit(limit, scope)


async def send_failure(
    exchange: Exchange, renderer: Renderer, error: ApiError, metrics: Metrics, before: bytes = b""
) -> None:
    """End a stream that has begun with an error, after the events `before`."""
    exchange.record.finish_reason = "error"
    metrics.failed(exchange.route, error.status, error.code or error.type)
    await exchange.end_stream(before + renderer.failure(error))
