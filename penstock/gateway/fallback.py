"""Who answers when the model that was asked for cannot: its fallbacks, one after the other.

A model fails over to its own replicas first (`routing.dispatch`); only when none of them can take a request, or all of
them failed it before its first token, is the next model of the chain asked. Once a byte of the answer is out it stays
with the model that began. A chain of one costs nothing.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable

from penstock.gateway.exchange import Exchange
from penstock.gateway.messages import template_messages
from penstock.gateway.schemas import ChatMessage
from penstock.gateway.service import Service
from penstock.protocol.errors import ApiError, EngineUnavailable, InvalidRequest, Overloaded, ServerError

log = logging.getLogger("penstock.gateway")


def said_by_users(messages: list[ChatMessage]) -> list[str]:
    return [
        message["content"]
        for message in template_messages(messages)
        if message["role"] == "user" and message["content"]
    ]


Attempt = Callable[[str], Awaitable[None]]
"""Answers the request with the model of this name."""


async def answered(
    service: Service,
    exchange: Exchange,
    model: str,
    attempt: Attempt,
    said: Callable[[], list[ChatMessage]],
    wanted_tokens: int | None = None,
) -> None:
    """Answer with `model`, or with who stands in for it. `said` and `wanted_tokens` decide where `model` is a route."""
    model, chosen = await service.routes.choose(model, exchange, lambda: said_by_users(said()), wanted_tokens)
    chain = service.registry.chain(model, service.admissions.waiting)
    headers = len(exchange.extra_headers)
    first: ApiError | None = None
    for place, (name, why) in enumerate(chain):
        last = place == len(chain) - 1
        exchange.because, exchange.others_can = why or chosen, not last
        try:
            await attempt(name)
            return
        except (EngineUnavailable, Overloaded, ServerError) as error:
            if exchange.response_started or (last and first is None):
                raise
            first = first or error
        except InvalidRequest:
            if exchange.response_started or first is None:
                raise
            # It is wrong for the stand-in only; what was asked for would have been right.
        if last:
            raise first
        log.warning(
            "answered by another model",
            extra={"request_id": exchange.request_id, "model": name, "next": chain[place + 1][0], "why": first.message},
        )
        service.metrics.fell_back(model, chain[place + 1][0], first.code or first.type)
        exchange.start_over(headers)
