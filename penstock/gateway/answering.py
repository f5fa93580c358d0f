"""Answer a generation request, streamed or whole: one loop each, shared by every API family.

A stream's status line waits for the first token, so that an early failure is a real status code; after
`hold_status_s` it goes out with comment lines instead. An error after the first byte is one event with
the error object, then the stream ends without `[DONE]`. A slow reader makes only this coroutine wait; tokens
gather in its mailbox meanwhile and go out together.
"""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from contextlib import suppress

from penstock.gateway.accounting import Account
from penstock.gateway.choice import Piece
from penstock.gateway.exchange import ClientGone, Exchange, encode_json
from penstock.gateway.generation import Generation
from penstock.gateway.service import Service
from penstock.protocol.errors import ApiError

KEEP_ALIVE = b": keep-alive\n\n"
DONE = b"data: [DONE]\n\n"


class Renderer(ABC):
    """How an endpoint writes what was generated."""

    keep_alive = KEEP_ALIVE
    """What a stream says when there is nothing to say."""

    @abstractmethod
    def opening(self) -> bytes:
        """The first events of a stream."""

    @abstractmethod
    def event(self, piece: Piece) -> bytes:
        """One piece of a choice, as an event."""

    @abstractmethod
    def closing(self) -> bytes:
        """What follows the last piece: the end of the stream."""

    @abstractmethod
    def whole(self, pieces: list[list[Piece]]) -> bytes:
        """The body of an answer that is not streamed; `pieces` per choice."""

    def failure(self, error: ApiError) -> bytes:
        """The last event of a stream that broke."""
        return b"data: " + encode_json(error.body()) + b"\n\n"

    async def before_end(self) -> None:
        """Called when the end has been rendered, before it is sent."""
        return


async def answer(
    service: Service, exchange: Exchange, generation: Generation, renderer: Renderer, *, stream: bool
) -> None:
    if service.guardrails is not None and (guard := service.guardrails.output(exchange.caller)) is not None:
        generation.guard(guard)
    reservation = await service.quotas.reserve(exchange, generation)
    account: Account | None = None
    service.track(generation)
    watcher = asyncio.create_task(_watch(exchange, generation), name="client watcher")
    try:
        if service.accounts is not None:
            account = service.accounts.open(exchange, generation)
        generation.submit()
        if stream:
            await _stream(service, exchange, generation, renderer, account)
        else:
            await _whole(exchange, generation, renderer, account)
    finally:
        generation.close()
        service.untrack(generation)
        _record(exchange, generation)
        if account is not None:
            account.settle(exchange.record.finish_reason or "abort")
        if reservation is not None:
            service.in_background(service.quotas.settle(reservation, generation))
        watcher.cancel()
        with suppress(asyncio.CancelledError):
            await watcher


async def _watch(exchange: Exchange, generation: Generation) -> None:
    """Stops generating as soon as the client leaves, whatever the answering coroutine is doing."""
    await exchange.gone()
    generation.fail(ClientGone())


async def _whole(exchange: Exchange, generation: Generation, renderer: Renderer, account: Account | None) -> None:
    pieces: list[list[Piece]] = [[] for _ in generation.choices]
    while not generation.done:
        for piece in await generation.next():
            pieces[piece.index].append(piece)
        if account is not None:
            account.note()
    if account is not None:
        await account.settle(generation.outcome or "stop")
    body = renderer.whole(pieces)
    await renderer.before_end()
    await exchange.reply(200, body)


async def _stream(
    service: Service, exchange: Exchange, generation: Generation, renderer: Renderer, account: Account | None
) -> None:
    settings = service.settings
    pieces = await generation.next(settings.hold_status_s)
    if account is not None:
        await account.opened()
    await exchange.start_stream()
    try:
        head = renderer.opening()
        while True:
            if pieces:
                data = head + b"".join(map(renderer.event, pieces))
            else:
                data = head or renderer.keep_alive
            head = b""
            if account is not None:
                account.note()
            if generation.done:
                if account is not None:
                    await account.settle(generation.outcome or "stop")
                data += renderer.closing()
                await renderer.before_end()
                await exchange.end_stream(data)
                return
            await exchange.write(data)
            pieces = await generation.next(settings.keep_alive_s)
    except ApiError as error:
        exchange.record.finish_reason = "error"
        await exchange.end_stream(renderer.failure(error))


def _record(exchange: Exchange, generation: Generation) -> None:
    record = exchange.record
    record.prompt_tokens = generation.prompt_tokens
    record.cached_tokens = generation.cached_tokens
    record.completion_tokens = generation.completion_tokens
    if generation.first_token_at is not None:
        record.ttft_ms = round((generation.first_token_at - exchange.started_at) * 1000, 3)
    if record.finish_reason is None:
        record.finish_reason = generation.outcome
