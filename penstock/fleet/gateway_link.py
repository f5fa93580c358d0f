"""A gateway without a supervisor in a fleet: it follows the registry, and says there that it exists.

Owns one task that follows and one per model whose files are being fetched: a model that the gateway was not configured
with is served once its tokenizer and template are here. While the registry is away, the last topology holds. A model
whose engines are all gone stays known for a while: its clients are told to wait, not that there is no such model.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Collection, Coroutine, Mapping
from typing import Any, Protocol

import msgspec

from penstock.errors import PenstockError
from penstock.fleet.operations import FleetOperations
from penstock.fleet.records import GatewayRecord, LoadRecord
from penstock.fleet.registry import Fleet, Registry
from penstock.fleet.status import fleet_state
from penstock.fleet.topology import topology
from penstock.fleet.view import FleetView
from penstock.protocol.control import Loading, Loads, ModelScaling, Operation, Topology
from penstock.protocol.fleet_state import FleetState
from penstock.sources.resolve import resolve

KEEP_S = 600.0
"""How long a model without any engine stays known."""
RETRY_S = 15.0
"""How often a model that cannot be served is tried again."""

Follow = Callable[[Topology], Awaitable[dict[str, str]]]
log = logging.getLogger("penstock.fleet")


class Operations(Protocol):
    """Carries out what administrators ask of the fleet."""

    async def ask(self, operation: Callable[[int], Operation]) -> None: ...


class FleetLink:
    """Takes the place of the link to a supervisor (`SupervisorLink`)."""

    def __init__(
        self,
        registry: Registry,
        record: GatewayRecord,
        follow: Follow,
        scaled: Callable[[Mapping[str, ModelScaling]], None] = lambda models: None,
        *,
        name: str = "",
        configured: Collection[str] = (),
        operations: Operations | None = None,
        fetch: Callable[[str], object] = lambda source: resolve(source, weights=False),
    ) -> None:
        """`name`: of the fleet. `configured`: models that this gateway knows without the registry. `fetch`: brings the
        files of a source."""
        self._registry = registry
        self._record = record
        self._follow = follow
        self._scaled = scaled
        self._configured = configured
        self._name = name
        self._view = FleetView(registry)
        self._operations = operations or FleetOperations(registry, self._view)
        self._fetch = fetch
        self.loading: Mapping[str, Loading] = {}
        self.scaling: Mapping[str, ModelScaling] = {}
        self._fleet: Fleet | None = None
        self._sources: dict[str, str] = {}
        """Of models whose files are here."""
        self._problems: dict[str, str] = {}
        self._seen_at: dict[str, float] = {}
        """When a model was last listed."""
        self._known: dict[str, dict[str, Any]] = {}
        self._told: Topology | None = None
        self._wanted = asyncio.Event()
        self._tasks: dict[str, asyncio.Task[None]] = {}

    async def start(self) -> None:
        self._begin("registration", self._register())
        self._begin("snapshots", self._look())
        self._begin("topology", self._keep_following())

    async def close(self) -> None:
        for task in tuple(self._tasks.values()):
            task.cancel()
        await asyncio.gather(*self._tasks.values(), return_exceptions=True)
        await self._registry.close()

    def draining(self) -> None:
        self._record = msgspec.structs.replace(self._record, state="draining")
        self._begin("draining", self._register())

    async def ask(self, operation: Callable[[int], Operation]) -> None:
        await self._operations.ask(operation)

    def report(self, loads: Loads) -> None:
        """Says in the registry how loaded models are; skipped while the report before is still on its way."""
        record = LoadRecord(gateway=self._record.id, loads=loads)
        if "load" not in self._tasks:
            self._begin("load", self._registry.publish(record))

    @property
    def fleet(self) -> FleetState | None:
        return None if self._fleet is None else fleet_state(self._name, self._fleet)

    async def problem(self) -> str | None:
        """Why nothing can be answered, if it cannot."""
        if self._fleet is None:
            return "the fleet's registry has not answered yet"
        if self._told is not None and any((*self._told.models.values(), *self._told.encoders.values())):
            return None
        if self._problems:
            return "; ".join(f"`{name}` cannot be served: {why}" for name, why in self._problems.items())
        # Of a configured model its own readiness tells: one that is scaled to zero needs no engine until it is asked.
        return None if self._configured else "no engine is registered in the fleet"

    def _begin(self, name: str, work: Coroutine[Any, Any, None]) -> None:
        task = self._tasks[name] = asyncio.create_task(work, name=f"fleet {name}")
        task.add_done_callback(lambda ended: self._ended(name, ended))

    def _ended(self, name: str, task: asyncio.Task[None]) -> None:
        if self._tasks.get(name) is task:
            del self._tasks[name]
        if not task.cancelled() and (error := task.exception()) is not None:
            log.error("the fleet is not followed as it should be", exc_info=error, extra={"task": name})

    async def _register(self) -> None:
        try:
            await self._registry.publish(self._record)
        except PenstockError as error:
            log.error("the gateway is not registered in the fleet", extra={"why": str(error)})

    async def _look(self) -> None:
        async for fleet in self._registry.follow():
            self._fleet = fleet
            self._view.take(fleet)
            decision = fleet.decisions.get(fleet.controller)
            scaling = {} if decision is None else dict(decision.scaling)
            if scaling != self.scaling:
                self.scaling = scaling
                self._scaled(scaling)
            self._wanted.set()

    async def _keep_following(self) -> None:
        while True:
            await self._wait(RETRY_S)
            if self._fleet is None:
                continue
            found = self._usable(topology(self._fleet, models=self._configured))
            if found != self._told or any(name in found.models for name in self._problems):
                problems = await self._follow(found)
                fetching = {name: why for name, why in self._problems.items() if name not in self._sources}
                self._told, self._problems = found, fetching | problems

    async def _wait(self, at_most: float) -> None:
        try:
            async with asyncio.timeout(at_most):
                await self._wanted.wait()
        except TimeoutError:
            return
        finally:
            self._wanted.clear()

    def _usable(self, found: Topology) -> Topology:
        """Without the models whose files are not here yet, with those whose engines have gone a moment ago."""
        now = time.monotonic()
        for name in found.models:
            self._seen_at[name] = now
            if name in found.loaded:
                self._known[name] = found.loaded[name]
        recent = [name for name, at in self._seen_at.items() if now - at <= KEEP_S]
        self._seen_at = {name: self._seen_at[name] for name in recent}
        models, loaded = {}, {}
        for name in recent:
            if name in self._configured:
                models[name] = found.models.get(name, [])
            elif self._here(name, self._known.get(name, {})):
                models[name], loaded[name] = found.models.get(name, []), self._known[name]
        encoders = {name: replicas for name, replicas in found.encoders.items() if name not in models}
        return Topology(models, loaded, encoders=encoders, loaded_encoders=found.loaded_encoders)

    def _here(self, name: str, description: Mapping[str, Any]) -> bool:
        """Whether the model's files are here; if not, they are fetched."""
        source = str(description.get("source", ""))
        if not source:
            self._problems[name] = "its engines do not say where it comes from; add it to this gateway's configuration"
            return False
        if name not in self._sources and f"fetch {name}" not in self._tasks:
            self._begin(f"fetch {name}", self._bring(name, source))
        return name in self._sources

    async def _bring(self, name: str, source: str) -> None:
        try:
            await asyncio.to_thread(self._fetch, source)
        except (PenstockError, OSError) as error:
            if self._problems.get(name) != str(error):
                log.error("a model of the fleet cannot be served here", extra={"model": name, "why": str(error)})
            self._problems[name] = str(error)
            await asyncio.sleep(RETRY_S)
        else:
            self._problems.pop(name, None)
            self._sources[name] = source
        self._wanted.set()
