"""Changes models and replicas while the server runs: load and unload, scale, restart, drain.

A replica that is removed drains: it finishes its requests, gateways send it no new ones, and requests that do not
finish in time move to other replicas. Operations run one at a time (`ControlServer` ensures it).
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Mapping
from typing import Any

from penstock.errors import PenstockError
from penstock.protocol.control import Replica, Topology
from penstock.supervisor.catalogue import ModelCatalogue
from penstock.supervisor.saved_models import SavedModels
from penstock.supervisor.supervisor import Supervisor
from penstock.supervisor.unit import Unit

FOUND_S = 1.0
"""How long gateways take to reconnect to a restarted engine."""
MOST = 256


class Replicas:
    """The engines of one supervisor, by model."""

    def __init__(
        self,
        supervisor: Supervisor,
        units: Iterable[Unit],
        make: Callable[[str, int], Unit],
        catalogue: ModelCatalogue | None = None,
        saved: SavedModels | None = None,
        max_engines: int = MOST,
    ) -> None:
        """`make`: builds replica number N of a model. `catalogue`: models loaded at run time. `saved`: the file that
        keeps them for the next start. `max_engines`: maximum of engines, all models together."""
        self._supervisor = supervisor
        self._make = make
        self.catalogue = catalogue
        self._saved = saved or SavedModels(None)
        self._max_engines = max_engines
        self._units: dict[str, list[Unit]] = {}
        for unit in units:
            if unit.replica:
                self._units.setdefault(unit.model, []).append(unit)
        self.on_change: Callable[[Topology], None] | None = None
        self.unserved: Callable[[str, int], Awaitable[str]] | None = None
        """Asks all gateways, once they know a topology, why they cannot serve a model; empty: they can."""
        self._changes = 0

    @property
    def stopping(self) -> bool:
        return self._supervisor.stopping

    def topology(self) -> Topology:
        return Topology(
            {model: [Replica(unit.replica, unit.endpoint) for unit in units] for model, units in self._units.items()},
            {} if self.catalogue is None else self.catalogue.loaded,
            self._changes,
        )

    async def load(self, description: Mapping[str, Any]) -> None:
        """Loads a model; gateways learn of it when its engines are ready. If anything fails, nothing stays of it."""
        if self.catalogue is None:
            raise PenstockError("this server cannot load models at run time")
        model = await self.catalogue.add(description, self._check_room)
        units: list[Unit] = []
        try:
            units = [self._make(model.name, number) for number in range(model.replicas)]
            await self._start(units)
            self._units[model.name] = units
            self._changed()
            if self.unserved is not None and (problem := await self.unserved(model.name, self._changes)):
                raise PenstockError(f"the gateways cannot serve it: {problem}")
            await asyncio.to_thread(self._saved.add, description, model.name)
        except BaseException:
            self.catalogue.remove(model.name)
            if self._units.pop(model.name, None) is not None:
                self._changed()
            await asyncio.gather(*(self._supervisor.dismiss(unit) for unit in units), return_exceptions=True)
            raise

    async def saved_descriptions(self) -> list[dict[str, Any]]:
        """Descriptions of the models that an earlier run had loaded; waits until everything else is up."""
        if self._saved.models:
            await self._supervisor.announced.wait()
        return self._saved.models

    async def unload(self, model: str) -> None:
        units = self._of(model)
        if len(self._units) == 1:
            raise PenstockError(f"`{model}` is the only model of this server; stop the server instead")
        del self._units[model]
        if self.catalogue is not None:
            self.catalogue.remove(model)
        await asyncio.to_thread(self._saved.remove, model)
        self._changed()
        await asyncio.gather(*(self._supervisor.dismiss(unit) for unit in units))

    async def scale(self, model: str, count: int) -> None:
        units = self._of(model)
        if not 1 <= count <= MOST:
            raise PenstockError(f"a model has 1 to {MOST} replicas, not {count}")
        self._check_room(count - len(units))
        if count > len(units):
            await self._grow(model, units, count)
        elif count < len(units):
            leaving = units[count:]
            del units[count:]
            self._changed()
            await asyncio.gather(*(self._supervisor.dismiss(unit) for unit in leaving))

    async def restart(self, model: str, replica: str = "") -> None:
        """Restarts one replica or all, one after the other; stops at the first that fails to start."""
        for unit in [self._one(model, replica)] if replica else list(self._of(model)):
            await self._supervisor.renew(unit)
            await asyncio.sleep(FOUND_S)

    async def drain(self, model: str, replica: str) -> None:
        unit = self._one(model, replica)
        if all(other.paused for other in self._of(model) if other is not unit):
            raise PenstockError(f"`{replica}` is the only running replica of `{model}`; stop the server instead")
        await self._supervisor.pause(unit)

    def stop(self) -> None:
        self._supervisor.stop()

    def _check_room(self, more: int) -> None:
        running = sum(map(len, self._units.values()))
        if running + more > self._max_engines:
            raise PenstockError(
                f"{running} engine processes are running and {more} more would exceed server.max_engines "
                f"({self._max_engines})"
            )

    async def _grow(self, model: str, units: list[Unit], count: int) -> None:
        taken = {unit.replica for unit in units}
        numbers = [number for number in range(MOST) if str(number) not in taken][: count - len(units)]
        fresh = [self._make(model, number) for number in numbers]
        units += fresh
        self._changed()
        try:
            await self._start(fresh)
        except BaseException:
            for unit in fresh:
                if unit.dismissed:
                    units.remove(unit)
            self._changed()
            raise

    async def _start(self, units: Iterable[Unit]) -> None:
        """Starts engines; raises the first failure when all have started or failed."""
        results = await asyncio.gather(*(self._supervisor.add(unit) for unit in units), return_exceptions=True)
        for result in results:
            if isinstance(result, BaseException):
                raise result

    def _of(self, model: str) -> list[Unit]:
        if model not in self._units:
            raise PenstockError(f"no engine of this server serves `{model}`")
        return self._units[model]

    def _one(self, model: str, replica: str) -> Unit:
        units = self._of(model)
        for unit in units:
            if unit.replica == replica:
                return unit
        raise PenstockError(
            f"`{model}` has no replica `{replica}`; there are {', '.join(unit.replica for unit in units)}"
        )

    def _changed(self) -> None:
        self._changes += 1
        if self.on_change is not None:
            self.on_change(self.topology())
