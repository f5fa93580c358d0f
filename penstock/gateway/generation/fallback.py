"""Who answers when the model that was asked for cannot: its fallbacks, one after the other.

A model fails over to its own replicas first (`routing.dispatch`); only when none of them can take a request, or all of
them failed it before its first token, is the next model of the chain asked. Once a byte of the answer is out it stays
with the model that began. A chain of one costs nothing.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable

from penstock.gateway.accounting.answer_ids import AnswerIds
from penstock.gateway.app.exchange import Exchange
from penstock.gateway.generation.attempt import Attempt
from penstock.gateway.generation.chat_messages import template_messages
from penstock.gateway.generation.schemas import ChatMessage
from penstock.gateway.process.service import Service
from penstock.protocol.errors import ApiError, EngineUnavailable, InvalidRequest, Overloaded, ServerError

log = logging.getLogger("penstock.gateway")


def said_by_users(messages: list[ChatMessage]) -> list[str]:
    """What decides about a route, of a conversation."""
    return [
        message["content"]
        for message in template_messages(messages)
        if message["role"] == "user" and message["content"]
    ]


async def answered(
    service: Service,
    exchange: Exchange,
    model: str,
    answer: Callable[[Attempt], Awaitable[None]],
    said: Callable[[], list[str]],
    wanted_tokens: int | None = None,
) -> None:
    """Answer with `model`, or with a fallback of it. `said` and `wanted_tokens` decide where `model` is a route."""
    model, chosen = await service.routes.choose(model, exchange, said, wanted_tokens)
    chain = service.registry.chain(model, service.admissions.waiting)
    ids = AnswerIds(exchange)
    first: ApiError | None = None
    for place, (name, why) in enumerate(chain):
        last = place == len(chain) - 1
        attempt = Attempt(exchange, name, ids, reason=why or chosen, is_fallback=bool(why), has_fallback=not last)
        try:
            await answer(attempt)
            return
        except (EngineUnavailable, Overloaded, ServerError) as error:
            failure: ApiError = error
            if exchange.response_started or (last and first is None):
                raise
            first = first or error
        except InvalidRequest as error:
            failure = error
            # What is wrong for a stand-in only is passed over: what was asked for would have been right.
            if exchange.response_started or not why:
                raise
        finally:
            attempt.release()
        if last:
            assert first is not None, "the model itself is in the chain, and failed"
            raise first
        to, code = chain[place + 1][0], failure.code or failure.type
        about = {"request_id": exchange.request_id, "model": name, "next": to, "why": failure.message}
        log.warning("answered by another model", extra=about)
        service.metrics.fell_back(name, to, code)
        attempt.withdraw()
