"""Operations on a fleet, from any of its processes: they change what the registry says is wanted, or go as a command to
the machine that owns a replica, and return when the fleet has followed."""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import Callable, Collection, Mapping
from typing import Any, Literal

import msgspec

from penstock.config import ModelConfig
from penstock.config.load import check_model
from penstock.config.variants import revision
from penstock.errors import PenstockError
from penstock.fleet.membership import engine_model, engine_settings
from penstock.fleet.needs import Ask, asks, limited
from penstock.fleet.records import CommandRecord, EngineRecord, ModelRecord, PoolWish
from penstock.fleet.registry import Fleet, Registry
from penstock.fleet.view import FleetView
from penstock.protocol.control import (
    Drain,
    Leave,
    LoadModel,
    Notice,
    Operation,
    Restart,
    Scale,
    SetLimits,
    Stop,
    UnloadModel,
    scaled_name,
)
from penstock.protocol.errors import InvalidRequest, sentence
from penstock.supervisor.autoscaler import Target, not_scaled

PATIENCE_S = 3600.0
"""How long the fleet may take: a machine may have to download the model."""
UNHEARD_S = 30.0
"""How long nobody may be controller."""
FOUND_S = 1.0
"""How long gateways take to reconnect to a restarted engine."""


class FleetOperations:
    """Carries out operations; `stop` is called to stop the server that was asked."""

    def __init__(
        self,
        registry: Registry,
        view: FleetView,
        stop: Callable[[], None] = lambda: None,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._registry = registry
        self._view = view
        self._stop = stop
        self._clock = clock

    async def ask(self, operation: Callable[[int], Operation]) -> None:
        """For a gateway without a supervisor: have an operation carried out, as `SupervisorLink.ask` does."""
        try:
            match operation(0):
                case Scale(_, model, count, pool):
                    await self.scale(model, count, pool)
                case Restart(_, model, replica):
                    await self.restart(model, replica)
                case Drain(_, model, replica):
                    await self.drain(model, replica)
                case Notice(_, model, replica, seconds):
                    self.replace(model, replica, seconds)
                case SetLimits(_, model, minimum, maximum, pool):
                    await self.set_limits(model, minimum, maximum, pool)
                case LoadModel(_, description):
                    await self.load(description)
                case UnloadModel(_, model):
                    await self.unload(model)
                case Leave(_, machine, seconds):
                    await self.leave(machine, seconds)
                case Stop():
                    raise PenstockError("this gateway has no supervisor; stop its process")
        except PenstockError as error:
            raise InvalidRequest(sentence(error)) from error

    async def scale(self, model: str, count: int, pool: str = "") -> None:
        record = self._model(model)
        config = engine_model(record.description)
        found = chosen(asks(record, config), model, pool)
        if found.autoscale is not None:
            which = f"{model} --pool {pool}" if pool else model
            raise PenstockError(
                f"`{model}` is scaled automatically; `penstock autoscale {which} --min N --max N` changes its limits"
            )
        if config.time_slice:
            raise PenstockError(f"`{model}` takes turns (time_slice): it has one replica")
        await self._registry.publish(with_replicas(record, config, count, pool))
        total = sum(ask.replicas for ask in asks(record, config)) - found.replicas + count
        await self._follows(model, total)

    async def restart(self, model: str, replica: str = "") -> None:
        """One replica or all, one after the other; stops at the first that fails."""
        chosen = self._chosen(model, replica)
        for machine, number in chosen:
            await self._command(machine, "restart", model, number)
            await asyncio.sleep(FOUND_S)

    async def drain(self, model: str, replica: str) -> None:
        ((machine, number),) = self._chosen(model, replica)
        others = [one for one in self._engines(model) if (one.machine, one.replica) != (machine, number)]
        if not any(one.state == "ready" for one in others):
            raise PenstockError(f"`{replica}` is the only running replica of `{model}`; scale it up first")
        await self._command(machine, "drain", model, number)

    def replace(self, model: str, replica: str, within_s: float, *, refill: bool = True) -> None:
        raise PenstockError(
            "in a fleet it is a machine that goes away: `penstock drain --machine NAME --notice SECONDS` has its "
            "replicas started elsewhere first"
        )

    async def load(self, description: Mapping[str, Any]) -> None:
        model = check_model(description, fleet=True)
        if model.time_slice:
            raise PenstockError("a model with time_slice cannot be loaded at run time; use memory_share instead")
        if model.name in self._view.fleet.models:
            raise PenstockError(f"the fleet serves `{model.name}` already")
        if not self._view.fleet.machines:
            raise PenstockError("the fleet has no machine; `penstock join` adds one")
        record = ModelRecord(
            name=model.name, description={**description, "name": model.name}, replicas=model.first_replicas
        )
        await self._registry.publish(record)
        try:
            await self._follows(model.name, model.first_replicas)
        except BaseException:
            await self._remove(record)
            raise

    async def unload(self, model: str) -> None:
        record = self._model(model)
        if len(self._view.fleet.models) == 1:
            raise PenstockError(f"`{model}` is the only model of this fleet; stop its machines instead")
        await self._remove(record)

    async def set_limits(self, model: str, minimum: int | None, maximum: int | None, pool: str = "") -> None:
        await self._registry.publish(with_limits(self._model(model), minimum, maximum, pool))

    async def leave(self, machine: str, seconds: float | None) -> None:
        """Has a machine leave the fleet."""
        if machine not in self._view.fleet.machines:
            raise PenstockError(f"the fleet has no machine `{machine}`; there are {_list(self._view.fleet.machines)}")
        await self._command(machine, "leave", seconds=seconds)

    def stop(self) -> None:
        self._stop()

    async def _remove(self, record: ModelRecord) -> None:
        """Has all its replicas drained, then forgets it."""
        await self._registry.publish(msgspec.structs.replace(record, replicas=0))
        await self._view.wait_for(lambda fleet: not _of(fleet, record.name), PATIENCE_S)
        await self._registry.withdraw(record)

    async def _follows(self, model: str, count: int) -> None:
        """Waits until that many replicas are ready and no others run; raises when that cannot be."""

        def done(fleet: Fleet) -> bool:
            states = [engine.state for engine in _of(fleet, model)]
            return states.count("ready") == count == len(states)

        def over(fleet: Fleet) -> bool:
            return done(fleet) or bool(_problem(fleet, model, count))

        left = PATIENCE_S
        while not await self._view.wait_for(over, UNHEARD_S):
            left -= UNHEARD_S
            if not self._view.fleet.controller:
                raise PenstockError("the fleet has no controller at the moment; the change is made when it has one")
            if left <= 0:
                raise PenstockError(f"`{model}` does not have {count} ready replicas yet; see `penstock fleet status`")
        if not done(self._view.fleet) and (problem := _problem(self._view.fleet, model, count)):
            raise PenstockError(problem)

    async def _command(
        self,
        machine: str,
        verb: Literal["restart", "drain", "leave"],
        model: str = "",
        replica: str = "",
        seconds: float | None = None,
    ) -> None:
        command = CommandRecord(
            id=uuid.uuid4().hex,
            machine=machine,
            verb=verb,
            model=model,
            replica=replica,
            seconds=seconds,
            at=self._clock(),
        )
        await self._registry.publish(command)
        try:
            answered = await self._view.wait_for(
                lambda fleet: command.id in fleet.outcomes or machine not in fleet.machines, PATIENCE_S
            )
            outcome = self._view.fleet.outcomes.get(command.id)
            if outcome is None and verb != "leave":
                why = "did not answer" if not answered else "was lost meanwhile"
                raise PenstockError(f"machine `{machine}` {why}")
            if outcome is not None and outcome.error:
                raise PenstockError(outcome.error)
        finally:
            await self._registry.withdraw(command)

    def _model(self, name: str) -> ModelRecord:
        record = self._view.fleet.models.get(name)
        if record is None:
            raise PenstockError(f"the fleet does not serve `{name}`; it serves {_list(self._view.fleet.models)}")
        return record

    def _engines(self, model: str) -> list[EngineRecord]:
        return _of(self._view.fleet, model)

    def _chosen(self, model: str, replica: str) -> list[tuple[str, str]]:
        """Machines and numbers of replicas; `replica` is MACHINE.NUMBER, or empty for all."""
        if not replica:
            self._model(model)
            return sorted((one.machine, one.replica) for one in self._engines(model))
        machine, _, number = replica.rpartition(".")
        if f"{machine}/{model}/{number}" in self._view.fleet.engines and machine not in self._view.fleet.machines:
            raise PenstockError(f"`{replica}` was started by hand (`penstock engine`); do that where it runs")
        if machine not in self._view.fleet.machines:
            names = [f"{one.machine}.{one.replica}" for one in self._engines(model)]
            raise PenstockError(f"`{model}` has no replica `{replica}`; there are {_list(sorted(names))}")
        return [(machine, number)]


async def settled(view: FleetView, records: Collection[ModelRecord], tell: Callable[[str], None]) -> None:
    """Waits until these models run as they were published; tells how far that is. Raises when some replicas cannot be
    started."""
    told: dict[str, str] = {}
    models = [record.name for record in records]

    def over(fleet: Fleet) -> bool:
        return all(_runs(fleet, record) for record in records)

    while not await view.wait_for(over, 1.0):
        decision = view.fleet.decisions.get(view.fleet.controller)
        if decision is None:
            continue
        for name in models:
            line = decision.rollouts.get(name, "") or decision.problems.get(name, "")
            if line and told.get(name) != line:
                told[name] = line
                tell(f"{name}: {line}")
            if "cannot start them" in line or name in decision.problems:
                raise PenstockError(f"`{name}`: {line or decision.problems[name]}")


def _runs(fleet: Fleet, record: ModelRecord) -> bool:
    """Whether a model has all its replicas, and those that the controller may change have the settings of now."""
    known, decision = fleet.models.get(record.name), fleet.decisions.get(fleet.controller)
    if known is None or known.description != record.description or decision is None:
        return False  # it is not heard of yet
    config = engine_model(record.description)
    wanted = asks(known, config)
    count = decision.wanted.get(record.name, 0)
    if count != sum(ask.replicas for ask in wanted) and not any(ask.autoscale for ask in wanted):
        return False
    found = [one for one in _of(fleet, record.name) if one.state != "draining"]
    return sum(one.state == "ready" for one in found) >= count and all(
        one.revision == revision(config, one.pool) for one in found if one.revision
    )


def chosen(found: list[Ask], model: str, pool: str) -> Ask:
    """The pool that is meant, or the whole model without pools."""
    pools = [ask.pool for ask in found if ask.pool]
    if pool and not pools:
        raise PenstockError(f"`{model}` has no pools")
    if pools and pool not in pools:
        raise PenstockError(f"`{model}` has the pools {', '.join(pools)}; say which one with --pool NAME")
    return next(ask for ask in found if ask.pool == pool)


def with_replicas(record: ModelRecord, config: ModelConfig, count: int, pool: str) -> ModelRecord:
    """A model with another number of replicas, of one of its pools if it has some."""
    settings = engine_settings(record.description)
    if not pool:
        check_model({**settings, "replicas": count}, fleet=True)  # roles may need more
        return msgspec.structs.replace(record, replicas=count)
    pools = [{**one, "replicas": count} if one["name"] == pool else one for one in settings["pools"]]
    check_model({**settings, "pools": pools}, fleet=True)
    wish = msgspec.structs.replace(record.pools.get(pool, PoolWish()), replicas=count)
    changed = msgspec.structs.replace(record, pools={**record.pools, pool: wish})
    total = sum(ask.replicas for ask in asks(changed, config))
    return msgspec.structs.replace(changed, replicas=max(total, 1))


def with_limits(record: ModelRecord, minimum: int | None, maximum: int | None, pool: str = "") -> ModelRecord:
    """A model with other limits of automatic scaling."""
    model = engine_model(record.description)
    found = asks(record, model)
    targets = [Target(ask.model, ask.autoscale, ask.pool) for ask in found if ask.autoscale is not None]
    if scaled_name(record.name, pool) not in {target.name for target in targets}:
        raise PenstockError(not_scaled(record.name, pool, targets))
    config = next(one.autoscale for one in model.pools if one.name == pool) if pool else model.autoscale
    assert config is not None
    old = record.pools.get(pool, PoolWish()) if pool else PoolWish(None, record.min, record.max)
    wish = PoolWish(old.replicas, old.min if minimum is None else minimum, old.max if maximum is None else maximum)
    now = limited(config, wish)
    assert now is not None
    if (minimum, maximum) != (None, None) and (now.min, now.max) == (config.min, config.max):
        low = config.min if wish.min is None else wish.min
        high = config.max if wish.max is None else wish.max
        if low > high:
            raise PenstockError(f"min ({low}) must be at most max ({high})")
    if now.min == 0 and config.min > 0:
        raise PenstockError("scale to zero needs min: 0 in the configuration, where gateways also read hold_s")
    if pool:
        return msgspec.structs.replace(record, pools={**record.pools, pool: wish})
    return msgspec.structs.replace(record, min=wish.min, max=wish.max)


def _of(fleet: Fleet, model: str) -> list[EngineRecord]:
    """Its engines on machines; those that were started by hand are nobody's to change."""
    return [one for one in fleet.engines.values() if one.model == model and one.machine in fleet.machines]


def _problem(fleet: Fleet, model: str, count: int) -> str:
    """Why a model cannot have so many replicas, once the controller has considered it."""
    decision = fleet.decisions.get(fleet.controller)
    return "" if decision is None or decision.wanted.get(model) != count else decision.problems.get(model, "")


def _list(names: Any) -> str:
    return ", ".join(f"`{name}`" for name in names) or "none"
