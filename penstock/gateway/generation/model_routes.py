"""Routes: names that lead to a small or a large model, request by request, and that operators can switch at run time.

Switches are stored in the database and read every few seconds, so that all gateways follow; without a database they
hold in this process. A classifier that does not answer in time is left out; then the score alone decides.
"""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from penstock.config.routing import RouteConfig
from penstock.errors import ConfigError
from penstock.gateway.app.data_rules import withheld
from penstock.gateway.app.exchange import Exchange
from penstock.gateway.generation.constraints import ModelConstraints
from penstock.gateway.generation.permissions import Permissions
from penstock.gateway.generation.question import Question
from penstock.protocol.errors import ApiError
from penstock.routing.encoders import Encoders
from penstock.routing.registry import ModelRegistry
from penstock.routing.selection.classifier import Classifier
from penstock.routing.selection.complexity import Complexity
from penstock.routing.selection.prompts import Size
from penstock.routing.selection.selector import RouteRules, select
from penstock.storage import Database, DatabaseError
from penstock.telemetry.route_metrics import RouteMetrics

log = logging.getLogger("penstock.gateway")

FRESH_S = 2.0
"""How long it may take until other gateways see a switch."""
OPINION_S = 0.25
"""How long a classifier may take."""
_VERSIONS = [["CREATE TABLE IF NOT EXISTS route_switches (name TEXT PRIMARY KEY, enabled INTEGER, share REAL)"]]


class Routes:
    """Every configured route."""

    def __init__(
        self,
        configs: Sequence[RouteConfig],
        registry: ModelRegistry,
        encoders: Encoders,
        metrics: RouteMetrics,
        permissions: Permissions,
        constraints: ModelConstraints,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._encoders, self._metrics, self._clock = encoders, metrics, clock
        self._configured = {config.name: _rules(config, registry) for config in configs}
        self.rules = dict(self._configured)
        self._permissions, self._constraints = permissions, constraints
        for rules in self._configured.values():
            permissions.add_route(rules.name, (rules.small, rules.large))
        self._classifiers = {
            config.name: Classifier.load(Path(config.classifier)) for config in configs if config.classifier
        }
        self._scores = {config.name: Complexity.load(Path(config.score)) for config in configs if config.score}
        self._database: Database | None = None
        self._read_at = float("-inf")

    async def start(self, database: Database | None) -> None:
        if self._configured and database is not None:
            await database.migrate("routes", _VERSIONS)
            self._database = database

    async def choose(self, name: str, exchange: Exchange, question: Callable[[], Question]) -> tuple[str, str]:
        """The model that answers for `name`, and the reason; no reason where `name` is no route."""
        if name not in self.rules:
            return name, ""
        await self._refresh()
        rules, asked = self.rules[name], question()
        reading = await self._constraints.reading(exchange, rules, asked)
        selection = select(
            rules,
            asked.text,
            words=reading.words,
            tokens=reading.tokens,
            tier=exchange.caller.tier,
            wanted_tokens=asked.max_tokens or 0,
            unit=exchange.record.user_id or exchange.request_id,
            opinion=await self._opinion(name, asked.text, exchange),
            earlier=asked.said[:-1],
            complexity=self._scores.get(name),
        )
        models = (rules.small, rules.large)
        able = self._permissions.allowed(exchange, models)
        if not able:  # perhaps a fallback may get the request where the model may not
            able = [model for model in models if self._permissions.exists(exchange.caller, model)]
        if not able:
            self._permissions.check(exchange, selection.model)
        if selection.model not in able:
            size: Size = "small" if able[0] == rules.small else "large"
            selection = dataclasses.replace(selection, model=able[0], size=size, rule="only", wanted=selection.rule)
        elif len(able) > 1 and rules.enabled:
            selection = await self._constraints.apply(exchange, rules, selection, asked, reading)
        self._metrics.decided(name, selection.model, selection.rule)
        return selection.model, selection.why(name)

    async def switch(self, name: str, *, enabled: bool | None, share: float | None) -> RouteRules:
        """Turn a route on or off, or change the share of requests that it decides on."""
        rules = self.rules[name]
        changed = dataclasses.replace(
            rules,
            enabled=rules.enabled if enabled is None else enabled,
            share=rules.share if share is None else share,
        )
        if self._database is not None:
            await self._database.execute(
                "INSERT INTO route_switches (name, enabled, share) VALUES (?, ?, ?) "
                "ON CONFLICT (name) DO UPDATE SET enabled = excluded.enabled, share = excluded.share",
                name, int(changed.enabled), changed.share,
            )  # fmt: skip
        self.rules[name] = changed
        return changed

    async def _refresh(self) -> None:
        if self._database is None or self._clock() < self._read_at + FRESH_S:
            return
        self._read_at = self._clock()
        try:
            rows = await self._database.fetch("SELECT name, enabled, share FROM route_switches")
        except DatabaseError as error:
            log.warning("route switches cannot be read; the last known ones hold", extra={"reason": str(error)})
            return
        for name, enabled, share in rows:
            if name in self._configured:
                self.rules[name] = dataclasses.replace(
                    self._configured[name], enabled=bool(enabled), share=float(share)
                )

    async def _opinion(self, name: str, text: str, exchange: Exchange) -> float | None:
        classifier = self._classifiers.get(name)
        if classifier is None or not self.rules[name].enabled:
            return None
        try:
            embedder = self._encoders.any(classifier.encoder)
            if exchange.demand and withheld(exchange, "encoder", embedder.name, embedder.unmet(exchange.demand)):
                return None
            async with asyncio.timeout(OPINION_S):
                embeddings = await embedder.embed([text])
        except (ApiError, TimeoutError) as error:
            log.info("a route decides without its classifier", extra={"route": name, "reason": str(error) or "late"})
            return None
        return classifier.probability(text, embeddings.vectors[0])


def _rules(config: RouteConfig, registry: ModelRegistry) -> RouteRules:
    if registry.named(config.name):
        raise ConfigError(f"routes: `{config.name}` is already the name of a model")
    for name in (config.small, config.large):
        if registry.find(name) is None:
            raise ConfigError(f"routes: `{config.name}` leads to `{name}`, but no model is called that")
    tiers = {**dict.fromkeys(config.small_tiers, "small"), **dict.fromkeys(config.large_tiers, "large")}
    return RouteRules(
        config.name,
        config.small,
        config.large,
        config.default,
        config.threshold,
        config.unsure,
        config.long_words,
        config.long_tokens,
        tiers,  # type: ignore[arg-type]
        config.share,
        config.enabled,
        config.target_ttft_ms,
        config.budget_reserve,
    )
