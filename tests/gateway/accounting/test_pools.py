"""Pools at a real gateway: rules, spill-over, reserved slots, windows, data rules; and a pool that dies."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

import httpx
import pytest

from penstock.config.pools import PoolConfig, PoolRuleConfig, ReserveConfig
from penstock.config.routing import AdmissionConfig, RegionRuleConfig, RoutingConfig
from penstock.gateway.process.gateway import Gateway
from penstock.gateway.process.settings import ModelSettings
from penstock.protocol.errors import EngineLost
from penstock.routing.admission.pools import PooledAdmission
from penstock.routing.dispatch import Resilience
from penstock.routing.place import ReplicaPlace
from penstock.routing.placement import Placer
from penstock.routing.registry import ModelRegistry, ServedModel
from penstock.routing.replicas import ReplicaSet
from penstock.testing.in_process_backend import InProcessBackend
from penstock.text import TextModel
from tests.gateway.accounting.test_admission import gateway, held, one_at_a_time
from tests.gateway.conftest import eventually
from tests.scripted import ScriptedEngine

RULES = (
    PoolRuleConfig(pool="long", min_prompt_tokens=100),
    PoolRuleConfig(pool="batch", classes=("batch",), spill=("interactive",)),
    PoolRuleConfig(pool="batch", asked=True),
    PoolRuleConfig(pool="interactive"),
)
POOLS = (PoolConfig(name="interactive"), PoolConfig(name="batch"), PoolConfig(name="long"))


class World:
    """A gateway with a model `tiny` whose replicas are in pools."""

    def __init__(self, client: httpx.AsyncClient, parts: Gateway, engines: dict[str, ScriptedEngine]) -> None:
        self.client = client
        self.parts = parts
        self.engines = engines
        admission = parts.admissions._admission
        assert admission is not None
        found = admission._controllers["tiny"]
        assert isinstance(found, PooledAdmission)
        self.admission = found

    def ask(self, prompt: str = "x", **headers: str) -> asyncio.Task[httpx.Response]:
        body = {"model": "tiny", "prompt": prompt, "max_tokens": 8, "seed": 1}
        return asyncio.create_task(self.client.post("/v1/completions", json=body, headers=headers))

    async def queued(self, pool: str, count: int) -> None:
        await eventually(lambda: self.admission.pools[pool].common.queue.state("", 0).depth == count)

    def go_on(self) -> None:
        for engine in self.engines.values():
            engine.hold = False


@asynccontextmanager
async def world(
    text: TextModel,
    pools: Sequence[PoolConfig] = POOLS,
    rules: Sequence[PoolRuleConfig] = RULES,
    regions: Sequence[RegionRuleConfig] = (),
    admission: AdmissionConfig | None = None,
    **windows: int,
) -> AsyncIterator[World]:
    engines = {pool.name: held(text) for pool in pools}
    for name, window in windows.items():
        engines[name] = ScriptedEngine(text, max_model_len=window)
        engines[name].hold = True
    backend = ReplicaSet(
        "tiny",
        [InProcessBackend(engine, name=f"{name}-0") for name, engine in engines.items()],
        places={f"{name}-0": ReplicaPlace(name, "eu" if name == "interactive" else "us") for name in engines},
        placer=Placer(pools, rules),
        resilience=Resilience(park_s=0.3),
    )
    async with gateway(
        ModelRegistry([ServedModel("tiny", text, backend)]),
        models=(ModelSettings("tiny", ""),),
        admission=admission or one_at_a_time(),
        routing=RoutingConfig(regions=tuple(regions)),
    ) as (client, parts):
        yield World(client, parts, engines)


async def test_a_full_pool_delays_only_requests_that_may_run_nowhere_else(text: TextModel) -> None:
    async with world(text, long=400, batch=100, interactive=100) as it:
        first = it.ask(**{"x-priority": "batch"})
        await eventually(lambda: len(it.engines["batch"].seen) == 1)
        strict = [it.ask(**{"x-penstock-pool": "batch"}) for _ in range(2)]
        await it.queued("batch", 2)
        long = it.ask("x" * 150)
        await eventually(lambda: len(it.engines["long"].seen) == 1)
        spilled = it.ask(**{"x-priority": "batch"})  # batch is full, interactive is not
        await eventually(lambda: len(it.engines["interactive"].seen) == 1)
        assert it.admission.spills == {("batch", "interactive"): 1}
        it.engines["interactive"].hold = False
        quick = await it.ask()
        assert quick.headers["x-penstock-pool"] == "interactive" and not it.engines["batch"].seen[1:]
        metrics = (await it.client.get("/metrics")).text
        assert 'penstock_pool_queue_depth{model_name="tiny",pool="batch"} 2' in metrics
        assert 'penstock_pool_spills_total{model_name="tiny",pool="batch",to="interactive"} 1' in metrics
        assert 'engine="long-0",pool="long",region="us"' in metrics
        it.go_on()
        replies = await asyncio.gather(first, spilled, long, *strict)
        assert [reply.status_code for reply in replies] == [200] * 5
        assert [reply.headers["x-penstock-pool"] for reply in replies[1:4]] == ["interactive", "long", "batch"]
        trace = (await it.client.get(f"/v1/traces/{replies[2].headers['x-request-id']}")).json()
        (prefill,) = [phase for phase in trace["phases"] if phase["name"] == "prefill"]
        assert (prefill["detail"]["pool"], prefill["detail"]["why"]) == ("long", "pool_rules[0]: 150 prompt tokens")
        too_long = await it.ask("x" * 99)  # interactive holds 100 with the answer, and no rule sends it to long
        assert too_long.status_code == 400 and "context length is 100 tokens" in too_long.json()["error"]["message"]
        refused = await it.ask(**{"x-penstock-pool": "long"})
        assert refused.status_code == 400 and refused.json()["error"]["param"] == "x-penstock-pool"


async def test_a_waiting_request_moves_when_another_pool_has_room_or_its_own_is_down(text: TextModel) -> None:
    rules = (PoolRuleConfig(pool="batch", spill=("interactive",)),)
    async with world(text, POOLS[:2], rules) as it:
        running = [it.ask(), it.ask()]
        await eventually(lambda: all(engine.seen for engine in it.engines.values()))
        waiting = it.ask()
        await it.queued("batch", 1)
        it.engines["interactive"].hold = False
        assert (await waiting).headers["x-penstock-pool"] == "interactive"
        members = it.parts.registry.route("tiny").model.backend.members  # type: ignore[attr-defined]
        down = next(member for member in members if member.place.pool == "batch")
        down.backend._went_down(EngineLost())
        replies = await asyncio.gather(*running)
        assert [reply.status_code for reply in replies] == [200, 200], "the tokens of the dead pool go on elsewhere"
        assert len({reply.json()["choices"][0]["text"] for reply in replies}) == 1


async def test_reserved_slots_wait_for_their_owner(text: TextModel) -> None:
    pools = (PoolConfig(name="only", reserve=(ReserveConfig(priority="premium", slots=1),)),)
    rules = (PoolRuleConfig(pool="only"),)
    async with world(text, pools, rules, admission=one_at_a_time(slots=2)) as it:
        engine = it.engines["only"]
        first, second = it.ask(), it.ask()
        await it.queued("only", 1)
        await eventually(lambda: len(engine.seen) == 1)  # the other slot is not theirs
        body = {"model": "tiny", "prompt": "x", "max_tokens": 8, "service_tier": "priority"}
        owner = asyncio.create_task(it.client.post("/v1/completions", json=body))
        await eventually(lambda: len(engine.seen) == 2)
        metrics = (await it.client.get("/metrics")).text
        assert 'penstock_pool_reserved_in_flight{model_name="tiny",pool="only",owner="premium"} 1' in metrics
        many = await it.client.post("/v1/completions", json={**body, "service_tier": "auto", "n": 2})
        assert many.status_code == 503, "two sequences would take the owner's slot"
        it.go_on()
        assert [reply.status_code for reply in await asyncio.gather(first, second, owner)] == [200] * 3
        assert all(not load.held for load in it.admission.pools["only"].loads().values())


async def test_a_data_rule_holds_even_if_nothing_else_works(text: TextModel) -> None:
    pinned = (RegionRuleConfig(regions=("us",)),)
    async with world(text, POOLS[:1], (), regions=pinned) as it:
        it.go_on()
        refused = await it.ask()
        assert refused.status_code == 403 and refused.json()["error"]["code"] == "data_rule"
        assert "routing.regions[0] requires region=us" in refused.json()["error"]["message"]
        assert not it.engines["interactive"].seen


@pytest.mark.slow
async def test_reserved_slots_hold_for_all_gateways_that_share_queues_in_redis(text: TextModel, valkey: Any) -> None:
    pools = (PoolConfig(name="only", reserve=(ReserveConfig(priority="premium", slots=1),)),)
    shared = one_at_a_time(slots=3, url=f"redis://127.0.0.1:{valkey.port}")
    async with AsyncExitStack() as stack:
        worlds = [
            await stack.enter_async_context(world(text, pools, (PoolRuleConfig(pool="only"),), admission=shared))
            for _ in range(2)
        ]
        asked = [it.ask() for it in worlds for _ in range(3)]
        seen = [it.engines["only"].seen for it in worlds]
        await eventually(lambda: sum(map(len, seen)) == 2)
        await asyncio.sleep(1.0)
        assert sum(map(len, seen)) == 2, "one of three slots is kept, whichever gateway asks"
        body = {"model": "tiny", "prompt": "x", "max_tokens": 8, "service_tier": "priority"}
        owner = asyncio.create_task(worlds[1].client.post("/v1/completions", json=body))
        await eventually(lambda: sum(map(len, seen)) == 3)
        for it in worlds:
            it.go_on()
        assert [reply.status_code for reply in await asyncio.gather(*asked, owner)] == [200] * 7
