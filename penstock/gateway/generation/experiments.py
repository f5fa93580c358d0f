"""Experiments: names whose traffic is split between a control and canaries.

Which arm a request is in is looked up in memory; `experiment_keeper.py` keeps what is known up to date. A request
takes part in one experiment at most, in the arm of the conversation, response or stream that it goes on with.
"""

from __future__ import annotations

import random
import re
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress

from penstock.config.experiments import ExperimentConfig
from penstock.errors import ConfigError
from penstock.gateway.accounting.batch_line import batch_line
from penstock.gateway.accounting.metered import Metered
from penstock.gateway.app.exchange import Exchange
from penstock.gateway.generation.experiment import Experiment
from penstock.gateway.generation.experiment_keeper import ExperimentKeeper
from penstock.gateway.generation.experiment_store import CountKey, DatabaseExperiments, MemoryExperiments
from penstock.gateway.generation.model_routes import Routes
from penstock.gateway.generation.permissions import Permissions
from penstock.gateway.generation.trial import Trial, parsed_label
from penstock.metering.prices import PriceBook, Usage
from penstock.routing.experiments.allocation import CONTROL, bucket_of
from penstock.routing.experiments.confidence import Moments
from penstock.routing.registry import ModelRegistry
from penstock.storage import Database, DatabaseError
from penstock.telemetry.experiment_metrics import ExperimentMetrics

HEADER = b"x-penstock-experiment"
_CHARGE = re.compile(r"(?:[a-z-]+[_-])?([0-9a-f]{32})(?:\.[0-9]{1,9})?")


class Experiments:
    """Every configured experiment."""

    def __init__(
        self,
        configs: Sequence[ExperimentConfig],
        registry: ModelRegistry,
        routes: Routes,
        prices: PriceBook,
        metrics: ExperimentMetrics,
        permissions: Permissions,
        *,
        clock: Callable[[], float] = time.time,
        draw: Callable[[], float] = random.random,
    ) -> None:
        self._experiments = {config.name: Experiment(config) for config in configs}
        self._registry, self._routes, self._prices, self._metrics = registry, routes, prices, metrics
        self._permits, self._clock, self._draw = permissions.allows, clock, draw
        self._database: Database | None = None
        self.keeper = ExperimentKeeper(
            self._experiments, MemoryExperiments(), metrics, clock, exists=self._exists, split=self._split
        )
        self._check()
        for experiment in self:
            if not self._exists(experiment.config.name):
                permissions.add_route(experiment.config.name, [experiment.control])
                if experiment.control not in routes.rules:
                    registry.stand_ins[experiment.config.name] = experiment.control

    def __iter__(self) -> Iterator[Experiment]:
        return iter(self._experiments.values())

    def __contains__(self, name: str) -> bool:
        return name in self._experiments

    async def start(self, database: Database | None) -> None:
        if not self._experiments:
            return
        if database is not None:
            store = DatabaseExperiments(database)
            await store.prepare()
            self._database, self.keeper.store = database, store
        await self.keeper.start()

    async def close(self) -> None:
        await self.keeper.close()

    async def assign(self, exchange: Exchange, name: str) -> tuple[str, Trial | None]:
        """The model that answers for `name`, and the part of the request in an experiment; none where nothing is split,
        or where the caller may not use the model of its arm, which then does not exist for it."""
        experiment = self._find(name) if self._experiments else None
        if experiment is None:
            return name, None
        config = experiment.config
        arm = await self._pinned(exchange, experiment)
        if arm is None:
            arm = experiment.allocation.arm(bucket_of(config.name, _unit(exchange, config.sticky)))
        model = experiment.model(arm)
        if arm != CONTROL and not (self._exists(model) and self._permits(exchange, model)):
            return experiment.control, None
        shadows = tuple(
            other for other, share in config.shadows.items() if self._draw() < share and self._permits(exchange, other)
        )
        trial = Trial(config.name, arm, model, self, graded=config.judge, shadows=shadows)
        exchange.arms = {**exchange.arms, config.name: arm}
        exchange.record.experiment = trial.label
        exchange.extra_headers.append((HEADER, trial.label.encode("latin-1", "replace")))
        return model, trial

    def fallback(self, trial: Trial) -> str | None:
        """What answers a request that a canary failed; None where that is not wanted."""
        experiment = self._experiments[trial.experiment]
        return experiment.control if trial.arm != CONTROL and experiment.config.fallback else None

    def _find(self, name: str) -> Experiment | None:
        found = self._experiments.get(name)
        # Perhaps an alias of a model that is split.
        if found is None and self._registry.named(name) and name not in self._registry.stand_ins:
            remote = self._registry.remote(name)
            found = self._experiments.get(remote.name if remote is not None else self._registry.route(name).model.name)
        return found

    async def _pinned(self, exchange: Exchange, experiment: Experiment) -> str | None:
        """The arm of what the request goes on with: a conversation, an earlier response, or a broken stream."""
        arm = exchange.arms.get(experiment.config.name)
        resumed = exchange.header(b"last-event-id")
        continued = exchange.continues if resumed is None else resumed.decode("latin-1")
        if arm is None and self._database is not None and (match := _CHARGE.fullmatch(continued)) is not None:
            with suppress(DatabaseError):
                rows = await self._database.fetch(
                    "SELECT experiment FROM charges_opened WHERE id = ? AND tenant = ?",
                    match[1],
                    exchange.caller.tenant,
                )
                name, of = parsed_label(rows[0][0]) if rows else ("", "")
                arm = of if name == experiment.config.name else None
        if arm is None or resumed is not None:
            return arm
        return arm if experiment.allocation.share(arm) > 0 else None

    def _exists(self, name: str) -> bool:
        if name in self._routes.rules or self._registry.named(name):
            return True
        return any(name in model.adapter_names for model in self._registry)

    def count(self, experiment: str, arm: str, measure: str, value: float) -> None:
        self._add(experiment, arm, measure, Moments(1, value, value * value))

    def _add(self, experiment: str, arm: str, measure: str, added: Moments) -> None:
        """To the stage and to the time window."""
        stage, window = self._experiments[experiment].span(self._clock())
        pending = self.keeper.pending
        for span in (0, window):
            key = CountKey(experiment, stage, span, arm, measure)
            pending[key] = pending[key].plus(added)

    def ended(self, experiment: str, arm: str, outcome: str) -> None:
        self._metrics.ended(experiment, arm, outcome)
        self.count(experiment, arm, outcome, 0.0)

    def answered(self, trial: Trial, ttft_s: float | None, latency_s: float) -> None:
        dollars = trial.cost_nanos / 1e9
        self._metrics.answered(trial.experiment, trial.arm, ttft_s, latency_s, trial.tokens, dollars)

    def cost(self, tier: str, generation: Metered) -> int:
        model = generation.model
        price = self._prices.price(model.base_name, model.adapter, tier)
        price = price.recalled() if generation.from_cache else price
        return price.cost(Usage(generation.prompt_tokens, generation.cached_tokens, generation.completion_tokens))

    def voted(self, label: str, rating: str, before: str | None) -> None:
        """A user has voted on an answer of an arm; `before`: the vote that this one replaces."""
        name, arm = parsed_label(label)
        if name not in self._experiments or rating == before:
            return
        value = float(rating == "down")
        self._metrics.voted(name, arm, rating)
        if before is None:
            self.count(name, arm, "dislikes", value)
            return
        change = value - float(before == "down")
        self._add(name, arm, "dislikes", Moments(0, change, change))

    def graded(self, label: str, grade: float) -> None:
        """The judge has graded an answer of an arm."""
        name, arm = parsed_label(label)
        if name in self._experiments:
            self._metrics.graded(name, arm, grade)
            self.count(name, arm, "grades", grade)

    def _split(self, name: str) -> bool:
        """Whether another experiment would split it, itself or behind a route."""
        reached = [name]
        if (rules := self._routes.rules.get(name)) is not None:
            reached += [rules.small, rules.large]
        return any(self._find(each) is not None for each in reached)

    def _check(self) -> None:
        for name, experiment in self._experiments.items():
            config, rules = experiment.config, self._routes.rules.get(name)
            arms = [*config.canaries, *config.shadows, *([config.control] if config.control else [])]
            if rules is not None and not config.control:
                arms += [rules.small, rules.large]
            for arm in config.shadows:
                if arm in self._routes.rules:
                    raise ConfigError(f"experiments: the route `{arm}` cannot be a shadow of `{name}`; name a model")
            for arm in arms:
                if self._split(arm):
                    raise ConfigError(f"experiments: `{name}` leads to `{arm}`, which an experiment splits")


def _unit(exchange: Exchange, sticky: str) -> str:
    """What stays in its arm. Tenants never share one: their users may have the same names."""
    tenant = exchange.caller.tenant
    if sticky == "tenant":
        return tenant
    user, session = exchange.record.user_id or "", exchange.session
    chosen = {"user": (user, session), "session": (session, user)}.get(sticky, ())
    for kind, value in zip(("user", "session") if sticky == "user" else ("session", "user"), chosen, strict=False):
        if value:
            return f"{tenant}\0{kind}\0{value}"
    line = batch_line(exchange)
    return f"{tenant}\0{exchange.request_id if line is None else line}"
