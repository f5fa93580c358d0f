"""Changes models and replicas while the server runs: load and unload, scale, restart, drain, replace.

A replica that is removed drains: it finishes its requests, gateways send it no new ones, and requests that do not
finish in time move to other replicas. Operations run one at a time (`ControlServer` ensures it), except `adjust` and
`replace`, which change the list of replicas at once and leave starting and draining to tasks of their own: a scale-up
must not wait until another model has started.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from typing import Any

from penstock.config.variants import Variant
from penstock.errors import PenstockError
from penstock.protocol.control import Replica, Topology
from penstock.supervisor.catalogue import ModelCatalogue
from penstock.supervisor.replica_list import MOST, Make, ReplicaList
from penstock.supervisor.saved_models import SavedModels
from penstock.supervisor.supervisor import Supervisor
from penstock.supervisor.unit import Unit

FOUND_S = 1.0
"""How long gateways take to reconnect to a restarted engine."""
ROOM_S = 0.1
"""How often to check whether a replica that drained has made room."""
NOTICE_MARGIN_S = 5.0
"""How long before the end of a notice the replica must have drained."""

log = logging.getLogger("penstock.supervisor")


class Replicas(ReplicaList):
    """The engines of one supervisor, by model, and what can be done with them."""

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
        super().__init__(supervisor, units, make, catalogue, max_engines, others, describe)
        self._saved = saved or SavedModels(None)
        self.unserved: Callable[[str, int], Awaitable[str]] | None = None
        """Asks all gateways, once they know a topology, why they cannot serve a model; empty: they can."""

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

    async def take_on(self, description: Mapping[str, Any]) -> None:
        """Fetches a model, so that `adjust` can start replicas of it."""
        if self.catalogue is None:
            raise PenstockError("this machine cannot load models at run time")
        model = await self.catalogue.add(description, lambda more: None)
        self.know(model.name)

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

    async def announced(self) -> None:
        """Waits until everything that the server starts with is up."""
        await self._supervisor.announced.wait()

    async def saved_descriptions(self) -> list[dict[str, Any]]:
        """Descriptions of the models that an earlier run had loaded; waits until everything else is up."""
        if self._saved.models:
            await self.announced()
        return self._saved.models

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

    async def _start(self, units: Iterable[Unit]) -> None:
        """Starts engines; raises the first failure when all have started or failed."""
        results = await asyncio.gather(*(self._supervisor.add(unit) for unit in units), return_exceptions=True)
        for result in results:
            if isinstance(result, BaseException):
                raise result


def _cheapest(serving: Sequence[Unit], count: int) -> list[Unit]:
    """Those to remove first: which do not serve yet cost no request; then the newest, as with `scale`."""
    by_cost = sorted(serving, key=lambda unit: (unit.up.is_set(), -int(unit.replica)))
    return by_cost[: max(count, 0)]
