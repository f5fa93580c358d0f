"""The fallback chain: which models are asked, one after the other, until one answers.

A model fails over to its own replicas first (`routing.dispatch`). Only when none of them can take a request, or all of
them failed it before its first token, is the next model of the chain asked. Invariants: once a byte of the answer is
out, it stays with the model that began; a model without a label that the request demands is never asked; and a
fallback never makes things worse: where no other model can answer this very request (it is down, refuses, or may not
have the data), the request waits for the model that was asked for, as it would without a fallback. A chain of one costs
nothing.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Sequence

from penstock.gateway.accounting.admission import Admissions
from penstock.gateway.accounting.answer_ids import AnswerIds
from penstock.gateway.accounting.targets import time_left
from penstock.gateway.app.exchange import Exchange
from penstock.gateway.generation.attempt import FAILURES, Attempt
from penstock.gateway.generation.experiments import Experiments
from penstock.gateway.generation.model_routes import Routes
from penstock.gateway.generation.permissions import Permissions
from penstock.gateway.generation.question import Question
from penstock.gateway.generation.shadows import Shadows
from penstock.gateway.generation.stages import ContentFilter
from penstock.gateway.generation.trial import SERVER_FAULT, Trial
from penstock.protocol.errors import (
    ApiError,
    DataRuleForbids,
    EngineUnavailable,
    InvalidRequest,
    NotFound,
    RequestTimeout,
)
from penstock.routing.registry import ModelRegistry
from penstock.telemetry.metrics import Metrics

log = logging.getLogger("penstock.gateway")

POLL_S = 0.1
"""How often models that are away are looked at, when a request waits for the first of several."""
AGAIN_S = 0.5
"""How long a model that just failed the request is left alone."""

Answer = Callable[[Attempt], Awaitable[None]]
Link = tuple[str, str]
"""A model of the chain, and why it is asked; no reason for the one that was asked for."""


class _Run:
    """One request on its way through the chain. `alone`: no other model could answer it. `trial`: the part in an
    experiment of the model itself, which its fallbacks have not. `backed`: the control answers if the chain fails."""

    __slots__ = ("_chosen", "_ids", "alone", "answer", "backed", "exchange", "last", "trial")

    def __init__(
        self,
        exchange: Exchange,
        ids: AnswerIds,
        answer: Answer,
        chosen: str,
        trial: Trial | None = None,
        *,
        backed: bool = False,
    ) -> None:
        self.exchange = exchange
        self.answer = answer
        self.alone = False
        self.trial = trial
        self.backed = backed
        self.last: Attempt | None = None
        self._ids = ids
        self._chosen = chosen

    def attempt(self, link: Link, *, patient: bool = False) -> Attempt:
        """`patient`: nobody else can answer, so that it waits for an engine that is away."""
        name, why = link
        self.last = Attempt(
            self.exchange,
            name,
            self._ids,
            reason=why or self._chosen,
            is_fallback=bool(why),
            has_fallback=self.backed or not (patient or self.alone),
            trial=None if why else self.trial,
        )
        return self.last

    def may_go_on(self, error: ApiError) -> bool:
        """Whether the control may answer what a canary did not."""
        if self.exchange.response_started or (self.last is not None and self.last.committed):
            return False
        return error.status >= SERVER_FAULT or isinstance(error, InvalidRequest | NotFound | RequestTimeout)


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
        content_filter: ContentFilter,
        metrics: Metrics,
        engine_wait_s: float,
    ) -> None:
        self._registry = registry
        self._permissions = permissions
        self._routes = routes
        self._experiments = experiments
        self._shadows = shadows
        self._admissions = admissions
        self._content_filter = content_filter
        self._metrics = metrics
        self._engine_wait_s = engine_wait_s

    async def answer(self, exchange: Exchange, model: str, answer: Answer, question: Callable[[], Question]) -> None:
        """Call `answer` with `model`, or with its fallbacks while it fails. Where `model` is a route, `question`
        decides which model it leads to; where its traffic is split, an experiment does."""
        self._permissions.check_exists(exchange, model)
        await self._registry.prepare(model)
        await self._content_filter.mark(exchange, lambda: question().read)
        asked, (model, trial) = model, await self._experiments.assign(exchange, model)
        model, chosen = await self._routes.choose(model, exchange, question)
        if trial is None:
            model, trial = await self._experiments.assign(exchange, model)
        if model != asked and not chosen and not self._permissions.exists(exchange.caller, model):
            raise self._permissions.unknown(exchange.caller, asked)
        if trial is None:
            await self._ask(_Run(exchange, AnswerIds(exchange), answer, chosen), model)
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
        run = _Run(exchange, ids, answer, chosen, trial, backed=backup is not None)
        try:
            await self._ask(run, model)
        except ApiError as error:
            if backup is None or not run.may_go_on(error):
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
        if run.last is not None:
            self._note(run.last, backup, failure)
            run.last.withdraw()
        try:
            model, _ = await self._routes.choose(backup, exchange, question)
            await self._ask(_Run(exchange, ids, answer, f"fallback; {trial.label}"), model)
        except BaseException:
            # What the control refuses too was wrong; it says nothing about the canary.
            trial.failed(exchange, failure)
            raise
        trial.failed(exchange, failure, control_serves=True)

    async def _ask(self, run: _Run, model: str) -> None:
        """Ask a model and its fallbacks."""
        await self._registry.prepare(model)
        chain = self._permitted(run.exchange, self._registry.chain(model, self._admissions.waiting))
        run.alone = len(chain) == 1
        failed: dict[Link, ApiError] = {}
        for place, link in enumerate(chain):
            attempt = run.attempt(link)
            error = await self._asked(attempt, run)
            if error is None:
                return
            failed[link] = error
            if place < len(chain) - 1:
                self._note(attempt, chain[place + 1][0], error)
            attempt.withdraw()
        await self._wait(run, failed)

    async def _asked(self, attempt: Attempt, run: _Run) -> ApiError | None:
        """Have one model answer; returns why it did not, if another may."""
        try:
            await self._registry.prepare(attempt.model)
            await run.answer(attempt)
            if attempt.trial is not None:
                attempt.trial.answered(attempt.exchange)
            return None
        except FAILURES as error:
            if attempt.trial is not None:
                attempt.trial.failed(attempt.exchange, error)
            if attempt.exchange.response_started or attempt.committed or run.alone:
                raise
            return error
        except InvalidRequest as error:
            # A request that only a fallback refuses is a valid one for the model that was asked for.
            if attempt.exchange.response_started or not attempt.is_fallback:
                raise
            return error
        finally:
            attempt.release()

    async def _wait(self, run: _Run, failed: dict[Link, ApiError]) -> None:
        """Nobody answered at once: wait for those that are only away, and have the first that is back answer."""
        away = [link for link, error in failed.items() if isinstance(error, EngineUnavailable)]
        own = next((link for link in failed if not link[1]), None)
        first = next(iter(failed.values())) if own is None else failed[own]
        # What the model itself failed would fail again; without a fallback that would be the answer too.
        if run.backed or not away or (own is not None and own not in away and not isinstance(first, DataRuleForbids)):
            raise first
        log.info("a request waits", extra={"request_id": run.exchange.request_id, "for": [name for name, _ in away]})
        if own in away and (len(away) == 1 or self._has_turns(own[0])):
            error = await self._asked(run.attempt(own, patient=True), run)
            if error is not None:
                raise error
            return
        now = time.monotonic()
        within = min(self._engine_wait_s, time_left(run.exchange))
        until, tried = now + within, dict.fromkeys(away, now)
        while away:
            now = time.monotonic()
            if now >= until:
                raise EngineUnavailable(
                    f"No model that can answer this request is up (waited {within:.3g} s); try again.",
                    reason="queue_timeout",
                ) from first
            back = next((link for link in away if now >= tried[link] + AGAIN_S and self._ready(link[0])), None)
            if back is None:
                await asyncio.sleep(POLL_S)
                continue
            attempt = run.attempt(back)
            error = await self._asked(attempt, run)
            if error is None:
                return
            attempt.withdraw()
            tried[back] = time.monotonic()
            if not isinstance(error, EngineUnavailable):
                away.remove(back)
        raise first

    def _has_turns(self, name: str) -> bool:
        """Whether a model is waited for on its own way: it takes turns with others, or a request starts it."""
        if self._registry.remote(name) is not None:
            return False
        model = self._registry.route(name).model
        return bool(model.time_slice) or model.on_demand

    def _ready(self, name: str) -> bool:
        found = self._registry.remote(name)
        return found.ready if found is not None else self._registry.route(name).model.backend.ready

    def _permitted(self, exchange: Exchange, chain: Sequence[Link]) -> list[Link]:
        """The models of a chain that may get the request; the error of the first when none may."""
        found = [link for link in chain if self._permissions.allows(exchange, link[0])]
        if not found:
            (name, _), *_ = [link for link in chain if not link[1]] or chain
            self._permissions.check(exchange, name)
        return found

    def _note(self, attempt: Attempt, to: str, failure: ApiError) -> None:
        about = {"request_id": attempt.exchange.request_id, "model": attempt.model, "next": to, "why": failure.message}
        log.warning("a fallback is asked", extra=about)
        self._metrics.fell_back(attempt.model, to, failure.code or failure.type)
