"""Which models there are and how many engines serve each: more, fewer, or all of them anew, while the server runs.

A replica that has to go drains by itself: it finishes what it runs, gateways send it nothing new, and what it cannot
finish in time goes on elsewhere. Operations come one at a time (`Control` sees to that).
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from penstock.errors import PenstockError
from penstock.protocol.control import Replica, Topology
from penstock.supervisor.catalogue import ModelCatalogue
from penstock.supervisor.saved_models import SavedModels
from penstock.supervisor.supervisor import Supervisor
from penstock.supervisor.unit import Unit

FOUND_S = 1.0
"""How long gateways take to find an engine that listens again."""
MOST = 256


class Replicas:
    """The engines of one supervisor, by model."""

    def __init__(
        self,
        supervisor: Supervisor,
        units: Iterable[Unit],
        make: Callable[[str, int], Unit],
        catalogue: ModelCatalogue | None = None,
        kept: SavedModels | None = None,
    ) -> None:
        """`make`: a further replica of a model, with this number. `catalogue`: knows models that come later. `kept`:
        remembers them for the next start."""
        self._supervisor = supervisor
        self._make = make
        self.catalogue = catalogue
        self._kept = kept or SavedModels(None)
        self._units: dict[str, list[Unit]] = {}
        for unit in units:
            if unit.replica:
                self._units.setdefault(unit.model, []).append(unit)
        self.on_change: Callable[[Topology], None] | None = None

    def topology(self) -> Topology:
        return Topology(
            {model: [Replica(unit.replica, unit.endpoint) for unit in units] for model, units in self._units.items()},
            {} if self.catalogue is None else self.catalogue.loaded,
        )

    async def load(self, described: Mapping[str, Any]) -> None:
        """Serve one more model; gateways hear of it when its engines are ready."""
        if self.catalogue is None:
            raise PenstockError("this server cannot load models")
        model = await self.catalogue.add(described)
        units = [self._make(model.name, number) for number in range(model.replicas)]
        results = await asyncio.gather(*(self._supervisor.add(unit) for unit in units), return_exceptions=True)
        problem = next((result for result in results if isinstance(result, BaseException)), None)
        if problem is not None:
            self.catalogue.remove(model.name)
            await asyncio.gather(*(self._supervisor.dismiss(unit) for unit in units if not unit.dismissed))
            raise problem
        self._units[model.name] = units
        await asyncio.to_thread(self._kept.add, described, model.name)
        self._changed()

    async def remembered(self) -> list[dict[str, Any]]:
        """The models that an earlier run had loaded, described, once everything else is up."""
        if self._kept.models:
            await self._supervisor.announced.wait()
        return self._kept.models

    async def unload(self, model: str) -> None:
        units = self._of(model)
        if len(self._units) == 1:
            raise PenstockError(f"`{model}` is the only model here; stop the server instead")
        del self._units[model]
        if self.catalogue is not None:
            self.catalogue.remove(model)
        await asyncio.to_thread(self._kept.remove, model)
        self._changed()
        await asyncio.gather(*(self._supervisor.dismiss(unit) for unit in units))

    async def scale(self, model: str, count: int) -> None:
        units = self._of(model)
        if not 1 <= count <= MOST:
            raise PenstockError(f"a model has 1 to {MOST} replicas, not {count}")
        if count > len(units):
            await self._grow(model, units, count)
        elif count < len(units):
            leaving = units[count:]
            del units[count:]
            self._changed()
            await asyncio.gather(*(self._supervisor.dismiss(unit) for unit in leaving))

    async def restart(self, model: str, replica: str = "") -> None:
        """One after the other; stops at the first that does not come back."""
        for unit in [self._one(model, replica)] if replica else list(self._of(model)):
            await self._supervisor.renew(unit)
            await asyncio.sleep(FOUND_S)

    async def drain(self, model: str, replica: str) -> None:
        unit = self._one(model, replica)
        if all(other.paused for other in self._of(model) if other is not unit):
            raise PenstockError(f"`{replica}` is the only replica of `{model}` that runs; stop the server instead")
        await self._supervisor.pause(unit)

    def stop(self) -> None:
        self._supervisor.stop()

    async def _grow(self, model: str, units: list[Unit], count: int) -> None:
        taken = {unit.replica for unit in units}
        numbers = [number for number in range(MOST) if str(number) not in taken][: count - len(units)]
        fresh = [self._make(model, number) for number in numbers]
        units += fresh
        self._changed()
        try:
            await asyncio.gather(*(self._supervisor.add(unit) for unit in fresh))
        except PenstockError:
            for unit in fresh:
                if unit.dismissed:
                    units.remove(unit)
            self._changed()
            raise

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
        if self.on_change is not None:
            self.on_change(self.topology())
