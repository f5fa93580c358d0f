"""The live autoscaler: loads of gateways in, replicas started and drained (R-OPS-4). No process is started here."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import cast

import pytest

from penstock.config import Config, ModelConfig
from penstock.config.autoscale import AutoscaleConfig
from penstock.config.pools import PoolConfig, PoolRuleConfig
from penstock.config.variants import Variant, variant_at
from penstock.errors import PenstockError
from penstock.gateway.process.supervisor_link import SupervisorLink
from penstock.protocol.control import Loads, ModelLoad, Notice, Scale, Scaling, SetLimits, Topology, scaled_name
from penstock.protocol.errors import InvalidRequest
from penstock.supervisor.autoscaler import ReplicaAutoscaler, Target
from penstock.supervisor.catalogue import ModelCatalogue
from penstock.supervisor.control import ControlServer
from penstock.supervisor.replicas import Replicas
from penstock.supervisor.runtime import RuntimeFolder
from penstock.supervisor.supervisor import StartFailed, Supervisor
from penstock.supervisor.unit import Unit
from tests.gateway.conftest import eventually


class Processes:
    """A supervisor whose engines are ready when the test says so."""

    drain_s = 0.0

    def __init__(self) -> None:
        self.stopping = False
        self.announced = asyncio.Event()
        self.announced.set()
        self.broken = False
        self.instant = True
        self.draining: asyncio.Event | None = None
        """Set it to let engines drain until it is set."""
        self.dismissed: list[str] = []

    async def add(self, unit: Unit) -> None:
        await asyncio.sleep(0)
        if self.broken:
            unit.dismissed = True
            raise StartFailed(f"{unit.name}: out of memory")
        if self.instant:
            unit.spawned_at, unit.ready_at = 100.0, 103.0
            unit.up.set()
        else:
            await unit.up.wait()

    async def dismiss(self, unit: Unit) -> None:
        unit.dismissed = True
        if self.draining is not None:
            await self.draining.wait()
        self.dismissed.append(unit.replica)


@dataclass
class World:
    processes: Processes
    replicas: Replicas
    now: float = 1000.0
    scaler: ReplicaAutoscaler = field(init=False)

    @property
    def names(self) -> list[str]:
        return [replica.name for replica in self.replicas.topology().models["m"]]

    async def tick(self, seconds: float = 5.0, **load: float) -> None:
        """Time passes, a gateway reports, and a decision is made."""
        self.now += seconds
        self.scaler.heard("gateway", Loads({"m": ModelLoad(**{"slots": 8 * len(self.names), **load})}))  # type: ignore[arg-type]
        self.scaler.decide()
        for _ in range(5):
            await asyncio.sleep(0)


@asynccontextmanager
async def world(most_engines: int = 8, **settings: float) -> AsyncIterator[World]:
    config = AutoscaleConfig(**{"max": 4, "stabilisation_s": 20.0, "scale_down_cooldown_s": 0.0, **settings})  # type: ignore[arg-type]
    processes = Processes()
    first = Unit("engine m", [], model="m", replica="0", endpoint="ipc://0")
    first.up.set()
    first.spawned_at, first.ready_at = 100.0, 102.0

    def make(model: str, index: int, variant: Variant | None = None) -> Unit:
        return Unit(f"engine m/{index}", [], model=model, replica=str(index), endpoint=f"ipc://{index}")

    replicas = Replicas(cast(Supervisor, processes), [first], make, max_engines=most_engines)
    it = World(processes, replicas)
    it.scaler = ReplicaAutoscaler(replicas, lambda: {"m": Target("m", config)}, clock=lambda: it.now)
    try:
        yield it
    finally:
        await replicas.close()


async def test_load_starts_replicas_and_idleness_drains_them() -> None:
    async with world() as it:
        await it.tick(in_flight=8, queued=12)
        assert it.names == ["0", "1", "2", "3"]
        state = it.scaler.state().models["m"]
        assert (state.desired, state.ready, state.starting, state.reason) == (4, 4, 0, "busy")
        assert state.decisions == {"busy": 1} and "requests in flight" in state.detail
        it.processes.draining = asyncio.Event()
        for _ in range(8):
            await it.tick(in_flight=1)
        assert it.names == ["0"], "the newest leave first"
        assert it.scaler.state().models["m"].leaving == 3
        it.processes.draining.set()
        await eventually(lambda: sorted(it.processes.dismissed) == ["1", "2", "3"])


async def test_the_loads_of_all_gateways_are_added_up() -> None:
    async with world(target_utilisation=1.0) as it:
        # Each has 8 of its own in the same engines, which all see the same engines.
        it.scaler.heard("one", Loads({"m": ModelLoad(in_flight=8, slots=8)}))
        it.scaler.heard("two", Loads({"m": ModelLoad(in_flight=8, slots=8)}))
        it.scaler.decide()
        assert len(it.names) == 2
        it.scaler.lost("two")
        it.scaler.heard("one", Loads({"m": ModelLoad(in_flight=6, slots=16)}))
        for _ in range(10):
            it.now += 5.0
            it.scaler.decide()
        assert len(it.names) == 1


async def test_a_model_without_reports_is_left_alone() -> None:
    async with world() as it:
        it.scaler.decide()
        assert it.names == ["0"] and it.scaler.state().models["m"].reason == ""


async def test_scale_to_zero_and_wake_at_once() -> None:
    async with world(min=0, idle_s=30.0) as it:
        for _ in range(8):
            await it.tick()
        assert it.names == [] and it.scaler.state().models["m"].desired == 0
        woken = asyncio.create_task(it.scaler.run())
        await asyncio.sleep(0)
        it.scaler.heard("gateway", Loads({"m": ModelLoad(queued=1, arrived=1)}))
        await eventually(lambda: it.names == ["0"])
        woken.cancel()
        await asyncio.gather(woken, return_exceptions=True)
        assert it.scaler.state().models["m"].reason in ("wake", "held")


async def test_a_number_is_not_reused_while_its_replica_drains() -> None:
    async with world(scale_up_cooldown_s=0.0) as it:
        await it.tick(in_flight=8, queued=2)
        assert it.names == ["0", "1"]
        it.processes.draining = asyncio.Event()
        for _ in range(8):
            await it.tick(in_flight=1)
        assert it.names == ["0"]
        await it.tick(in_flight=8, queued=2)
        assert it.names == ["0", "2"], "the endpoint of replica 1 is still in use"
        it.processes.draining.set()


async def test_replicas_that_cannot_start_are_tried_again_later_and_later() -> None:
    async with world() as it:
        it.processes.broken = True
        for _ in range(100):
            await it.tick(1.0, in_flight=8, queued=12)
        state = it.scaler.state().models["m"]
        assert it.names == ["0"], "what runs stays"
        assert "out of memory" in state.problem
        # After 5, 10, 20 and 40 seconds, three at a time.
        assert state.failed_starts == 5 * 3
        it.processes.broken = False
        for _ in range(100):
            await it.tick(1.0, in_flight=8, queued=12)
        assert len(it.names) == 4


async def test_the_limit_on_engines_holds() -> None:
    async with world(most_engines=2) as it:
        for _ in range(4):
            await it.tick(in_flight=8, queued=100)
        assert it.names == ["0", "1"]
        assert it.scaler.state().models["m"].desired == 4


async def test_limits_change_at_run_time_and_must_make_sense() -> None:
    async with world() as it:
        await it.tick()
        it.scaler.set_limits("m", 3, None)
        await it.tick()
        assert len(it.names) == 3
        it.scaler.set_limits("m", 1, 2)
        await it.tick()
        assert len(it.names) == 2
        for wrong, says in (((5, None), "at most max"), ((0, None), "scale to zero needs min: 0")):
            with pytest.raises(PenstockError, match=says):
                it.scaler.set_limits("m", *wrong)
        with pytest.raises(PenstockError, match="not scaled automatically"):
            it.scaler.set_limits("other", 1, 2)


async def test_a_spot_notice_starts_a_replacement_before_the_replica_drains() -> None:
    async with world(min=2) as it:
        await it.tick()
        assert it.names == ["0", "1"]
        it.processes.instant = False
        it.replicas.replace("m", "1", 120.0)
        for _ in range(4):
            await it.tick()
        assert it.names == ["0", "1", "2"], "one replacement, though the policy is asked again and again"
        assert it.scaler.state().models["m"].leaving == 1 and not it.processes.dismissed
        unit = next(unit for unit in it.replicas.serving("m") if unit.replica == "2")
        unit.up.set()
        await eventually(lambda: it.processes.dismissed == ["1"])
        assert it.names == ["0", "2"]


async def test_a_replica_drains_in_time_even_if_its_replacement_is_late() -> None:
    async with world() as it:
        it.processes.instant = False
        it.replicas.replace("m", "", 0.0)
        await eventually(lambda: it.processes.dismissed == ["0"])
        assert it.names == ["1"], "still starting"


async def test_a_replacement_waits_for_room() -> None:
    async with world(most_engines=1) as it:
        it.replicas.replace("m", "0", 60.0)
        assert it.replicas.serving("m") == [] and it.replicas.leaving("m") == 1
        await eventually(lambda: [unit.up.is_set() for unit in it.replicas.serving("m")] == [True])
        assert it.processes.dismissed == ["0"]


async def test_gateways_report_over_the_control_socket_and_learn_what_was_decided(tmp_path: Path) -> None:
    async with world() as it:
        topologies: list[Topology] = []
        scaled: list[object] = []

        async def follow(topology: Topology) -> dict[str, str]:
            topologies.append(topology)
            return {}

        async with ControlServer(tmp_path / "control", it.replicas, it.scaler):
            link = SupervisorLink(tmp_path / "control", follow, scaled.append)
            await link.start()
            link.report(Loads({"m": ModelLoad(in_flight=8, queued=8, slots=8)}))
            await eventually(lambda: bool(topologies) and len(topologies[-1].models["m"]) > 1, 5.0)
            await eventually(lambda: "m" in link.scaling and link.scaling["m"].desired > 1)
            assert scaled, "and whoever asked for it is told"
            with pytest.raises(InvalidRequest, match="is scaled automatically; `penstock autoscale m --min N"):
                await link.ask(lambda number: Scale(number, "m", 2))
            await link.ask(lambda number: SetLimits(number, "m", 4, None))
            await eventually(lambda: len(it.names) == 4)
            await link.ask(lambda number: Notice(number, "m", "3", 60.0))
            await eventually(lambda: it.names == ["0", "1", "2", "4"])
            await link.close()
        assert it.scaler.state() != Scaling({})


async def test_nothing_is_started_while_the_server_stops() -> None:
    async with world() as it:
        it.processes.stopping = True
        it.scaler.heard("gateway", Loads({"m": ModelLoad(in_flight=8, queued=50, slots=8)}))
        running = asyncio.create_task(it.scaler.run())
        await asyncio.sleep(0.01)
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
        assert it.names == ["0"]


async def test_each_pool_is_scaled_by_its_own_load() -> None:
    config = AutoscaleConfig(max=3, stabilisation_s=20.0, scale_down_cooldown_s=0.0)
    pools = (PoolConfig(name="chat", autoscale=config), PoolConfig(name="batch"))
    model = ModelConfig(name="m", pools=pools, pool_rules=(PoolRuleConfig("chat"), PoolRuleConfig("batch")))

    class Catalogue(ModelCatalogue):
        def unit(self, name: str, index: int, variant: Variant | None = None) -> Unit:
            variant = variant_at(model, index) if variant is None else variant
            return Unit(f"engine m/{index}", [], model=name, replica=str(index), variant=variant)

    catalogue = Catalogue(Config(models=(model,)), cast(RuntimeFolder, None))
    first = [catalogue.unit("m", index) for index in range(2)]
    assert [unit.pool for unit in first] == ["chat", "batch"]
    for unit in first:
        unit.up.set()
    now = 1000.0
    replicas = Replicas(cast(Supervisor, Processes()), first, catalogue.unit, catalogue, max_engines=8)
    scaler = ReplicaAutoscaler(replicas, lambda: catalogue.autoscaled, clock=lambda: now)

    async def tick(chat: int) -> None:
        nonlocal now
        now += 5.0
        busy = ModelLoad(slots=8 * len(replicas.serving("m", "chat")), in_flight=min(chat, 8), queued=max(chat - 8, 0))
        scaler.heard("gateway", Loads({scaled_name("m", "chat"): busy, "m": ModelLoad(queued=100)}))
        scaler.decide()
        for _ in range(5):
            await asyncio.sleep(0)

    try:
        await tick(40)
        assert sorted(unit.pool for unit in replicas.serving("m")) == ["batch", "chat", "chat", "chat"]
        state = scaler.state().models["m#chat"]
        assert (state.model, state.pool, state.desired) == ("m", "chat", 3)
        for _ in range(8):
            await tick(0)
        assert sorted(unit.pool for unit in replicas.serving("m")) == ["batch", "chat"]
        scaler.set_limits("m", 2, None, "chat")
        await tick(0)
        assert len(replicas.serving("m", "chat")) == 2
        with pytest.raises(PenstockError, match="say which one with --pool: chat"):
            scaler.set_limits("m", 2, None)
        with pytest.raises(PenstockError, match="pool `batch` of `m` is not scaled automatically"):
            scaler.set_limits("m", 2, None, "batch")
        assert scaler.governs("m", "chat") and not scaler.governs("m") and not scaler.governs("m", "batch")
    finally:
        await replicas.close()
