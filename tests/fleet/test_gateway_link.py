"""A gateway that follows a fleet: models and replicas come and go with their engines."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import msgspec
import pytest

from penstock.config import ModelConfig, load
from penstock.config.fleet import FleetConfig
from penstock.config.load import check_model
from penstock.errors import ConfigError
from penstock.fleet.gateway_link import FleetLink
from penstock.fleet.membership import advertised, described, listening, machine_name, own_address, understood
from penstock.fleet.records import EngineRecord, GatewayRecord, ModelRecord
from penstock.fleet.registration import FleetEngine
from penstock.fleet.registry import MemoryFleet, MemoryRegistry
from penstock.protocol.control import Loads, ModelLoad, Topology
from penstock.protocol.fleet_secret import FleetSecret, generate
from tests.gateway.conftest import eventually


def engine(machine: str, state: str = "ready", **more: Any) -> EngineRecord:
    described = {"name": "m", "source": "somewhere", "invented_later": 1}
    sent = {"machine": machine, "model": "m", "replica": "0", "endpoint": f"tcp://{machine}:1", "state": state}
    return msgspec.convert({"type": "engine", "description": described, **sent, **more}, EngineRecord)


class World:
    def __init__(self) -> None:
        self.fleet = MemoryFleet()
        self.registry = MemoryRegistry(self.fleet)
        self.told: list[Topology] = []
        self.fetched: list[str] = []
        self.changed = asyncio.Event()
        self.problems: dict[str, str] = {}

    async def follow(self, topology: Topology) -> dict[str, str]:
        self.told.append(topology)
        self.changed.set()
        return self.problems

    def fetch(self, source: str) -> None:
        self.fetched.append(source)
        if source == "nowhere":
            raise ConfigError("there is no such model")

    async def until(self, wanted: Callable[[Topology], bool]) -> Topology:
        async with asyncio.timeout(60):
            while not (self.told and wanted(self.told[-1])):
                self.changed.clear()
                await self.changed.wait()
        return self.told[-1]


@asynccontextmanager
async def link(world: World, **more: Any) -> AsyncIterator[FleetLink]:
    record = GatewayRecord(machine="g", url="http://g:8000")
    made = FleetLink(MemoryRegistry(world.fleet), record, world.follow, fetch=world.fetch, **more)
    await made.start()
    yield made
    await made.close()


def names(topology: Topology) -> dict[str, list[str]]:
    return {model: [replica.name for replica in found] for model, found in topology.models.items()}


async def test_replicas_come_and_go_and_a_model_outlasts_its_engines() -> None:
    world = World()
    async with link(world) as made:
        await world.registry.publish(engine("a"), engine("b"))
        found = await world.until(lambda topology: len(topology.models.get("m", ())) == 2)
        assert names(found) == {"m": ["a.0", "b.0"]} and world.fetched == ["somewhere"]
        assert check_model(found.loaded["m"]).source == "somewhere", "what a newer version describes is understood"
        assert await made.problem() is None
        await world.registry.publish(engine("a", "draining"))
        assert names(await world.until(lambda topology: len(topology.models["m"]) == 1)) == {"m": ["b.0"]}
        await world.registry.withdraw(engine("b"))
        assert names(await world.until(lambda topology: not topology.models["m"])) == {"m": []}
        assert "no engine is registered" in (await made.problem() or "")


async def test_a_model_that_cannot_be_fetched_keeps_no_other_from_being_served() -> None:
    world = World()
    async with link(world) as made:
        bad = engine("a", model="bad", description={"name": "bad", "source": "nowhere"})
        await world.registry.publish(bad)
        async with asyncio.timeout(60):
            while "no such model" not in (await made.problem() or ""):  # noqa: ASYNC110 (it is what a balancer sees)
                await asyncio.sleep(0.01)
        await world.registry.publish(engine("b"))
        assert names(await world.until(lambda topology: "m" in topology.models)) == {"m": ["b.0"]}


async def test_configured_and_wished_models_are_known_before_their_engines() -> None:
    world = World()
    async with link(world, configured=["own"]) as made:
        await world.registry.publish(ModelRecord(name="w", description={"name": "w", "source": "s"}))
        assert names(await world.until(lambda topology: "w" in topology.models)) == {"own": [], "w": []}
        made.report(Loads({"w": ModelLoad(queued=2)}))
        made.draining()
        gateway = "g/http://g:8000/0"
        await eventually(lambda: world.fleet.snapshot().gateways[gateway].state == "draining")
        await eventually(lambda: gateway in world.fleet.snapshot().loads)
        assert world.fleet.snapshot().loads[gateway].loads.models["w"].queued == 2


def test_an_engine_is_reached_where_its_machine_is() -> None:
    config = FleetConfig(url="redis://127.0.0.1:1", ports="7000-7003", machine="a")
    assert own_address(config) == "127.0.0.1" and listening(config) == "tcp://127.0.0.1:7000-7003"
    away = FleetConfig(url="redis://127.0.0.1:1", advertise="10.0.0.7")
    assert listening(away) == "tcp://0.0.0.0:5600-5699"
    assert advertised(away, "tcp://0.0.0.0:5604") == "tcp://10.0.0.7:5604"
    member = FleetEngine(away, FleetSecret((generate(),)), ModelConfig(name="m"))
    with pytest.raises(ConfigError, match=r"gateways would look for it at 10\.0\.0\.7"):
        member.endpoint("tcp://127.0.0.1:5555")
    with pytest.raises(ConfigError, match="other machines of the fleet cannot reach it"):
        member.endpoint("ipc:///run/x")
    with pytest.raises(ConfigError, match="cannot be the name of a machine"):
        machine_name(FleetConfig(machine="a b"))


def test_a_described_model_is_read_like_one_of_the_configuration() -> None:
    model = ModelConfig(source="hf:org/name", name="m", aliases=("x",), input_price=2.0, max_running=7)
    described_as = described(model)
    assert described_as == {
        "source": "hf:org/name", "name": "m", "aliases": ["x"], "input_price": 2.0, "max_running": 7,
    }  # fmt: skip
    assert check_model(understood({**described_as, "invented_later": True})) == model


def test_a_gateway_of_a_fleet_needs_no_model() -> None:
    flags = {"fleet.url": "redis://r"}
    assert load(None, flags=flags, environ={}, bare=True).models == ()
    with pytest.raises(ConfigError, match="at least one model"):
        load(None, environ={}, bare=True)
