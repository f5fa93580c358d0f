"""The registry of a fleet: what is published, followed, lost. In memory and in a real Redis (Valkey)."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from typing import Any

import pytest

from penstock.fleet import redis_registry
from penstock.fleet.records import Assignment, EngineRecord, LoadRecord, ModelRecord, Record, decode, encode
from penstock.fleet.redis_registry import RedisRegistry
from penstock.fleet.registry import Fleet, MemoryFleet, MemoryRegistry, OutOfTerm, Registry
from penstock.protocol.control import Loads, ModelLoad
from penstock.protocol.fleet_secret import FleetSecret, generate

ENGINE = EngineRecord(machine="a", model="m", replica="0", endpoint="tcp://10.0.0.1:5600")
MODEL = ModelRecord(name="m", description={"source": "m"})
SECRET = FleetSecret((generate(),))


@dataclass
class Processes:
    """A fleet whose processes can die."""

    make: Callable[[float], Registry]
    lose: Callable[[Any], None]
    made: list[Registry] = field(default_factory=list)

    def __call__(self, lease_s: float = 600.0) -> Registry:
        self.made.append(self.make(lease_s))
        return self.made[-1]


@pytest.fixture(params=["memory", "redis"])
async def processes(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Processes]:
    if request.param == "memory":
        fleet = MemoryFleet()
        found = Processes(lambda lease_s: MemoryRegistry(fleet), fleet.lose)
    else:
        monkeypatch.setattr(redis_registry, "SLACK_S", 0.05)
        monkeypatch.setattr(redis_registry, "POLL_S", 0.1)
        valkey = request.getfixturevalue("valkey")
        found = Processes(lambda lease_s: registry(valkey, lease_s=lease_s), die)
    yield found
    for made in found.made:
        await made.close()


def registry(valkey: Any, secret: FleetSecret = SECRET, lease_s: float = 0.4) -> RedisRegistry:
    return RedisRegistry(f"redis://127.0.0.1:{valkey.port}", "test", secret, lease_s=lease_s)


def die(process: RedisRegistry) -> None:
    """It renews nothing any more, and says nothing."""
    for task in process._tasks.values():
        task.cancel()
    process._own.clear()
    process._leads = ""


async def until(seen: AsyncIterator[Fleet], wanted: Callable[[Fleet], bool]) -> Fleet:
    async with asyncio.timeout(60):
        async for fleet in seen:
            if wanted(fleet):
                return fleet
    raise AssertionError


async def test_followers_see_what_is_published_until_its_process_is_lost(processes: Processes) -> None:
    one, other = processes(lease_s=0.4), processes(lease_s=0.4)
    seen = other.follow()
    assert (await anext(seen)).engines == {}
    await one.publish(ENGINE, MODEL)
    assert (await until(seen, lambda fleet: bool(fleet.engines))).engines == {"a/m/0": ENGINE}
    processes.lose(one)
    found = await until(seen, lambda fleet: not fleet.engines)
    assert found.models == {"m": MODEL}, "wishes outlast the process that wrote them"


async def test_what_is_withdrawn_is_gone_at_once_and_changes_are_seen(processes: Processes) -> None:
    one, other = processes(), processes()
    seen = other.follow()
    draining = EngineRecord(machine="a", model="m", replica="0", endpoint=ENGINE.endpoint, state="draining")
    load: Record = LoadRecord(gateway="g", loads=Loads({"m": ModelLoad(queued=3)}))
    await one.publish(ENGINE, load)
    assert (await until(seen, lambda fleet: bool(fleet.engines))).loads == {"g": load}
    await one.publish(draining)
    assert (await until(seen, lambda fleet: fleet.engines == {"a/m/0": draining})).engines
    await one.withdraw(draining)
    assert not (await until(seen, lambda fleet: not fleet.engines)).engines
    await one.close()
    assert not (await until(seen, lambda fleet: not fleet.loads)).loads


async def test_one_controller_at_a_time_and_an_old_one_cannot_write(processes: Processes) -> None:
    one, other = processes(), processes()
    term = await one.lead("a")
    assert term and await other.lead("b") is None and await one.lead("a") == term
    processes.lose(one)
    if isinstance(one, RedisRegistry):
        await one._redis.hset(one._keys[0], "until", 0)  # its lease runs out
    async with asyncio.timeout(60):
        while not (newer := await other.lead("b")):  # noqa: ASYNC110 (it is asked again and again, as a controller does)
            await asyncio.sleep(0.05)
    assert newer > term
    await other.publish(Assignment(machine="x", models={"m": 1}, term=newer))
    with pytest.raises(OutOfTerm):
        await one.publish(Assignment(machine="x", models={}, term=term))


def test_records_of_a_newer_version_are_understood() -> None:
    sent = encode(ENGINE)
    assert decode(sent) == ENGINE
    assert decode(sent[:-1] + b',"invented_later":{"x":1}}') == ENGINE
