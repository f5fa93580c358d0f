"""Automatic scaling by the fleet's controller, as the gateways of one machine see it through their supervisor."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Hashable

from penstock.errors import PenstockError
from penstock.fleet.membership import engine_model
from penstock.fleet.needs import asks
from penstock.fleet.operations import with_limits
from penstock.fleet.records import LoadRecord, ModelRecord
from penstock.fleet.registry import Registry
from penstock.fleet.view import FleetView
from penstock.protocol.control import Loads, Scaling

REPORT_S = 1.0

log = logging.getLogger("penstock.fleet")


class FleetScaler:
    """Stands for the controller at the control socket: reports loads to it, and passes its decisions on."""

    def __init__(self, registry: Registry, view: FleetView, machine: str) -> None:
        self._registry = registry
        self._view = view
        self._machine = machine
        self._loads: dict[Hashable, LoadRecord] = {}
        self._numbers = 0
        self._gone: list[LoadRecord] = []
        self._limits: list[ModelRecord] = []
        self._asked = asyncio.Event()
        self.on_change: Callable[[Scaling], None] | None = None

    def governs(self, model: str, pool: str = "") -> bool:
        record = self._view.fleet.models.get(model)
        found = [] if record is None else asks(record, engine_model(record.description))
        return any(ask.pool == pool and ask.autoscale is not None for ask in found)

    def heard(self, gateway: Hashable, loads: Loads) -> None:
        if gateway not in self._loads:
            self._numbers += 1
            self._loads[gateway] = LoadRecord(gateway=f"{self._machine}/{self._numbers}", loads=loads)
        else:
            self._loads[gateway] = LoadRecord(gateway=self._loads[gateway].gateway, loads=loads)
        self._asked.set()

    def lost(self, gateway: Hashable) -> None:
        if gateway in self._loads:
            self._gone.append(self._loads.pop(gateway))

    def set_limits(self, model: str, minimum: int | None, maximum: int | None, pool: str = "") -> None:
        record = self._view.fleet.models.get(model)
        if record is None:
            raise PenstockError(f"the fleet does not serve `{model}`")
        self._limits.append(with_limits(record, minimum, maximum, pool))
        self._asked.set()

    def state(self) -> Scaling:
        fleet = self._view.fleet
        decision = fleet.decisions.get(fleet.controller)
        return Scaling({} if decision is None else dict(decision.scaling))

    async def run(self) -> None:
        told = Scaling({})
        published: dict[str, LoadRecord] = {}
        while True:
            self._asked.clear()
            try:
                limits, self._limits = self._limits, []
                gone, self._gone = self._gone, []
                fresh = [record for record in self._loads.values() if published.get(record.gateway) != record]
                if gone:
                    await self._registry.withdraw(*gone)
                if limits or fresh:
                    await self._registry.publish(*limits, *fresh)
                published = {record.gateway: record for record in self._loads.values()}
            except PenstockError as error:
                log.warning("loads could not be reported to the fleet", extra={"why": str(error)})
            state = self.state()
            if state != told and self.on_change is not None:
                told = state
                self.on_change(state)
            await self._wait()

    async def _wait(self) -> None:
        try:
            async with asyncio.timeout(REPORT_S):
                await self._asked.wait()
        except TimeoutError:
            return
