"""The fallback chain: which models are asked, one after the other, until one answers.

A model fails over to its own replicas first (`routing.dispatch`). Only when none of them can take a request, or all of
them failed it before its first token, is the next model of the chain asked. Once a byte of the answer is out, it stays
with the model that began. A chain of one costs nothing.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable

from penstock.gateway.accounting.admission import Admissions
from penstock.gateway.accounting.answer_ids import AnswerIds
from penstock.gateway.app.exchange import Exchange
from penstock.gateway.generation.attempt import Attempt
from penstock.gateway.generation.model_routes import Routes
from penstock.gateway.generation.question import Question
from penstock.protocol.errors import ApiError, EngineUnavailable, InvalidRequest, Overloaded, ServerError
from penstock.routing.registry import ModelRegistry
from penstock.telemetry.metrics import Metrics

log = logging.getLogger("penstock.gateway")


class FallbackChain:
    """Asks the models that may answer a request."""

    def __init__(self, registry: ModelRegistry, routes: Routes, admissions: Admissions, metrics: Metrics) -> None:
        self._registry = registry
        self._routes = routes
        self._admissions = admissions
        self._metrics = metrics

    async def answer(
        self,
        exchange: Exchange,
        model: str,
        answer: Callable[[Attempt], Awaitable[None]],
        question: Callable[[], Question],
    ) -> None:
        """Call `answer` with `model`, or with its fallbacks while it fails. Where `model` is a route, `question`
        decides which model it leads to."""
        model, chosen = await self._routes.choose(model, exchange, question)
        chain = self._registry.chain(model, self._admissions.waiting)
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
                # A request that only a fallback refuses is a valid one for the model that was asked for.
                if exchange.response_started or not why:
                    raise
            finally:
                attempt.release()
            if last:
                assert first is not None, "the model itself is in the chain, and failed"
                raise first
            to, code = chain[place + 1][0], failure.code or failure.type
            about = {"request_id": exchange.request_id, "model": name, "next": to, "why": failure.message}
            log.warning("a fallback is asked", extra=about)
            self._metrics.fell_back(name, to, code)
            attempt.withdraw()
