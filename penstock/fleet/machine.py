"""The agent of one machine: runs what the controller assigns to it, and tells the fleet what it runs.

Invariants: without an assignment the machine keeps what it runs, so neither a registry that is away nor one that lost
its data stops an engine. An assignment that cannot be carried out is a problem in the machine's record, for the
controller to act on, and is tried again with a growing delay. A command is carried out once and answered once.

A machine leaves in this order: it says so, and keeps serving until its replicas are replaced or cannot be; then its
engines stop taking requests, finish what they run, and end.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Callable, Collection, Coroutine, Iterable, Mapping
from contextlib import suppress
from typing import Any, Protocol

import msgspec

import penstock
from penstock.config.variants import PLAIN, Variant, slot, whole_revision
from penstock.errors import PenstockError
from penstock.fleet.membership import engine_model, engine_settings
from penstock.fleet.records import (
    Assignment,
    CommandRecord,
    EngineRecord,
    MachineRecord,
    ModelRecord,
    OutcomeRecord,
    Record,
    key,
    plain_counts,
    varied_counts,
)
from penstock.fleet.registry import Fleet, Registry
from penstock.fleet.view import FleetView
from penstock.protocol.control import Replica
from penstock.supervisor.backoff import Backoff
from penstock.supervisor.replicas import Replicas
from penstock.supervisor.unit import Unit

REPORT_S = 0.25
"""How often the machine looks whether its records are still true."""
REPLACED_S = 120.0
"""How long a machine that leaves waits for replacements when it does not know when it will be gone."""
MARGIN_S = 5.0
COMMAND_S = 120.0
"""How old a command may be, and how much the clocks of machines may differ."""
FIRST_RETRY_S, LAST_RETRY_S = 10.0, 300.0

log = logging.getLogger("penstock.fleet")


class Stoppable(Protocol):
    """The supervisor, as far as the agent needs it."""

    @property
    def drain_s(self) -> float: ...
    @property
    def stopping(self) -> bool: ...
    def stop(self) -> None: ...


class Machine:
    """One machine of a fleet."""

    def __init__(
        self,
        registry: Registry,
        view: FleetView,
        supervisor: Stoppable,
        replicas: Replicas,
        record: MachineRecord,
        *,
        public_key: str,
        descriptions: Mapping[str, Mapping[str, Any]],
        more: Callable[[], Iterable[Record]] = tuple,
        reachable: Callable[[], bool] = lambda: True,
        busy: Callable[[], float] = lambda: 0.0,
        clock: Callable[[], float] = time.time,
    ) -> None:
        """`record`: what the machine is; what it runs is added here. `public_key`: of its engines. `descriptions`: the
        models that it knows from the start, as in the configuration. `more`: other records of this machine, such as
        its gateway's. `reachable`: whether the registry is. `busy`: how much of the machine is in use."""
        self._more = more
        self._reachable = reachable
        self._busy = busy
        self._registry = registry
        self._view = view
        self._supervisor = supervisor
        self._replicas = replicas
        self._me = record
        self._public_key = public_key
        self._descriptions = {name: dict(description) for name, description in descriptions.items()}
        self._clock = clock
        self._published: dict[str, Record] = {}
        self._problems: dict[str, str] = {}
        self._retry_at: dict[str, float] = {}
        self._backoffs: dict[str, Backoff] = {}
        self._fetches: dict[str, asyncio.Task[None]] = {}
        self._offered: dict[str, tuple[Mapping[str, Any], str]] = {}
        """Descriptions that the fleet has, with their revisions."""
        self._commands: dict[str, asyncio.Task[None]] = {}
        self._outcomes: dict[str, OutcomeRecord] = {}
        self._begun: dict[str, float] = {}
        """When commands began, by id: a copy of one that is over is not carried out."""
        self._term = 0
        """Of the newest controller that was heard of."""
        self._drained = False
        self._leave: asyncio.Task[None] | None = None
        replicas.on_start_failed = self._start_failed

    @property
    def name(self) -> str:
        return self._me.name

    @property
    def leaving(self) -> bool:
        return self._me.state == "leaving"

    async def run(self) -> None:
        """Until it is cancelled."""
        try:
            while True:
                try:
                    self._follow(self._view.fleet)
                    await self._report()
                except PenstockError as error:
                    log.warning("this machine could not follow the fleet", extra={"why": str(error)})
                except Exception:  # the engines go on, and so must this
                    log.exception("this machine could not follow the fleet")
                await self._view.changed(REPORT_S)
        finally:
            tasks = [*self._fetches.values(), *self._commands.values(), *([self._leave] if self._leave else [])]
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    def leave(self, seconds: float | None = None) -> None:
        """Leaves the fleet and stops; a second call stops at once. `seconds`: when the machine will be gone."""
        if self._leave is not None or self._supervisor.stopping:
            self._supervisor.stop()
            return
        self._me = msgspec.structs.replace(
            self._me, state="leaving", leaves_at=None if seconds is None else self._clock() + seconds
        )
        patience = REPLACED_S if seconds is None else max(seconds - self._supervisor.drain_s - MARGIN_S, 0.0)
        self._leave = asyncio.create_task(self._hand_over(patience), name="leave the fleet")

    async def _hand_over(self, patience_s: float) -> None:
        log.info("this machine leaves the fleet", extra={"machine": self.name})
        try:
            if self._replicas.units and not self._me.pinned:
                with suppress(PenstockError):
                    await self._report()
                    await self._view.wait_for(self._released, patience_s)
            self._drained = True
            with suppress(PenstockError):
                await self._report()
        finally:
            self._supervisor.stop()

    async def goodbye(self) -> None:
        """Its engines have ended: nobody need miss it."""
        with suppress(PenstockError):
            await self._registry.withdraw(Assignment(machine=self.name, models={}))

    def _released(self, fleet: Fleet) -> bool:
        """Whether the controller has taken everything away from this machine, or nobody could take it over."""
        if not self._reachable() or not any(
            one.state == "ready" for name, one in fleet.machines.items() if name != self.name
        ):
            return True
        said = fleet.machines.get(self.name)
        assignment = fleet.assignments.get(self.name)
        return said is not None and said.state == "leaving" and assignment is not None and not assignment.replicas

    def _follow(self, fleet: Fleet) -> None:
        assignment = fleet.assignments.get(self.name)
        if assignment is not None and assignment.term < self._term:
            assignment = None  # a copy of an old one: whoever can write to the registry could have put it there
        if assignment is not None and not self._me.pinned and not self.leaving and not self._supervisor.stopping:
            self._term = assignment.term
            wanted: dict[str, dict[Variant, int]] = {model: {} for model in self._replicas.models}
            for (model, variant), count in assignment.replicas.items():
                wanted.setdefault(model, {})[variant] = count
            for model, counts in wanted.items():
                self._adjust(model, counts, fleet.models.get(model), assignment.revisions.get(model, ""))
            self._forget_unloaded(fleet, {model for model, _ in assignment.replicas})
        for command in fleet.commands.values():
            if command.machine == self.name and command.id not in self._begun:
                self._begun[command.id] = self._clock()
                self._commands[command.id] = self._begin(self._carry_out(command), f"{command.verb} {command.model}")
        for id in self._commands.keys() - fleet.commands.keys():
            if self._commands[id].done():
                del self._commands[id]
                self._outcomes.pop(id, None)
        for id, begun in tuple(self._begun.items()):
            if id not in self._commands and id not in fleet.commands and self._clock() - begun > 2 * COMMAND_S:
                del self._begun[id]

    def _adjust(self, model: str, counts: Mapping[Variant, int], wanted: ModelRecord | None, revision: str) -> None:
        """`revision`: of the settings that running replicas may be replaced with; empty: those that they have."""
        known = model in self._replicas.models
        if wanted is not None and model not in self._fetches and self._may_try(model):
            new = self._is_new(model, wanted.description, revision) if known else bool(counts)
            if new:
                self._fetches[model] = self._begin(self._take_on(model, wanted.description), f"fetch {model}")
        if not known:
            return
        paused = Counter(
            unit.variant
            for unit, leaving in self._replicas.units
            if unit.model == model and unit.paused and not leaving and not unit.superseded
        )
        serving = self._replicas.serving(model)
        if model in self._fetches and not serving:
            return  # its new settings are on their way
        for unit in serving:
            if unit.up.is_set() and self._replicas.is_current(unit):
                self._problems.pop(slot(model, unit.variant), None)
        there = self._replicas.present(model)
        settled = {}
        for variant in {*counts, *there}:
            count = max(counts.get(variant, 0) - paused[variant], 0)
            # More of what could not be started must wait; fewer must not.
            settled[variant] = count if self._may_try(slot(model, variant)) else min(count, there[variant])
        try:
            self._replicas.settle(model, settled)
        except PenstockError as error:  # such as no free port
            for variant in settled:
                if settled[variant] > there[variant]:
                    self._start_failed(model, variant, str(error))
        self._renew(model, revision)

    def _is_new(self, model: str, description: Mapping[str, Any], revision: str) -> bool:
        """Whether these are the settings that the controller means, and not those that this machine has."""
        if not revision or self._descriptions.get(model) == description:
            return False
        if self._offered.get(model, ({}, ""))[0] != description:
            self._offered[model] = (description, whole_revision(engine_model(description)))
        if self._offered[model][1] != revision:
            return False
        if revision == self._replicas.whole_revision(model):
            self._descriptions[model] = dict(description)  # nothing has changed that an engine reads
            return False
        return True

    def _renew(self, model: str, revision: str) -> None:
        """Replaces a replica that has older settings, one at a time."""
        if not revision or revision != self._replicas.whole_revision(model) or model in self._replicas.renewing:
            return
        for unit in self._replicas.stale(model):
            # It is not stopped twice for settings that could not be started.
            vain = not self._replicas.room and unit.gave_way_to
            if self._may_try(slot(model, unit.variant)) and not (vain and vain == self._replicas.revision(unit)):
                log.info("a replica gets new settings", extra={"model": model, "replica": unit.replica})
                self._replicas.supersede(unit)
                return

    def _forget_unloaded(self, fleet: Fleet, assigned: Collection[str]) -> None:
        """A model that was unloaded may come back under its name as another one. (Without any model, it is the registry
        that has forgotten.)"""
        running = {unit.model for unit, _ in self._replicas.units}
        for model in self._replicas.models:
            if fleet.models and model not in {*fleet.models, *assigned, *running}:
                self._replicas.forget(model)
                self._descriptions.pop(model, None)

    def _may_try(self, what: str) -> bool:
        if self._clock() < self._retry_at.get(what, 0.0):
            return False
        self._problems.pop(what, None)
        return True

    async def _take_on(self, model: str, description: Mapping[str, Any]) -> None:
        try:
            await self._replicas.take_on(engine_settings(description))
            self._descriptions[model] = dict(description)
        except PenstockError as error:
            self._start_failed(model, PLAIN, str(error))
        finally:
            del self._fetches[model]

    def _start_failed(self, model: str, variant: Variant, problem: str) -> None:
        name = slot(model, variant)
        log.error("a replica could not be started", extra={"model": name, "why": problem})
        backoff = self._backoffs.setdefault(name, Backoff(FIRST_RETRY_S, LAST_RETRY_S))
        self._problems[name] = problem
        self._retry_at[name] = self._clock() + backoff.delay(0.0)

    async def _carry_out(self, command: CommandRecord) -> None:
        error = ""
        try:
            age = self._clock() - command.at
            if abs(age) > COMMAND_S:
                raise PenstockError(
                    f"machine `{self.name}`: by its clock the command was given {age:.0f} s ago, which is too long; do "
                    "the clocks of the machines agree?"
                )
            match command.verb:
                case "restart":
                    await self._replicas.restart(command.model, command.replica)
                case "drain":
                    await self._replicas.drain(command.model, command.replica, last=True)
                case "leave":
                    self.leave(command.seconds)
        except PenstockError as problem:
            error = str(problem)
        except Exception as problem:
            log.exception("a command failed", extra={"verb": command.verb, "model": command.model})
            error = f"{type(problem).__name__}: {problem}"
        self._outcomes[command.id] = OutcomeRecord(id=command.id, error=error)
        with suppress(PenstockError):
            await self._report()

    def _begin(self, work: Coroutine[Any, Any, None], name: str) -> asyncio.Task[None]:
        return asyncio.create_task(work, name=name)

    async def _report(self) -> None:
        """Publishes what has changed, and withdraws what is gone."""
        records = {key(record): record for record in self.records()}
        gone = [record for name, record in self._published.items() if name not in records]
        fresh = [record for name, record in records.items() if self._published.get(name) != record]
        self._published = records
        if gone:
            await self._registry.withdraw(*gone)
        if fresh:
            await self._registry.publish(*fresh)

    def records(self) -> list[Record]:
        units = self._replicas.units
        running = Counter(
            (unit.model, unit.variant)
            for unit, leaving in units
            if not leaving and not (unit.superseded and unit.successor is not None)
        )
        me = msgspec.structs.replace(
            self._me,
            running=plain_counts(running),
            variants=varied_counts(running),
            problems=dict(self._problems),
            busy=self._busy(),
        )
        engines = [self._engine(unit, leaving) for unit, leaving in units]
        return [me, *(engine for engine in engines if engine is not None), *self._outcomes.values(), *self._more()]

    def _engine(self, unit: Unit, leaving: bool) -> EngineRecord | None:
        if unit.paused and not unit.up.is_set():
            return None
        info, up = unit.info, unit.up.is_set()
        draining = leaving or self._drained or unit.paused
        record = EngineRecord(
            machine=self.name,
            model=unit.model,
            replica=unit.replica,
            endpoint=unit.endpoint,
            public_key=self._public_key,
            state="draining" if draining else "ready" if up else "starting",
            region=self._me.region,
            zone=self._me.zone,
            version=penstock.__version__,
            pool=unit.pool,
            variant=unit.variant,
            revision="" if self._me.pinned else unit.revision,
            description=self._descriptions.get(unit.model, {}),
        )
        if info is None:
            return record
        return msgspec.structs.replace(
            record,
            role=info.role,
            max_running=info.max_running,
            context_window=info.max_model_len,
            device=info.product or info.device,
            memory=info.weight_bytes + info.kv_bytes,
            startup_s=round((unit.ready_at or unit.spawned_at) - unit.spawned_at, 2),
        )

    def describe(self, unit: Unit) -> Replica:
        """How gateways reach an engine of this machine."""
        return Replica(
            f"{self.name}.{unit.replica}",
            unit.endpoint,
            self._public_key,
            self.name,
            unit.pool,
            self._me.region,
            self._me.zone,
        )
