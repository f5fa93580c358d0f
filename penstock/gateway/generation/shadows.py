"""Shadow traffic: requests that another model answers too, after the client has got its answer, for nobody to read.

Invariants: no client ever waits for a shadow or fails with it; at most `shadow_queue` requests wait and
`shadow_at_once` run per experiment, what does not fit is dropped and counted; shadows run after everything else,
batches included. Tenants neither pay for them nor spend their limits: the ledger has them under a tenant of their own.
A shadow calls no tools and stores nothing.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable
from contextlib import suppress
from time import monotonic
from typing import NamedTuple

from penstock.config.experiments import ExperimentConfig
from penstock.gateway.accounting.admission import Admissions
from penstock.gateway.accounting.answer_ids import AnswerIds
from penstock.gateway.accounting.charges import SHADOW, AccountBook
from penstock.gateway.app.data_rules import permit
from penstock.gateway.app.exchange import Exchange
from penstock.gateway.generation.attempt import Attempt
from penstock.gateway.generation.base import Generation
from penstock.gateway.generation.permissions import Permissions
from penstock.gateway.generation.stages import AnswerGrader
from penstock.gateway.generation.trial import SHADOW as SHADOW_ARM
from penstock.gateway.generation.trial import Again, Tally, Trial
from penstock.protocol.errors import ApiError, Overloaded
from penstock.routing.registry import ModelRegistry
from penstock.telemetry.experiment_metrics import ExperimentMetrics

log = logging.getLogger("penstock.gateway")

LIMIT_S = 300.0
"""How long a shadow may take."""
MOST_BYTES = 32 * 2**20
"""Of all requests that wait for shadows in one process."""


class _Job(NamedTuple):
    exchange: Exchange
    trial: Trial
    again: Again


class Shadows:
    """The shadows of one gateway process."""

    def __init__(
        self,
        configs: Iterable[ExperimentConfig],
        registry: ModelRegistry,
        permissions: Permissions,
        admissions: Admissions,
        accounts: AccountBook,
        grader: AnswerGrader,
        tally: Tally,
        metrics: ExperimentMetrics,
    ) -> None:
        self._configs = {config.name: config for config in configs if config.shadows}
        self._queues = {name: asyncio.Queue[_Job](config.shadow_queue) for name, config in self._configs.items()}
        self._registry, self._permissions = registry, permissions
        self._admissions, self._accounts = admissions, accounts
        self._grader, self._tally, self._metrics = grader, tally, metrics
        self._waiting_bytes = 0
        self._tasks: list[asyncio.Task[None]] = []

    def start(self) -> None:
        self._tasks = [
            asyncio.create_task(self._work(queue), name=f"shadows of {name}")
            for name, queue in self._queues.items()
            for _ in range(self._configs[name].shadow_at_once)
        ]

    async def close(self) -> None:
        for task in self._tasks:
            task.cancel()
        for task in self._tasks:
            with suppress(asyncio.CancelledError):
                await task

    def submit(self, exchange: Exchange, real: Trial) -> None:
        """Take a request that was answered, if it was chosen. Never waits."""
        for model in real.shadows if real.again is not None else ():
            queue = self._queues[real.experiment]
            full = queue.maxsize == 0 or queue.full() or self._waiting_bytes + exchange.body_size > MOST_BYTES
            if full:
                self._metrics.shadowed(real.experiment, model, "dropped")
                continue
            assert real.again is not None
            trial = Trial(real.experiment, SHADOW_ARM + model, model, self._tally, graded=real.graded)
            if exchange.demand:  # nobody keeps the decisions of a copy
                permit(exchange, "shadow", model, ())
            queue.put_nowait(_Job(exchange.copied(), trial, real.again))
            self._waiting_bytes += exchange.body_size

    async def _work(self, queue: asyncio.Queue[_Job]) -> None:
        while True:
            job = await queue.get()
            self._waiting_bytes -= job.exchange.body_size
            trial = job.trial
            try:
                async with asyncio.timeout(LIMIT_S):
                    await self._run(job)
                self._metrics.shadowed(trial.experiment, trial.model, "answered")
            except (ApiError, TimeoutError) as error:
                trial.failed(job.exchange, error, control_serves=True)
                self._metrics.shadowed(trial.experiment, trial.model, "failed")
                about = {"experiment": trial.experiment, "model": trial.model, "why": str(error) or "it took too long"}
                log.info("a shadow failed", extra=about)
            except Exception as error:
                trial.failed(job.exchange, error)
                self._metrics.shadowed(trial.experiment, trial.model, "failed")
                log.exception("a shadow failed", extra={"experiment": trial.experiment, "model": trial.model})

    async def _run(self, job: _Job) -> None:
        exchange, trial = job.exchange, job.trial
        exchange.started_at = begun = monotonic()
        exchange.record.experiment = trial.label
        self._check_free(trial.model)
        # Like one with a fallback: it does not wait for an engine that is away.
        attempt = Attempt(exchange, trial.model, AnswerIds(exchange), reason=SHADOW, has_fallback=True, trial=trial)
        try:
            generation: Generation = await job.again(attempt)
            # Again: what the content filter found may forbid the model.
            self._permissions.check(exchange, trial.model)
            await self._generate(exchange, generation)
        finally:
            attempt.release()
        trial.ran(exchange.caller.tier, generation)
        first = generation.first_token_at
        trial.succeeded(None if first is None else first - begun, monotonic() - begun)
        self._grader.submit(attempt, generation)

    async def _generate(self, exchange: Exchange, generation: Generation) -> None:
        account = self._accounts.open(exchange, generation, feature=SHADOW)
        try:
            generation.submit()
            while not generation.done:
                await generation.next()
                account.note()
        finally:
            generation.close()
            await generation.settled()
            account.settle(generation.outcome or "abort")

    def _check_free(self, name: str) -> None:
        """A model that clients wait for has no time for shadows."""
        if self._registry.remote(name) is None and self._admissions.waiting(self._registry.route(name).model):
            raise Overloaded("Clients wait for this model, so it takes no shadow requests.")
