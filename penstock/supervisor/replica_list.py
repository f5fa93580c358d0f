"""The replicas of a supervisor, by model: which there are, which serve, and which are on their way in or out.

Invariant: a change of the list is known to gateways at once (`on_change`); starting and draining are left to tasks. A
replica that leaves keeps its number and its endpoint until it has drained.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Callable, Coroutine, Iterable
from typing import Any, Protocol

from penstock.config.variants import Variant
from penstock.errors import PenstockError
from penstock.protocol.control import Replica, Topology
from penstock.supervisor.catalogue import ModelCatalogue
from penstock.supervisor.supervisor import Supervisor
from penstock.supervisor.unit import Unit

MOST = 256
"""Replicas of one model."""

log = logging.getLogger("penstock.supervisor")


class Make(Protocol):
    """Builds replica number `index` of a model, of the variant that this number has, or of another."""

    def __call__(self, name: str, index: int, variant: Variant | None = None, /) -> Unit: ...


class ReplicaList:
    """All replicas of one supervisor. `Replicas` has what administrators and fleets do with them."""

    def __init__(
        self,
        supervisor: Supervisor,
        units: Iterable[Unit],
        make: Make,
        catalogue: ModelCatalogue | None,
        max_engines: int,
        others: Callable[[], Topology] | None,
        describe: Callable[[Unit], Replica] | None,
    ) -> None:
        """See `Replicas`."""
        self._supervisor = supervisor
        self._make = make
        self.catalogue = catalogue
        self._max_engines = max_engines
        self._others = others or (lambda: Topology({}))
        self._describe = describe or self._here
        self._units: dict[str, list[Unit]] = {}
        for unit in units:
            if unit.replica:
                self._units.setdefault(unit.model, []).append(unit)
        self.on_change: Callable[[Topology], None] | None = None
        self.on_start_failed: Callable[[str, Variant, str], None] | None = None
        """Called with the model and the problem when a replica that was asked for cannot start."""
        self._changes = 0
        self._leaving: list[Unit] = []
        """Replicas that a task drains; their endpoints are still in use."""
        self._tasks: set[asyncio.Task[None]] = set()

    async def close(self) -> None:
        """Ends the tasks of `adjust` and `replace`; the supervisor stops their processes."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    @property
    def stopping(self) -> bool:
        return self._supervisor.stopping

    def topology(self) -> Topology:
        others = self._others()
        models = {
            model: [self._describe(unit) for unit in units if unit.endpoint] for model, units in self._units.items()
        }
        for model, replicas in others.models.items():
            models[model] = [*models.get(model, ()), *replicas]
        loaded = {} if self.catalogue is None else self.catalogue.loaded
        # A fleet also says what only gateways read.
        loaded = loaded | others.loaded
        return Topology(models, loaded, self._changes, others.encoders, others.loaded_encoders)

    def _here(self, unit: Unit) -> Replica:
        region, zone = ("", "") if self.catalogue is None else self.catalogue.place
        return Replica(unit.replica, unit.endpoint, pool=unit.pool, region=region, zone=zone)

    def others_changed(self) -> None:
        """Replicas on other machines came or went."""
        self._changed()

    def moved(self) -> None:
        """A replica listens at another endpoint now."""
        self._changed()

    @property
    def units(self) -> list[tuple[Unit, bool]]:
        """All replicas, and whether each is on its way out."""
        staying = [(unit, unit.noticed) for units in self._units.values() for unit in units]
        return staying + [(unit, True) for unit in self._leaving]

    @property
    def models(self) -> list[str]:
        return list(self._units)

    def serving(self, model: str, pool: str = "") -> list[Unit]:
        """The replicas that take requests or start; none for a model that is gone. `pool`: only those of one."""
        found = [unit for unit in self._units.get(model, ()) if not (unit.paused or unit.noticed or unit.superseded)]
        return [unit for unit in found if not pool or unit.pool == pool]

    def leaving(self, model: str, pool: str = "") -> int:
        """How many replicas finish their requests and stop."""
        noticed = [unit for unit in self._units.get(model, ()) if unit.noticed]
        found = [*noticed, *(unit for unit in self._leaving if unit.model == model)]
        return sum(not pool or unit.pool == pool for unit in found)

    @property
    def room(self) -> int:
        """How many more engines may run."""
        return max(self._max_engines - self._running, 0)

    def present(self, model: str) -> Counter[Variant]:
        """How many replicas serve or will. One that is being replaced and its successor are one."""
        replaced = [unit for unit in self._units.get(model, ()) if unit.superseded and unit.successor is None]
        return Counter(unit.variant for unit in [*self.serving(model), *replaced])

    def stale(self, model: str) -> list[Unit]:
        """Replicas that were started with other settings than the model has now."""
        return [unit for unit in self.serving(model) if not self.is_current(unit)]

    def is_current(self, unit: Unit) -> bool:
        """Whether a replica has the settings of now."""
        return unit.revision == self.revision(unit)

    def revision(self, unit: Unit) -> str:
        """Of the settings that the replica would get now."""
        return self._catalogue().revision(unit.model, unit.pool)

    def whole_revision(self, model: str) -> str:
        return self._catalogue().whole_revision(model)

    @property
    def renewing(self) -> set[str]:
        """Models of which a replica is being replaced by one with newer settings."""
        return {unit.model for units in self._units.values() for unit in units if unit.superseded}

    def _add(self, model: str, count: int, *variants: Variant) -> list[Unit]:
        """Adds replicas, whose start a task waits for. `variants`: if not those of their numbers."""
        if count <= 0:
            return []
        units = self._of(model)
        fresh = self._fresh(model, units, count, *variants)
        units += fresh
        self._changed()
        for unit in fresh:
            self._begin(self._bring_up(unit), f"start {unit.name}")
        return fresh

    async def _bring_up(self, unit: Unit) -> None:
        try:
            await self._supervisor.add(unit)
        except PenstockError as problem:
            units = self._units.get(unit.model, [])
            if unit not in units or self.stopping:
                return  # it was removed while it started
            units.remove(unit)
            self._changed()
            log.error("a replica of %r could not be started: %s", unit.model, problem)
            if self.on_start_failed is not None:
                self.on_start_failed(unit.model, unit.variant, str(problem))

    def _remove(self, leaving: list[Unit]) -> None:
        """Removes replicas, which a task drains."""
        for unit in leaving:
            self._units[unit.model].remove(unit)
        self._leaving += leaving
        if leaving:
            self._changed()
        for unit in leaving:
            self._begin(self._dismiss(unit), f"drain {unit.name}")

    async def _dismiss(self, unit: Unit) -> None:
        try:
            await self._supervisor.dismiss(unit)
        finally:
            self._leaving.remove(unit)

    def _begin(self, work: Coroutine[Any, Any, None], name: str) -> None:
        task = asyncio.create_task(work, name=name)
        self._tasks.add(task)
        task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            log.error("%s failed", task.get_name(), exc_info=error)

    @property
    def _running(self) -> int:
        return sum(map(len, self._units.values())) + len(self._leaving)

    def _missing(self, model: str, pool: str, more: int) -> list[Variant]:
        """The variants of further replicas of a pool; none without pools: their numbers say."""
        if not pool:
            return []
        present = [unit.variant for unit in self._of(model) if unit.pool == pool]
        return self._catalogue().missing(model, pool, present, more)

    def _catalogue(self) -> ModelCatalogue:
        assert self.catalogue is not None, "only a catalogue knows settings"
        return self.catalogue

    def _fresh(self, model: str, units: list[Unit], count: int, *variants: Variant) -> list[Unit]:
        """New replicas with the lowest free numbers, and these variants if there are any."""
        taken = {unit.replica for unit in [*units, *self._leaving] if unit.model == model}
        numbers = [number for number in range(2 * MOST) if str(number) not in taken][:count]
        if variants:
            return [self._make(model, number, one) for number, one in zip(numbers, variants, strict=True)]
        return [self._make(model, number) for number in numbers]

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
