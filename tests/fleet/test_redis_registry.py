"""The registry in Redis: what happens when Redis, or the trust in it, is gone."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from typing import Any

import pytest

from penstock.errors import ConfigError
from penstock.fleet import redis_registry, scripts
from penstock.fleet.records import Assignment
from penstock.fleet.registry import RegistryUnavailable
from penstock.protocol.fleet_secret import FleetSecret, generate
from tests.fleet.test_registry import ENGINE, MODEL, SECRET, die, registry, until


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(redis_registry, "SLACK_S", 0.05)
    monkeypatch.setattr(redis_registry, "POLL_S", 0.1)
    monkeypatch.setattr(redis_registry, "RETRY_S", 0.1)


@pytest.fixture
async def pair(valkey: Any) -> AsyncIterator[tuple[redis_registry.RedisRegistry, redis_registry.RedisRegistry]]:
    one, other = registry(valkey), registry(valkey)
    yield one, other
    await one.close()
    await other.close()


async def test_a_machine_with_another_secret_is_told_so_and_cannot_add_anything(
    valkey: Any, pair: tuple[Any, Any]
) -> None:
    one, _ = pair
    await one.publish(ENGINE)
    stranger = registry(valkey, FleetSecret((generate(),)))
    with pytest.raises(ConfigError, match="has another secret than this machine"):
        await stranger.check()
    with pytest.raises(ConfigError, match="has another secret"):
        await stranger.publish(MODEL)
    await stranger.close()


async def test_a_record_that_somebody_else_wrote_is_ignored(pair: tuple[Any, Any], caplog: Any) -> None:
    one, other = pair
    await one.publish(ENGINE)
    blob = await one._redis.hget(one._keys[1], "engine:a/m/0")
    await one._redis.hset(one._keys[1], "engine:b/m/0", blob[:32] + blob[32:].replace(b'"a"', b'"b"'))
    await one._redis.hset(one._keys[1], "engine:c/m/0", blob)
    with caplog.at_level(logging.ERROR):
        found = await until(other.follow(), lambda fleet: bool(fleet.engines))
    assert list(found.engines) == ["a/m/0"]
    assert "not signed" in str([vars(record).get("why") for record in caplog.records])


async def test_the_secret_is_changed_without_a_pause(valkey: Any, pair: tuple[Any, Any]) -> None:
    one, _ = pair
    await one.publish(ENGINE)
    new = generate()
    both, late = registry(valkey, FleetSecret((new, *SECRET.secrets))), registry(valkey, FleetSecret((new,)))
    assert (await until(both.follow(), lambda fleet: bool(fleet.engines))).engines == {ENGINE.id: ENGINE}
    await late.check()
    await both.close()
    await late.close()


async def test_what_lasts_is_put_back_even_if_that_fails_at_first_and_another_controller_was_elected(
    valkey: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    one, other, third = (registry(valkey, lease_s=60.0) for _ in range(3))
    term = await one.lead("a")
    assert term is not None
    await one.publish(MODEL, Assignment(machine="a", models={"m": 1}, term=term))
    await until(other.follow(), lambda fleet: bool(fleet.models and fleet.assignments))
    run, refused = other._run, []

    async def fails_once(script: str, *arguments: str | bytes) -> Any:
        if script is scripts.PUBLISH and not refused:
            refused.append(script)
            raise RegistryUnavailable("it does not answer")
        return await run(script, *arguments)

    monkeypatch.setattr(other, "_run", fails_once)
    die(one)
    await third._redis.flushall()
    assert await third.lead("b") is not None
    found = await until(third.follow(), lambda fleet: bool(fleet.models))
    assert refused and found.models == {"m": MODEL} and not found.assignments
    for made in (one, other, third):
        await made.close()


async def test_what_lasts_is_put_back_by_the_process_that_began_the_registry_too(valkey: Any) -> None:
    alone = registry(valkey)
    await alone.publish(ENGINE, MODEL)
    seen = alone.follow()
    await until(seen, lambda fleet: bool(fleet.engines and fleet.models))
    await alone._redis.flushall()  # and nobody else is there to begin it anew
    await until(seen, lambda fleet: bool(fleet.engines and fleet.models and alone._remembered))
    other = registry(valkey)
    await until(other.follow(), lambda fleet: bool(fleet.engines and fleet.models))
    await alone.close()
    await other.close()


@pytest.mark.slow
async def test_while_redis_is_away_everything_is_kept_and_an_empty_one_is_filled_again(
    valkey: Any, pair: tuple[Any, Any]
) -> None:
    one, other = pair
    await one.publish(ENGINE, MODEL)
    seen = other.follow()
    await until(seen, lambda fleet: bool(fleet.engines and fleet.models))
    valkey.stop()
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(3):
            async for fleet in seen:
                assert fleet.engines and fleet.models, "nothing is dropped because Redis is gone"
    with pytest.raises(RegistryUnavailable):
        await one.publish(MODEL)
    await one.publish(ENGINE)  # kept here until it is back
    valkey.start()
    assert valkey.is_running()
    seen, deadline = other.follow(), asyncio.get_running_loop().time() + 4
    async for fleet in seen:
        assert fleet.engines and fleet.models
        if asyncio.get_running_loop().time() > deadline or not other._remembered:
            break
    third = registry(valkey)
    found = await until(third.follow(), lambda fleet: bool(fleet.engines and fleet.models))
    assert found.engines == {ENGINE.id: ENGINE}, "published again by who had published it"
    assert found.models == {"m": MODEL}, "put back by who had read it"
    await third.close()


@pytest.mark.slow
async def test_leases_that_ran_out_while_redis_stood_still_begin_anew(valkey: Any, pair: tuple[Any, Any]) -> None:
    one, other = pair
    await one.publish(ENGINE)
    seen = other.follow()
    await until(seen, lambda fleet: bool(fleet.engines))
    await one._redis.client_pause(2000)
    await asyncio.sleep(3)
    found = await until(other.follow(), lambda fleet: True)
    assert found.engines
    die(one)
    await until(seen, lambda fleet: not fleet.engines)
