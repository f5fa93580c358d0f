"""Answer a generation request, streamed or whole: one loop each, shared by every API family.

A stream's status line waits for the first token, so that an early failure is a real status code; after
`hold_status_s` it goes out with comment lines instead. An error after the first byte is one event with
the error object, then the stream ends without `[DONE]`. A slow reader makes only this coroutine wait; tokens
gather in its mailbox meanwhile and go out together.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from time import monotonic
from typing import Any

from penstock.config.cache import CacheConfig
from penstock.gateway.accounting.admission import leave
from penstock.gateway.accounting.charges import Account
from penstock.gateway.app.exchange import Exchange, encode_json
from penstock.gateway.generation.attempt import Attempt
from penstock.gateway.generation.base import Generation
from penstock.gateway.generation.choice import Piece
from penstock.gateway.generation.engine import EngineGeneration
from penstock.gateway.moderation.stream import Screen
from penstock.gateway.process.service import Service
from penstock.gateway.quality.judge import judge_answer
from penstock.gateway.response_cache.cache import Plan, wish_of
from penstock.protocol.errors import ApiError
from penstock.routing.admission.controller import Ticket

NO_CACHE = CacheConfig()
KEEP_ALIVE = b": keep-alive\n\n"
MOST_TEXT = 16384
"""Characters of a prompt or an answer that are recorded, where the configuration says that they are."""
DONE = b"data: [DONE]\n\n"


class Renderer(ABC):
    """How an endpoint writes what was generated."""

    _head: dict[str, Any]
    """What every object of the answer has in common; `id` among it."""
    keep_alive = KEEP_ALIVE
    """What a stream says when there is nothing to say."""

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
    service: Service, attempt: Attempt, generation: Generation, renderer: Renderer, *, stream: bool
) -> None:
    exchange = attempt.exchange
    guard_output(service, exchange, generation)
    exchange.timeline.response_id = renderer.response_id
    plan = await _recalled(service, exchange, generation)
    with exchange.watched(generation.fail):
        async with engaged(service, attempt, generation) as account:
            if stream:
                await _stream(service, exchange, generation, renderer, account)
            else:
                await _whole(exchange, generation, renderer, account)
    judge_answer(service, exchange, generation)
    if plan is not None and service.recall is not None and isinstance(generation, EngineGeneration):
        service.in_background(service.recall.keep(plan, generation, renderer.response_id))


async def _recalled(service: Service, exchange: Exchange, generation: Generation) -> Plan | None:
    """Have the caches looked up, if they are there for this request."""
    if service.recall is None or not isinstance(generation, EngineGeneration):
        wish_of(exchange, NO_CACHE)
        return None
    plan = service.recall.plan(exchange, generation)
    if plan is not None:
        exchange.timeline.follow("prepare")
        with exchange.timeline.phase("cache"):
            await service.recall.find(plan, exchange, generation)
    return plan


def guard_output(service: Service, exchange: Exchange, generation: Generation) -> None:
    """Pass what is generated through the caller's guardrails, if there are any."""
    if service.guardrails is not None and (guard := service.guardrails.output(exchange.caller)) is not None:
        generation.guard(guard)
    if service.guardrails is not None and (screening := service.guardrails.screening(exchange)) is not None:
        generation.screen = Screen(generation, *screening)


@asynccontextmanager
async def engaged(
    service: Service, attempt: Attempt, generation: Generation, *, aside: str = "", further: bool = False
) -> AsyncIterator[Account | None]:
    """A generation that runs, with its charge; limits are reserved before, and however it ends it is settled.

    `aside`: what it is for, when it is not the answer that the request asks for. It is then no request of its own to
    limits, the ledger has it under that feature, and the request does not end as it does. `further`: it is another step
    of the answer: no request of its own either, but part of what the client asked for.
    """
    exchange = attempt.exchange
    timeline = exchange.timeline
    timeline.follow("prepare")
    try:
        reservation = await service.quotas.reserve(exchange, generation, aside=bool(aside) or further)
    finally:
        timeline.follow("limits")
    if service.settings.telemetry.record_text:
        generation.keep_text()
    account: Account | None = None
    ticket: Ticket | None = None
    service.track(generation)
    try:
        generation.asks_at = monotonic()
        if not generation.recalled:  # a kept answer takes no engine
            ticket = await service.admissions.enter(exchange, generation, reservation)
        if service.accounts is not None:
            account = service.accounts.open(exchange, generation, feature=aside)
        if not (aside or further):
            generation.on_submit = attempt.note_replica
        generation.submit(None if ticket is None or ticket.granted else ticket)
        yield account
    finally:
        generation.close()
        try:
            if generation.screen is not None:
                await generation.screen.close()
            await generation.quiet()
        finally:
            service.untrack(generation)
            if ticket is not None:
                leave(ticket, generation)
            _record(exchange, generation, aside=aside)
            if service.settings.telemetry.record_text and (texts := generation.texts(MOST_TEXT)) is not None:
                exchange.timeline.texts = [*(exchange.timeline.texts or ()), *texts]
            if account is not None:
                account.settle((generation.outcome if aside else exchange.record.finish_reason) or "abort")
            if reservation is not None:
                service.in_background(service.quotas.settle(reservation, generation))


async def complete(service: Service, attempt: Attempt, generation: Generation, *, aside: str) -> str:
    """The text of a generation that serves the request without being its answer; see `engaged`."""
    parts: list[str] = []
    async with engaged(service, attempt, generation, aside=aside) as account:
        while not generation.done:
            parts += (piece.text for piece in await generation.next())
            if account is not None:
                account.note()
        if account is not None:
            await account.ended(generation.outcome or "stop")
    return "".join(parts)


async def _whole(exchange: Exchange, generation: Generation, renderer: Renderer, account: Account | None) -> None:
    pieces: list[list[Piece]] = [[] for _ in generation.choices]
    while not generation.all_shown:
        for piece in await generation.shown():
            pieces[piece.index].append(piece)
        if account is not None and not generation.all_shown:  # what has ended is settled, which says more
            account.note()
    if account is not None:
        await account.ended(generation.outcome or "stop")
    began = monotonic()
    try:
        body = renderer.whole(pieces)
        await renderer.before_end()
        await exchange.reply(200, body)
    finally:
        exchange.timeline.note("reply", began)


async def _stream(
    service: Service, exchange: Exchange, generation: Generation, renderer: Renderer, account: Account | None
) -> None:
    settings = service.settings
    pieces = await generation.shown(settings.hold_status_s)
    if account is not None:
        await account.opened()
    begun = monotonic()
    await exchange.start_stream()
    try:
        head = renderer.opening()
        while True:
            if pieces:
                data = head + b"".join(map(renderer.event, pieces))
            else:
                data = head or renderer.keep_alive
            head = b""
            if generation.all_shown:
                if account is not None:
                    await account.ended(generation.outcome or "stop")
                data += renderer.closing()
                await renderer.before_end()
                await exchange.end_stream(data)
                return
            if account is not None:
                account.note()
            await exchange.write(data)
            pieces = await generation.shown(settings.keep_alive_s)
    except ApiError as error:
        exchange.record.finish_reason = "error"
        service.metrics.failed(exchange.route, error.status, error.code or error.type)
        await exchange.end_stream(renderer.failure(error))
    finally:
        exchange.timeline.note("stream", begun)


def _record(exchange: Exchange, generation: Generation, *, aside: str) -> None:
    """Add what was used to what is kept of the request, which may have taken several generations."""
    record = exchange.record
    record.prompt_tokens += generation.prompt_tokens
    record.cached_tokens += generation.cached_tokens
    record.completion_tokens += generation.completion_tokens
    exchange.timeline.ran(generation.runs(aside))
    if aside:
        return
    if generation.first_token_at is not None and record.ttft_ms is None:
        record.ttft_ms = round((generation.first_token_at - exchange.started_at) * 1000, 3)
    if record.finish_reason is None:
        record.finish_reason = generation.outcome
