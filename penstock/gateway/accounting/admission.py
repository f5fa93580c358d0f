"""Admission of requests: their priority, their place in the queue of a model, and the downgrade to a smaller model."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

from msgspec import Struct

from penstock.config.routing import AdmissionConfig
from penstock.config.schema import TierConfig
from penstock.gateway.accounting.batch_line import batch_line
from penstock.gateway.accounting.quotas import Reservation
from penstock.gateway.accounting.targets import time_left
from penstock.gateway.app.exchange import Exchange
from penstock.identity import Caller
from penstock.protocol.errors import InvalidRequest
from penstock.routing.admission.admission import Admission, ModelAdmission
from penstock.routing.admission.controller import Ticket
from penstock.routing.admission.pools import PooledAdmission, PoolTicket
from penstock.routing.admission.queue import BATCH, CLASSES, PREMIUM
from penstock.routing.admission.triage import AdmissionRequest
from penstock.routing.placement import ANYWHERE, Placement, PlacementFacts
from penstock.routing.registry import ModelRegistry, Route, ServedModel
from penstock.telemetry.metrics import Metrics

DOWNGRADE = "downgrade"
"""Why another model answers (`x-penstock-route`)."""
LINE_PRIORITY = 2
"""Priority in the engine of lines of batches: after every request that a client waits for."""
SHADOW_PRIORITY = LINE_PRIORITY + 1
"""Of shadow requests: after batches too."""
MOST_LATER = 16
"""How far the `priority` of a request can lower it: each step is as if it had arrived half a minute later."""
SHORTEST_WAIT_S = 0.001
"""That a client allows which has none of its `x-slo-ttft-ms` left: what need not wait still runs."""
_NO_TIER = TierConfig()


class EngineDemand(Struct, frozen=True, kw_only=True):
    """What a generation asks of an engine."""

    id: str
    model: ServedModel
    priority: int
    prompts: Sequence[list[int]]
    sequences: int
    most_output: int
    """Completion tokens at most, over all sequences."""
    cache_key: str
    """Prompts share cached prefixes only under the same key."""
    placement: Placement = ANYWHERE
    """The pools and regions that it may run in."""


class Admissible(Protocol):
    """Work that may take an engine."""

    def demand(self) -> EngineDemand | None:
        """None when it takes no engine of this gateway."""


class Admissions:
    """Admission for the requests of one gateway. Without it (`admission.enabled: false`) every request runs at once."""

    def __init__(
        self,
        config: AdmissionConfig,
        tiers: Sequence[TierConfig],
        smaller: Mapping[str, str],
        registry: ModelRegistry,
        metrics: Metrics,
    ) -> None:
        """`smaller`: models by the name of the larger one that they answer for while too many requests wait."""
        self._registry = registry
        self._tiers = {tier.name: tier for tier in tiers}
        self.smaller = dict(smaller)
        self._admission = Admission(config, registry, metrics.registry) if config.enabled else None

    async def start(self) -> None:
        if self._admission is not None:
            await self._admission.start()

    async def close(self) -> None:
        if self._admission is not None:
            await self._admission.close()

    async def add(self, model: ServedModel, smaller: str) -> None:
        """Serve a new model; `smaller` answers best-effort callers instead of it while too many wait."""
        if smaller:
            self.smaller[model.name] = smaller
        if self._admission is not None:
            await self._admission.add(model)

    async def change(self, model: ServedModel, smaller: str, *, pools: bool) -> ModelAdmission | None:
        """A model has other settings; `pools`: also other pools. Returns queues that are to be closed once they are
        empty."""
        self.smaller.pop(model.name, None)
        if smaller:
            self.smaller[model.name] = smaller
        return await self._admission.renew(model) if pools and self._admission is not None else None

    async def remove(self, model: ServedModel) -> None:
        self.smaller.pop(model.name, None)
        if self._admission is not None:
            await self._admission.remove(model)

    def priority(self, exchange: Exchange, service_tier: str | None, asked: int | None = None) -> int:
        """Priority in the engine, smaller first: the class of the caller's tier, or a lower one that the request asks
        for. `asked`: the request's `priority`, 0 for the usual one; a smaller one counts only without keys."""
        if exchange.shadow:
            return SHADOW_PRIORITY
        later = min(max(asked or 0, 0), MOST_LATER)
        if batch_line(exchange) is not None:
            return LINE_PRIORITY + later
        caller = exchange.caller
        own, of_key = caller.limits.priority, caller.key_limits.priority
        rank = max(self._tier(caller).priority if own is None else own, of_key or 0)
        if service_tier == "flex":
            rank = BATCH
        elif service_tier in ("priority", "fast") and not caller.key:
            rank = PREMIUM  # without keys there is no tier that could forbid it
        if asked is not None and asked < 0:
            if not caller.key:
                rank = PREMIUM
            elif exchange.refuses_unknown:
                raise InvalidRequest("`priority` below 0 is above the tier of this key.", param="priority")
            else:
                exchange.ignored.append("priority")
        sent = exchange.header(b"x-priority")
        if sent is not None:
            word = sent.decode("latin-1").strip().lower()
            if word not in CLASSES:
                raise InvalidRequest(f"The header x-priority must be one of {', '.join(CLASSES)}.", param="x-priority")
            rank = max(rank, CLASSES.index(word))
        return rank - 1 + later

    def place(
        self, exchange: Exchange, model: ServedModel, priority: int, prompt_tokens: int, max_tokens: int | None
    ) -> Placement:
        """Where a request may run. `max_tokens`: of the answer, as far as the request says it."""
        asked = exchange.header(b"x-penstock-pool")
        return model.place(
            PlacementFacts(
                tenant=exchange.caller.tenant,
                tier=exchange.caller.tier,
                priority=CLASSES[_rank(priority)],
                prompt_tokens=prompt_tokens,
                tokens=prompt_tokens + (max_tokens or 0),
                batch_line=batch_line(exchange) is not None,
                asked="" if asked is None else asked.decode("latin-1").strip(),
                demand=exchange.demand,
            )
        )

    async def enter(
        self, exchange: Exchange, work: Admissible, reservation: Reservation | None
    ) -> Ticket | PoolTicket | None:
        """A place in the queue; `Overloaded` when there is none. None: the work needs no place."""
        if self._admission is None or (demand := work.demand()) is None:
            return None
        caller = exchange.caller
        return await self._admission.controller(demand.model).enter(
            AdmissionRequest(
                id=demand.id,
                tenant=caller.tenant,
                rank=_rank(demand.priority),
                weight=self._tier(caller).weight,
                prompts=demand.prompts,
                sequences=demand.sequences,
                max_output_tokens=demand.most_output,
                salt=demand.cache_key,
                budget_left=1.0 if reservation is None else reservation.left,
                tier=caller.tier,
                placement=demand.placement,
                max_wait_s=max(time_left(exchange), SHORTEST_WAIT_S),
            )
        )

    def depths(self) -> list[tuple[str, int]]:
        """The requests that wait for each model."""
        return [] if self._admission is None else [(model.name, self.waiting(model)) for model in self._registry]

    def waiting(self, model: ServedModel) -> int:
        """The number of requests of this gateway that wait for a model."""
        if self._admission is None:
            return 0
        return sum(self._admission.controller(model).depths())

    def queue_load(self, model: ServedModel) -> tuple[int, float, bool]:
        """Requests that wait for a model, how long a new one would wait, and whether all gateways share the queue."""
        if self._admission is None:
            return 0, 0.0, False
        return self._admission.controller(model).load()

    def pool_load(self, model: ServedModel, pool: str) -> tuple[int, float, bool]:
        """The same of one of its pools."""
        found = None if self._admission is None else self._admission.controller(model)
        if not isinstance(found, PooledAdmission) or pool not in found.pools:
            return 0, 0.0, False
        return found.pools[pool].common.load()

    def reroute(
        self,
        exchange: Exchange,
        route: Route,
        needs: Callable[[], int],
        allowed: Callable[[str], bool] = lambda name: True,
    ) -> Route:
        """The route to take: to the smaller model when too many requests wait for this one and the caller's tier is
        best effort. `needs`: tokens that the request takes at most, which must fit the smaller model's window.
        `allowed`: whether the request may reach a model."""
        name = self.smaller.get(route.model.name)
        if name is None or self._admission is None or not self._tier(exchange.caller).best_effort or not allowed(name):
            return route
        smaller = self._registry.route(name).model
        if not self._admission.controller(route.model).saturated() or self._admission.controller(smaller).saturated():
            return route
        window = smaller.context_window
        if not smaller.backend.ready or (window is not None and needs() > window):
            return route
        self._admission.metrics.downgraded(route.model.name)
        return Route(smaller, DOWNGRADE)

    def _tier(self, caller: Caller) -> TierConfig:
        return self._tiers.get(caller.tier, _NO_TIER)


def _rank(priority: int) -> int:
    """The class of a priority in the engine."""
    return min(max(priority + 1, PREMIUM), BATCH)
