"""Requests at the admission queue: which class they are in, what they ask for, and who is sent to a smaller model."""

from __future__ import annotations

from collections.abc import Callable

from penstock.config.schema import TierConfig
from penstock.gateway.accounting.quotas import Reservation
from penstock.gateway.app.exchange import Exchange
from penstock.gateway.generation.base import Generation
from penstock.gateway.generation.engine import EngineGeneration
from penstock.gateway.process.settings import GatewaySettings
from penstock.identity import Caller
from penstock.protocol.errors import InvalidRequest
from penstock.routing.admission.controller import Admission, AdmissionRequest, Ticket
from penstock.routing.admission.queue import BATCH, CLASSES, PREMIUM
from penstock.routing.registry import ModelRegistry, Route, ServedModel
from penstock.telemetry.metrics import Metrics

DOWNGRADE = "downgrade"
"""Why another model answers (`x-penstock-route`)."""
LINE_PRIORITY = 2
"""Of lines of batches in the engine: behind everybody who waits for an answer."""
_NO_TIER = TierConfig()


class Admissions:
    """Admission for the requests of one gateway. Without it (`admission.enabled: false`) everybody runs at once."""

    def __init__(self, settings: GatewaySettings, registry: ModelRegistry, metrics: Metrics) -> None:
        self._registry = registry
        self._tiers = {tier.name: tier for tier in settings.tiers}
        self.smaller = {model.name: model.downgrade_to for model in settings.models if model.downgrade_to}
        self._admission = (
            Admission(settings.admission, registry, metrics.registry) if settings.admission.enabled else None
        )

    async def start(self) -> None:
        if self._admission is not None:
            await self._admission.start()

    async def close(self) -> None:
        if self._admission is not None:
            await self._admission.close()

    async def add(self, model: ServedModel, smaller: str) -> None:
        """A model that has come; `smaller`: what answers best-effort callers instead of it."""
        if smaller:
            self.smaller[model.name] = smaller
        if self._admission is not None:
            await self._admission.add(model)

    async def remove(self, model: ServedModel) -> None:
        self.smaller.pop(model.name, None)
        if self._admission is not None:
            await self._admission.remove(model)

    def priority(self, exchange: Exchange, service_tier: str | None) -> int:
        """Priority in the engine, smaller first: the class of the caller's tier, or a lower one that was asked for."""
        if exchange.line is not None:
            return LINE_PRIORITY
        caller = exchange.caller
        rank = self._tier(caller).priority
        if service_tier == "flex":
            rank = BATCH
        elif service_tier == "priority" and not caller.key:
            rank = PREMIUM  # without keys there is no tier that could forbid it
        asked = exchange.header(b"x-priority")
        if asked is not None:
            word = asked.decode("latin-1").strip().lower()
            if word not in CLASSES:
                raise InvalidRequest(f"The header x-priority must be one of {', '.join(CLASSES)}.", param="x-priority")
            rank = max(rank, CLASSES.index(word))
        return rank - 1

    async def enter(self, exchange: Exchange, generation: Generation, reservation: Reservation | None) -> Ticket | None:
        """A place for the generation; `Overloaded` when there is none. None: it needs none."""
        if self._admission is None or not isinstance(generation, EngineGeneration):
            return None
        caller = exchange.caller
        return await self._admission.controller(generation.model).enter(
            AdmissionRequest(
                id=generation.id,
                tenant=caller.tenant,
                rank=min(max(generation.priority + 1, PREMIUM), BATCH),
                weight=self._tier(caller).weight,
                prompts=[prompt.tokens for prompt in generation.prompts],
                sequences=len(generation.choices),
                max_output_tokens=generation.most_completion_tokens,
                salt=generation.cache_key,
                budget_left=1.0 if reservation is None else reservation.left,
                max_wait_s=_patience(exchange),
            )
        )

    def waiting(self, model: ServedModel) -> int:
        """How many wait here for a model."""
        if self._admission is None:
            return 0
        return sum(self._admission.controller(model).queue.state("", 0).queued)

    def reroute(self, exchange: Exchange, route: Route, needs: Callable[[], int]) -> Route:
        """The route to take: to the smaller model, where too many wait for the one that was asked for and the caller
        does not pay for waiting. `needs`: tokens that the request takes at most; it must fit there too."""
        name = self.smaller.get(route.model.name)
        if name is None or self._admission is None or not self._tier(exchange.caller).best_effort:
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


def leave(ticket: Ticket, generation: Generation) -> None:
    """Give back what a generation held, with what it really took."""
    produced = generation.completion_tokens
    ticket.close(
        generation.prompt_tokens - generation.cached_tokens, produced, len(generation.choices) if produced else 0
    )


def _patience(exchange: Exchange) -> float | None:
    """The time to the first token that the client can use (`x-slo-ttft-ms`): waiting longer helps nobody."""
    sent = exchange.header(b"x-slo-ttft-ms")
    if sent is None:
        return None
    try:
        milliseconds = float(sent)
    except ValueError:
        milliseconds = 0.0
    if not 0 < milliseconds < float("inf"):
        raise InvalidRequest("The header x-slo-ttft-ms must be a number above 0.", param="x-slo-ttft-ms")
    return milliseconds / 1000.0
