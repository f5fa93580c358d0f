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
from penstock.gateway.generation.experiments import Experiments
from penstock.gateway.generation.model_routes import Routes
from penstock.gateway.generation.permissions import Permissions
from penstock.gateway.generation.question import Question
from penstock.gateway.generation.shadows import Shadows
from penstock.gateway.generation.trial import SERVER_FAULT, Trial
from penstock.protocol.errors import (
    ApiError,
    EngineUnavailable,
    InvalidRequest,
    NotFound,
    Overloaded,
    RequestTimeout,
    ServerError,
)
from penstock.routing.registry import ModelRegistry
from penstock.telemetry.metrics import Metrics

log = logging.getLogger("penstock.gateway")

Answer = Callable[[Attempt], Awaitable[None]]


class FallbackChain:
    """Asks the models that may answer a request."""

    def __init__(
        self,
        registry: ModelRegistry,
        permissions: Permissions,
        routes: Routes,
        experiments: Experiments,
        shadows: Shadows,
        admissions: Admissions,
        metrics: Metrics,
    ) -> None:
        self._registry = registry
        self._permissions = permissions
        self._routes = routes
        self._experiments = experiments
        self._shadows = shadows
        self._admissions = admissions
        self._metrics = metrics

    async def answer(
        self,
        exchange: Exchange,
        model: str,
        answer: Answer,
        question: Callable[[], Question],
    ) -> None:
        """Call `answer` with `model`, or with its fallbacks while it fails. Where `model` is a route, `question`
        decides which model it leads to; where its traffic is split, an experiment does."""
        self._permissions.check(exchange, model)
        asked, (model, trial) = model, await self._experiments.assign(exchange, model)
        model, chosen = await self._routes.choose(model, exchange, question)
        if trial is None:
            model, trial = await self._experiments.assign(exchange, model)
        if model != asked and not chosen and not self._permissions.allows(exchange, model):
            raise self._permissions.unknown(exchange.caller, asked)
        if trial is None:
            await self._ask(exchange, model, chosen, answer, AnswerIds(exchange))
        else:
            await self._experiment(exchange, model, chosen or trial.label, answer, question, trial)

    async def _experiment(
        self,
        exchange: Exchange,
        model: str,
        chosen: str,
        answer: Answer,
        question: Callable[[], Question],
        trial: Trial,
    ) -> None:
        """Ask the arm of an experiment, and the control if a canary fails before its first token."""
        ids, backup = AnswerIds(exchange), self._experiments.fallback(trial)
        try:
            await self._ask(exchange, model, chosen, answer, ids, trial, backed=backup is not None)
        except ApiError as error:
            if backup is None or exchange.response_started or not _may_go_on(error):
                trial.failed(exchange, error)
                raise
            failure = error
        except BaseException as error:
            trial.failed(exchange, error)
            raise
        else:
            trial.diverted()
            self._shadows.submit(exchange, trial)
            return
        about = {"request_id": exchange.request_id, "model": model, "next": backup, "why": failure.message}
        log.warning("the control is asked instead of a canary", extra=about)
        self._metrics.fell_back(model, backup, failure.code or failure.type)
        try:
            model, _ = await self._routes.choose(backup, exchange, question)
            await self._ask(exchange, model, f"fallback; {trial.label}", answer, ids)
        except BaseException:
            # What the control refuses too was wrong; it says nothing about the canary.
            trial.failed(exchange, failure)
            raise
        trial.failed(exchange, failure, control_serves=True)

    async def _ask(
        self,
        exchange: Exchange,
        model: str,
        chosen: str,
        answer: Answer,
        ids: AnswerIds,
        trial: Trial | None = None,
        *,
        backed: bool = False,
    ) -> None:
        """Ask a model and its fallbacks. `chosen`: why it is asked. `trial`: the part in an experiment that it has
        itself, and its fallbacks have not. `backed`: somebody else answers if all of them fail."""
        chain = [
            (name, why)
            for name, why in self._registry.chain(model, self._admissions.waiting)
            if not why or self._permissions.allows(exchange, name)
        ]
        first: ApiError | None = None
        for place, (name, why) in enumerate(chain):
            last = place == len(chain) - 1
            attempt = Attempt(
                exchange,
                name,
                ids,
                reason=why or chosen,
                is_fallback=bool(why),
                has_fallback=backed or not last,
                trial=None if why else trial,
            )
            try:
                await answer(attempt)
                if attempt.trial is not None:
                    attempt.trial.answered(exchange)
                return
            except (EngineUnavailable, Overloaded, ServerError) as error:
                failure: ApiError = error
                if attempt.trial is not None:
                    attempt.trial.failed(exchange, error)
                if exchange.response_started or (last and first is None and not backed):
                    raise
                first = first or error
            except InvalidRequest as error:
                failure = error
                # A request that only a fallback refuses is a valid one for the model that was asked for.
                if exchange.response_started or not (why or backed):
                    raise
                if not why:
                    attempt.withdraw()
                    raise
            except ApiError:
                if backed and not exchange.response_started:
                    attempt.withdraw()
                raise
            finally:
                attempt.release()
            if last:
                assert first is not None, "the model itself is in the chain, and failed"
                if backed:
                    attempt.withdraw()
                raise first
            to, code = chain[place + 1][0], failure.code or failure.type
            about = {"request_id": exchange.request_id, "model": name, "next": to, "why": failure.message}
            log.warning("a fallback is asked", extra=about)
            self._metrics.fell_back(name, to, code)
            attempt.withdraw()


def _may_go_on(error: ApiError) -> bool:
    """Whether another model may answer what this one did not."""
    return error.status >= SERVER_FAULT or isinstance(error, InvalidRequest | NotFound | RequestTimeout)
