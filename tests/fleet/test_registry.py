"""The registry of a fleet: what is published, followed, lost."""

from __future__ import annotations

import asyncio

import pytest

from penstock.fleet.records import Assignment, EngineRecord, ModelRecord, decode, encode
from penstock.fleet.registry import MemoryFleet, MemoryRegistry, OutOfTerm

ENGINE = EngineRecord(machine="a", model="m", replica="0", endpoint="tcp://10.0.0.1:5600")
MODEL = ModelRecord(name="m", description={"source": "m"})


async def test_followers_see_what_is_published_until_its_process_is_lost() -> None:
    fleet = MemoryFleet()
    one, other = MemoryRegistry(fleet), MemoryRegistry(fleet)
    seen = other.follow()
    assert (await anext(seen)).engines == {}
    await one.publish(ENGINE, MODEL)
    assert (await anext(seen)).engines == {"a/m/0": ENGINE}
    fleet.lose(one)
    found = await anext(seen)
    assert found.engines == {} and found.models == {"m": MODEL}, "wishes outlast the process that wrote them"
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.01):
            await anext(seen)


async def test_one_controller_at_a_time_and_an_old_one_cannot_write() -> None:
    fleet = MemoryFleet()
    one, other = MemoryRegistry(fleet), MemoryRegistry(fleet)
    term = await one.lead("a")
    assert term == 1 and await other.lead("b") is None and await one.lead("a") == 1
    fleet.lose(one)
    assert await other.lead("b") == 2
    await other.publish(Assignment(machine="x", models={"m": 1}, term=2))
    with pytest.raises(OutOfTerm):
        await one.publish(Assignment(machine="x", models={}, term=term))


def test_records_of_a_newer_version_are_understood() -> None:
    sent = encode(ENGINE)
    assert decode(sent) == ENGINE
    assert decode(sent[:-1] + b',"invented_later":{"x":1}}') == ENGINE
