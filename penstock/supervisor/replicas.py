"""Changes models and replicas while the server runs: load and unload, scale, restart, drain, replace.

A replica that is removed drains: it finishes its requests, gateways send it no new ones, and requests that do not
finish in time move to other replicas. Operations run one at a time (`ControlServer` ensures it), except `adjust` and
`replace`, which change the list of replicas at once and leave starting and draining to tasks of their own: a scale-up
must not wait until another model has started.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Mapping, Sequence
from contextlib import suppress
from typing import Any, Protocol

from penstock.config.variants import Variant
from penstock.errors import PenstockError
from penstock.protocol.control import Replica, Topology
from penstock.supervisor.catalogue import ModelCatalogue
from penstock.supervisor.saved_models import SavedModels
from penstock.supervisor.supervisor import Supervisor
from penstock.supervisor.unit import Unit

FOUND_S = 1.0
"""How long gateways take to reconnect to a restarted engine."""
MOST = 256
ROOM_S = 0.1
"""How often to check whether a replica that drained has made room."""
NOTICE_MARGIN_S = 5.0
"""How long before the end of a notice the replica must have drained."""

log = logging.getLogger("penstock.supervisor")


class Make(Protocol):
    """Builds replica number `index` of a model, of the variant that this number has, or of another."""

    def __call__(self, name: str, index: int, variant: Variant | None = None, /) -> Unit: ...


class Replicas:
    """The engines of one supervisor, by model."""

    def __init__(
        self,
        supervisor: Supervisor,
        units: Iterable[Unit],
        make: Make,
        catalogue: ModelCatalogue | None = None,
        saved: SavedModels | None = None,
        max_engines: int = MOST,
        others: Callable[[], Topology] | None = None,
        describe: Callable[[Unit], Replica] | None = None,
    ) -> None:
        """`make`: builds replicas. `catalogue`: models loaded at run time. `saved`: the file that
        keeps them for the next start. `max_engines`: maximum of engines, all models together. `others`: replicas on
        other machines, which gateways use too; `describe`: how gateways reach one of this machine."""
        self._others = others or (lambda: Topology({}))
        self._describe = describe or self._here
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

    @property
    def units(self) -> list[tuple[Unit, bool]]:
        """All replicas, and whether each is on its way out."""
        staying = [(unit, unit.noticed) for units in self._units.values() for unit in units]
        return staying + [(unit, True) for unit in self._leaving]

    @property
    def models(self) -> list[str]:
        return list(self._units)

    def know(self, model: str) -> None:
        """A model of the catalogue which has no replica here yet."""
        if model not in self._units:
            self._units[model] = []
            self._changed()

    def forget(self, model: str) -> None:
        """A model that has no replica here, and shall have none."""
        if not self._units.get(model):
            self._units.pop(model, None)
            if self.catalogue is not None:
                self.catalogue.remove(model)
            self._changed()

    async def take_on(self, description: Mapping[str, Any]) -> None:
        """Fetches a model, so that `adjust` can start replicas of it."""
        if self.catalogue is None:
            raise PenstockError("this machine cannot load models at run time")
        model = await self.catalogue.add(description, lambda more: None)
        self.know(model.name)

    def moved(self) -> None:
        """A replica listens at another endpoint now."""
        self._changed()

    async def load(self, description: Mapping[str, Any]) -> None:
        """Loads a model; gateways learn of it when its engines are ready. If anything fails, nothing stays of it."""
        if self.catalogue is None:
            raise PenstockError("this server cannot load models at run time")
        model = await self.catalogue.add(description, self._check_room)
        units: list[Unit] = []
        try:
            units = [self._make(model.name, number) for number in range(model.first_replicas)]
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

    async def announced(self) -> None:
        """Waits until everything that the server starts with is up."""
        await self._supervisor.announced.wait()

    async def saved_descriptions(self) -> list[dict[str, Any]]:
        """Descriptions of the models that an earlier run had loaded; waits until everything else is up."""
        if self._saved.models:
            await self.announced()
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

    async def scale(self, model: str, count: int, pool: str = "") -> None:
        """Sets the number of replicas of a model, or of one of its pools."""
        units = self._of(model)
        pools = [] if self.catalogue is None else self.catalogue.pools(model)
        if pool and not pools:
            raise PenstockError(f"`{model}` has no pools")
        if pools and pool not in pools:
            raise PenstockError(f"`{model}` has the pools {', '.join(pools)}; say which one with --pool NAME")
        if not 1 <= count <= MOST:
            raise PenstockError(f"a model has 1 to {MOST} replicas, not {count}")
        present = [unit for unit in units if unit.pool == pool]
        self._check_room(count - len(present))
        if count > len(present):
            await self._grow(model, units, count - len(present), pool)
        elif count < len(present):
            leaving = present[count:]
            for unit in leaving:
                units.remove(unit)
            self._changed()
            await asyncio.gather(*(self._supervisor.dismiss(unit) for unit in leaving))

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

    def adjust(self, model: str, count: int, pool: str = "") -> None:
        """Starts or drains replicas of a model or pool until `count` are there or on their way; returns at once. Starts
        no more than there is room for."""
        serving = self.serving(model, pool)
        more = min(count - len(serving), self.room)
        if more > 0:
            self._add(model, more, *self._missing(model, pool, more))
        else:
            self._remove(_cheapest(serving, len(serving) - count))

    def settle(self, model: str, wanted: Mapping[Variant, int]) -> None:
        """Like `adjust`, for each variant of a model's replicas; those that are not wanted go first."""
        serving, there = self.serving(model), self.present(model)
        for variant in there:
            surplus = there[variant] - wanted.get(variant, 0)
            self._remove(_cheapest([unit for unit in serving if unit.variant == variant], surplus))
        for variant, count in wanted.items():
            for _ in range(min(count - there[variant], self.room)):
                self._add(model, 1, variant)

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

    def supersede(self, unit: Unit) -> None:
        """Replaces a replica by one with the settings of now; returns at once. The new one starts first where there is
        room, and the old one drains when it is ready. Without room the old one drains first. If the new one cannot
        start, the old one goes on."""
        unit.superseded = True
        self._begin(self._supersede(unit), f"replace {unit.name}")

    async def _supersede(self, unit: Unit) -> None:
        fresh: Unit | None = None
        try:
            if self.room:
                with suppress(PenstockError):  # no free device: the old one makes room
                    fresh = self._prepare(unit)
            if fresh is None:
                unit.gave_way_to = self.revision(unit)
                await self._supervisor.pause(unit)
                fresh = self._prepare(unit)
            await self._supervisor.add(fresh)
        except PenstockError as problem:
            await self._keep(unit, fresh, str(problem))
        else:
            if unit in self._units.get(unit.model, ()):
                self._remove([unit])

    def _prepare(self, old: Unit) -> Unit:
        (fresh,) = self._fresh(old.model, self._of(old.model), 1, old.variant)
        self._of(old.model).append(fresh)
        old.successor = fresh
        self._changed()
        return fresh

    async def _keep(self, unit: Unit, fresh: Unit | None, problem: str) -> None:
        """Its replacement could not start."""
        units = self._units.get(unit.model, [])
        unit.successor = None
        if fresh is not None and fresh in units:
            units.remove(fresh)
            self._changed()
        if self.stopping or unit not in units:
            return
        log.error("a replica of %r could not be replaced; the old one stays: %s", unit.model, problem)
        if self.on_start_failed is not None:
            self.on_start_failed(unit.model, unit.variant, f"with its new settings: {problem}")
        try:
            if unit.paused:
                await self._supervisor.renew(unit)
        except PenstockError as error:
            log.error("%s could not be started again: %s", unit.name, error)
        finally:
            unit.superseded = False

    def replace(self, model: str, replica: str, within_s: float, *, refill: bool = True) -> None:
        """Starts a replacement for a replica (empty: for each) whose machine goes away after `within_s`, and drains it
        once the replacement is ready or time runs short; returns at once. `refill`: what there is no room for is
        started as soon as there is."""
        noticed = [unit for unit in ([self._one(model, replica)] if replica else self._of(model)) if not unit.noticed]
        for unit in noticed:
            unit.noticed = True
        fresh: list[Unit] = []
        for unit in noticed[: self.room]:
            fresh += self._add(model, 1, unit.variant)
        if len(fresh) < len(noticed):
            log.warning("no room for the replacement of %d replicas of %r", len(noticed) - len(fresh), model)
        patience = max(within_s - self._supervisor.drain_s - NOTICE_MARGIN_S, 0.0)
        missing = [unit.variant for unit in noticed[len(fresh) :]] if refill else []
        self._begin(self._take_over(model, noticed, fresh, patience, missing), f"replace {model}")

    async def _take_over(
        self, model: str, noticed: list[Unit], fresh: list[Unit], patience: float, missing: list[Variant]
    ) -> None:
        """`missing`: further replacements, for which there was no room."""
        ups = [asyncio.create_task(unit.up.wait(), name=unit.name) for unit in fresh]
        try:
            if ups:
                await asyncio.wait(ups, timeout=patience)
        finally:
            for up in ups:
                up.cancel()
            await asyncio.gather(*ups, return_exceptions=True)
        self._remove([unit for unit in noticed if unit in self._units.get(model, ())])
        while missing and not self.stopping and model in self._units:
            while missing and self.room:
                self._add(model, 1, missing.pop())
            await asyncio.sleep(ROOM_S)

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

    async def restart(self, model: str, replica: str = "") -> None:
        """Restarts one replica or all, one after the other; stops at the first that fails to start."""
        for unit in [self._one(model, replica)] if replica else list(self._of(model)):
            if unit not in self._of(model):
                continue  # scaled down in the meantime
            await self._supervisor.renew(unit)
            await asyncio.sleep(FOUND_S)

    async def drain(self, model: str, replica: str, *, last: bool = False) -> None:
        """`last`: also the last running replica here, because others run on other machines."""
        unit = self._one(model, replica)
        if not last and all(other.paused for other in self._of(model) if other is not unit):
            raise PenstockError(f"`{replica}` is the only running replica of `{model}`; stop the server instead")
        await self._supervisor.pause(unit)

    async def leave(self, machine: str, seconds: float | None) -> None:
        raise PenstockError("this server is not part of a fleet; `penstock drain` without --machine stops it")

    def stop(self) -> None:
        self._supervisor.stop()

    def _check_room(self, more: int) -> None:
        running = self._running
        if running + more > self._max_engines:
            raise PenstockError(
                f"{running} engine processes are running and {more} more would exceed server.max_engines "
                f"({self._max_engines})"
            )

    async def _grow(self, model: str, units: list[Unit], more: int, pool: str) -> None:
        fresh = self._fresh(model, units, more, *self._missing(model, pool, more))
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


def _cheapest(serving: Sequence[Unit], count: int) -> list[Unit]:
    """Those to remove first: which do not serve yet cost no request; then the newest, as with `scale`."""
    by_cost = sorted(serving, key=lambda unit: (unit.up.is_set(), -int(unit.replica)))
    return by_cost[: max(count, 0)]
