"""From a model's name to an engine of it that can take a request: downgrade, waiting for the engine, time slices."""

from __future__ import annotations

from penstock.engine.request import EngineInfo
from penstock.gateway.accounting.admission import DOWNGRADE, Admissions
from penstock.gateway.accounting.targets import time_left
from penstock.gateway.generation.attempt import Attempt
from penstock.gateway.generation.permissions import Permissions
from penstock.gateway.generation.sampling import TokenLimit
from penstock.routing.registry import ModelRegistry, ServedModel
from penstock.routing.time_slice_groups import TimeSlices


class ModelAccess:
    """Opens models for requests."""

    def __init__(
        self,
        registry: ModelRegistry,
        permissions: Permissions,
        admissions: Admissions,
        slices: TimeSlices,
        engine_wait_s: float,
    ) -> None:
        self._registry = registry
        self._permissions = permissions
        self._admissions = admissions
        self._slices = slices
        self._engine_wait_s = engine_wait_s

    async def open(self, attempt: Attempt, name: str, limit: TokenLimit) -> tuple[ServedModel, EngineInfo]:
        """The model, once its engine is up and, if it takes turns with others, awake. Waits for each up to
        `engine_wait_s` or what the client allows, unless another model can answer instead."""
        exchange = attempt.exchange
        # A token has at least one byte, so this is the most that the request can need.
        route = self._admissions.reroute(
            exchange,
            self._registry.route(name),
            lambda: exchange.body_size + (limit.max_tokens or 1),
            lambda smaller: self._permissions.allows(exchange, smaller),
        )
        model = route.model
        attempt.note_model(name, model, route.why)
        if route.why == DOWNGRADE:
            attempt.trial = None  # another model answers: nothing is learned about the arm
        most = self._engine_wait_s if attempt.patient else 0.0
        info = await model.backend.wait_ready(most, at_most=time_left(exchange))
        attempt.hold(await self._slices.acquire(model, min(most, time_left(exchange))))
        # An engine that woke for the first time reports more about itself.
        return model, model.backend.info or info
