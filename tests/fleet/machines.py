"""Machines, their supervisors and a controller in one process, on a virtual clock."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace
from typing import Any, cast

from penstock.config import Config
from penstock.config.fleet import FleetConfig
from penstock.config.variants import Variant, variant_at
from penstock.fleet.controller import Controller
from penstock.fleet.machine import Machine
from penstock.fleet.operations import FleetOperations
from penstock.fleet.records import (
    VARIANTS,
    MachineRecord,
    ModelRecord,
)
from penstock.fleet.registry import MemoryFleet, MemoryRegistry
from penstock.fleet.view import FleetView
from penstock.supervisor.catalogue import ModelCatalogue
from penstock.supervisor.replicas import Replicas
from penstock.supervisor.runtime import RuntimeFolder
from penstock.supervisor.supervisor import StartFailed, Supervisor
from penstock.supervisor.unit import Unit

LEASE_S = 10.0
COLD_START_S = 3.0
REBALANCE_S = 30.0


class Processes:
    """A supervisor whose engines need a while to start and to drain."""

    drain_s = 5.0

    def __init__(self) -> None:
        self.stopping = False
        self.broken = False
        self.paused = 0

    def stop(self) -> None:
        self.stopping = True

    async def add(self, unit: Unit) -> None:
        unit.spawned_at = asyncio.get_running_loop().time()
        await asyncio.sleep(COLD_START_S)
        if self.broken:
            unit.dismissed = True
            raise StartFailed("out of memory")
        unit.ready_at = asyncio.get_running_loop().time()
        unit.up.set()

    async def dismiss(self, unit: Unit) -> None:
        unit.dismissed = True
        await asyncio.sleep(1.0)

    async def pause(self, unit: Unit) -> None:
        self.paused += 1
        unit.paused = True
        unit.up.clear()

    async def renew(self, unit: Unit) -> None:
        unit.paused = False
        unit.up.clear()
        await asyncio.sleep(COLD_START_S)
        unit.up.set()


class Known(ModelCatalogue):
    """Fetches nothing, and builds engines without a command."""

    def __init__(self) -> None:
        fleet = FleetConfig(url="redis://fleet")
        super().__init__(replace(Config(), models=(), fleet=fleet), cast(RuntimeFolder, None))

    async def _fetch(self, name: str, source: str) -> str:
        return source

    def unit(self, name: str, index: int, variant: Variant | None = None) -> Unit:
        variant = variant_at(self.model(name), index) if variant is None else variant
        unit = Unit(f"{name}/{index}", [], model=name, replica=str(index), endpoint="tcp://x:1", variant=variant)
        unit.revision = self.revision(name, variant.pool)
        return unit


class Node:
    """One machine: its agent and its controller."""

    def __init__(self, name: str, memory: MemoryFleet, **more: Any) -> None:
        self.registry = MemoryRegistry(memory)
        clock = asyncio.get_running_loop().time
        self.view = FleetView(self.registry, clock)
        self.processes = Processes()
        supervisor = cast(Supervisor, self.processes)
        known = Known()
        more = {"room": 2, "understands": [VARIANTS]} | more
        self.replicas = Replicas(supervisor, [], known.unit, known, max_engines=more["room"])
        record = MachineRecord(name=name, address="10.0.0.1", **more)
        self.machine = Machine(
            self.registry, self.view, supervisor, self.replicas, record, public_key="", descriptions={}, clock=clock
        )
        self.controller = Controller(
            self.registry, self.view, name, lease_s=LEASE_S, rebalance_s=REBALANCE_S, clock=clock
        )
        self.operations = FleetOperations(self.registry, self.view, clock=clock)
        self._tasks: list[asyncio.Task[None]] = []
        for work in (self.view.run(), self.machine.run(), self.controller.run()):
            self._tasks.append(asyncio.create_task(work))

    async def end(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self.replicas.close()


class World:
    def __init__(self) -> None:
        self.memory = MemoryFleet()
        self.nodes: dict[str, Node] = {}
        self.client = MemoryRegistry(self.memory)

    def join(self, name: str, **more: Any) -> Node:
        self.nodes[name] = node = Node(name, self.memory, **more)
        return node

    async def kill(self, name: str) -> None:
        """As `kill -9` does: nothing is withdrawn, and the lease runs out."""
        node = self.nodes.pop(name)
        await node.end()
        await asyncio.sleep(LEASE_S)
        self.memory.lose(node.registry)

    async def want(self, count: int, /, **description: Any) -> None:
        await self.client.publish(ModelRecord(name="m", description={"name": "m", **description}, replicas=count))

    def ready(self) -> dict[str, int]:
        found: dict[str, int] = {}
        for engine in self.memory.snapshot().engines.values():
            if engine.state == "ready":
                found[engine.machine] = found.get(engine.machine, 0) + 1
        return found

    async def until(self, condition: Callable[[], bool], within: float = 60.0) -> None:
        deadline = asyncio.get_running_loop().time() + within
        while not condition():
            assert asyncio.get_running_loop().time() < deadline, (self.ready(), self.memory.snapshot())
            await asyncio.sleep(0.1)


@asynccontextmanager
async def world(*names: str, **more: Any) -> AsyncIterator[World]:
    async with AsyncExitStack() as stack:
        it = World()

        async def end() -> None:
            for node in it.nodes.values():
                await node.end()

        stack.push_async_callback(end)
        for name in names:
            it.join(name, **more)
        yield it
