"""The queue at a real gateway: who goes first, who is told to come back, who gets a smaller model."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from penstock.config.routing import AdmissionConfig
from penstock.config.schema import TierConfig
from penstock.gateway.process.gateway import Gateway
from penstock.gateway.process.main import serve
from penstock.gateway.process.settings import GatewaySettings, ModelSettings
from penstock.routing.registry import ModelRegistry, ServedModel
from penstock.routing.replicas import ReplicaSet
from penstock.testing.in_process_backend import InProcessBackend
from penstock.text import TextModel
from tests.gateway.conftest import Running, Serving, eventually
from tests.ports import free_port
from tests.scripted import ScriptedEngine

TIERS = (
    TierConfig(name="standard", priority=1, weight=2.0),
    TierConfig(name="premium", priority=0, weight=4.0),
)


def one_at_a_time(**more: Any) -> AdmissionConfig:
    return AdmissionConfig(**{"slots": 1, "ahead": 0, "shed_from": 1.0, "wait_s": 120.0, **more})


def held(text: TextModel) -> ScriptedEngine:
    """An engine that does not go on before it is told to."""
    engine = ScriptedEngine(text)
    engine.hold = True
    return engine


async def queued(running: Running, count: int) -> None:
    desk = running.parts.admissions._admission
    assert desk is not None
    await eventually(lambda: desk._controllers["tiny"].queue.state("", 0).depth == count)


async def test_premium_goes_first_and_nothing_beyond_the_slots_reaches_the_engine(
    serving: Serving, text: TextModel, tmp_path: Path
) -> None:
    engine = held(text)
    store = f"sqlite:///{tmp_path / 'state.db'}"
    async with serving(engine, store_url=store, tiers=TIERS, default_tier="standard", admission=one_at_a_time()) as r:
        keys: dict[str, str] = {}
        for tenant, tier in (("shop", "standard"), ("bank", "premium")):
            admin = {"authorization": f"Bearer {keys['shop']}"} if keys else {}
            await r.client.post("/v1/admin/tenants", json={"id": tenant, "tier": tier}, headers=admin)
            made = await r.client.post(
                "/v1/admin/keys", json={"tenant": tenant, "scopes": ["inference", "admin", "metrics"]}, headers=admin
            )
            keys[tenant] = made.json()["key"]
        r.client.headers["authorization"] = f"Bearer {keys['shop']}"

        def ask(tenant: str, id: str, **headers: str) -> asyncio.Task[httpx.Response]:
            sent = {"authorization": f"Bearer {keys[tenant]}", **headers}
            return asyncio.create_task(
                r.client.post("/v1/completions", json={"model": "tiny", "prompt": id}, headers=sent)
            )

        tasks = [ask("shop", "first")]
        await eventually(lambda: len(engine.seen) == 1)
        for number, (tenant, id, headers) in enumerate(
            [
                ("shop", "later", {}),
                ("shop", "lowest", {"x-priority": "batch"}),
                ("shop", "no-higher", {"x-priority": "premium"}),
                ("bank", "urgent", {}),
            ],
            start=1,
        ):
            tasks.append(ask(tenant, id, **headers))
            await queued(r, number)
        assert len(engine.seen) == 1
        assert await r.metric('penstock_queue_depth{model_name="tiny",class="premium"}') == 1
        assert await r.metric('penstock_queue_depth{model_name="tiny",class="batch"}') == 1
        assert await r.metric('vllm:num_requests_waiting{model_name="tiny",engine="0"}') == 4, "as autoscalers see it"
        assert await r.metric('penstock_queue_limit{model_name="tiny"}') == 256
        engine.hold = False
        replies = await asyncio.gather(*tasks)
        assert [reply.status_code for reply in replies] == [200] * 5
        order = [text.decode(request.prompt) for request in engine.seen]
        assert order == ["first", "urgent", "later", "no-higher", "lowest"]
        assert [request.priority for request in engine.seen] == [0, -1, 0, 0, 1]
        assert await r.metric('penstock_queue_wait_seconds_count{model_name="tiny",class="standard"}') == 3


async def test_whoever_waits_too_long_or_finds_the_queue_full_is_told_when_to_return(
    serving: Serving, text: TextModel
) -> None:
    engine = held(text)
    shed = 'penstock_sheds_total{model_name="tiny",class="standard",reason='
    async with serving(engine, admission=one_at_a_time(queue=2)) as running:
        tasks = [asyncio.create_task(running.chat()) for _ in range(3)]
        await queued(running, 2)
        full = await running.chat()
        assert (full.status_code, full.headers["x-penstock-reason"]) == (503, "queue_full")
        assert full.json()["error"]["code"] == "overloaded" and int(full.headers["retry-after"]) >= 1
        assert await running.metric(shed + '"queue_full"}') == 1
        engine.hold = False
        assert {reply.status_code for reply in await asyncio.gather(*tasks)} == {200}
    engine = held(text)
    async with serving(engine, admission=one_at_a_time(wait_s=0.4, queue=2)) as running:
        first = asyncio.create_task(running.chat())
        await eventually(lambda: len(engine.seen) == 1)
        waiting = [asyncio.create_task(running.chat(stream=stream)) for stream in (False, True)]
        for reply in await asyncio.gather(*waiting):
            assert (reply.status_code, reply.headers["x-penstock-reason"]) == (503, "queue_timeout")
            assert int(reply.headers["retry-after"]) >= 1
        engine.hold = False
        assert (await first).status_code == 200
        assert (await running.chat()).status_code == 200
        assert len(engine.seen) == 2
        assert await running.metric(shed + '"queue_timeout"}') == 2
        assert await running.metric('penstock_rejections_total{reason="queue_timeout"}') == 2


async def test_a_stream_that_waited_too_long_is_refused_with_a_status_also_when_timers_fire_early(
    serving: Serving, text: TextModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As those of uvloop do, on which gateways run."""
    wait = asyncio.wait

    async def early(awaited: Any, **more: Any) -> Any:
        if more.get("timeout") is not None:
            more["timeout"] *= 0.9
        return await wait(awaited, **more)

    monkeypatch.setattr(asyncio, "wait", early)
    engine = held(text)
    async with serving(engine, admission=one_at_a_time(wait_s=0.3)) as running:
        first = asyncio.create_task(running.chat())
        await eventually(lambda: len(engine.seen) == 1)
        reply = await running.chat(stream=True)
        assert (reply.status_code, reply.headers.get("x-penstock-reason")) == (503, "queue_timeout")
        engine.hold = False
        await first


async def test_a_client_that_leaves_the_queue_never_reaches_the_engine(serving: Serving, text: TextModel) -> None:
    engine = held(text)
    async with serving(engine, admission=one_at_a_time()) as running:
        first = asyncio.create_task(running.chat())
        await eventually(lambda: len(engine.seen) == 1)
        body = {"model": "tiny", "prompt": "x", "stream": True}
        leaving = asyncio.create_task(running.client.post("/v1/completions", json=body))
        await queued(running, 1)
        leaving.cancel()
        await queued(running, 0)
        engine.hold = False
        assert (await first).status_code == 200
        assert len(engine.seen) == 1


async def test_a_long_queue_keeps_the_stream_alive(serving: Serving, text: TextModel) -> None:
    engine = held(text)
    async with serving(engine, admission=one_at_a_time(), hold_status_s=0.1, keep_alive_s=0.05) as running:
        first = asyncio.create_task(running.chat())
        await eventually(lambda: len(engine.seen) == 1)
        body = {"model": "tiny", "prompt": "x", "stream": True, "max_tokens": 4}
        async with running.client.stream("POST", "/v1/completions", json=body) as reply:
            lines = reply.aiter_lines()
            assert [await anext(lines) for _ in range(3)] == [": keep-alive", "", ": keep-alive"]
            engine.hold = False
            rest = [line async for line in lines]
            assert rest[-2:] == ["data: [DONE]", ""]
        await first


async def test_what_clients_may_say_about_waiting(serving: Serving, text: TextModel) -> None:
    engine = held(text)
    async with serving(engine, admission=one_at_a_time()) as running:
        post = running.client.post
        body = {"model": "tiny", "prompt": "x"}
        for header in ({"x-priority": "king"}, {"x-slo-ttft-ms": "soon"}, {"x-slo-ttft-ms": "-1"}):
            refused = await post("/v1/completions", json=body, headers=header)
            assert refused.status_code == 400 and refused.json()["error"]["param"] == next(iter(header))
        first = asyncio.create_task(running.chat())
        await eventually(lambda: len(engine.seen) == 1)
        late = await post("/v1/completions", json=body, headers={"x-slo-ttft-ms": "50"})
        assert late.headers["x-penstock-reason"] == "queue_timeout"
        engine.hold = False
        await first


@asynccontextmanager
async def gateway(registry: ModelRegistry, **settings: Any) -> AsyncIterator[tuple[httpx.AsyncClient, Gateway]]:
    options = GatewaySettings(port=free_port(), drain_s=0.2, **settings)
    stop = asyncio.Event()
    listening: asyncio.Future[Gateway] = asyncio.get_running_loop().create_future()
    task = asyncio.create_task(serve(options, registry, stop, listening.set_result))
    await asyncio.wait((task, listening), return_when=asyncio.FIRST_COMPLETED)
    try:
        async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{options.port}", timeout=120) as client:
            yield client, listening.result()
    finally:
        stop.set()
        await task


async def test_best_effort_callers_get_the_smaller_model_when_too_many_wait(text: TextModel) -> None:
    large, small = held(text), ScriptedEngine(text, "small says hi", max_model_len=128)
    engines = (("large", large), ("small", small))
    registry = ModelRegistry(ServedModel(name, text, InProcessBackend(engine)) for name, engine in engines)
    async with gateway(
        registry,
        models=(ModelSettings("large", "", downgrade_to="small"), ModelSettings("small", "")),
        default_tier="free",
        tiers=(TierConfig(name="free", best_effort=True),),
        admission=one_at_a_time(downgrade_depth=2),
    ) as (client, composed):
        body = {"model": "large", "prompt": "x", "max_tokens": 20}

        def ask(**more: Any) -> asyncio.Task[httpx.Response]:
            return asyncio.create_task(client.post("/v1/completions", json={**body, **more}))

        assert composed.admissions._admission is not None
        queue = composed.admissions._admission._controllers["large"].queue
        waiting = [ask() for _ in range(4)]
        await eventually(lambda: queue.state("", 0).depth == 3)
        reply = await ask()
        assert reply.headers["x-penstock-model"] == "small" and reply.headers["x-penstock-route"] == "downgrade"
        assert reply.json()["model"] == "small" and reply.json()["choices"][0]["text"] == "small says hi"
        too_long = ask(prompt="x" * 200)  # would not fit the smaller one for sure, so it waits
        await eventually(lambda: queue.state("", 0).depth == 4)
        large.hold = False
        replies = await asyncio.gather(*waiting, too_long)
        assert {r.headers["x-penstock-model"] for r in replies} == {"large"}
        assert 'penstock_downgrades_total{model_name="large"} 1' in (await client.get("/metrics")).text


async def test_sessions_stay_on_their_replica(text: TextModel) -> None:
    backend = ReplicaSet("tiny", [InProcessBackend(ScriptedEngine(text), name=str(index)) for index in range(2)])
    async with gateway(ModelRegistry([ServedModel("tiny", text, backend)]), models=(ModelSettings("tiny", ""),)) as (
        client,
        _,
    ):

        async def where(prompt: str, **more: Any) -> str:
            body = {"model": "tiny", "prompt": prompt, "max_tokens": 2, **more}
            return str((await client.post("/v1/completions", json=body)).headers["x-penstock-replica"])

        assert {await where(letter) for letter in "abcdef"} == {"0", "1"}
        for key in ("one", "two"):
            assert len({await where(letter, prompt_cache_key=key) for letter in "abcdef"}) == 1


async def test_gateways_that_share_a_queue_in_redis(text: TextModel, valkey: Any) -> None:
    """Two gateways, an engine each, one slot in all: what one runs, the other waits for."""
    engines = [held(text), held(text)]
    shared = one_at_a_time(url=f"redis://127.0.0.1:{valkey.port}")
    async with AsyncExitStack() as stack:
        clients = [
            (
                await stack.enter_async_context(
                    gateway(
                        ModelRegistry([ServedModel("tiny", text, InProcessBackend(engine))]),
                        models=(ModelSettings("tiny", ""),),
                        admission=shared,
                    )
                )
            )[0]
            for engine in engines
        ]
        body = {"model": "tiny", "prompt": "x", "max_tokens": 2}
        first = asyncio.create_task(clients[0].post("/v1/completions", json=body))
        await eventually(lambda: len(engines[0].seen) == 1)
        second = asyncio.create_task(clients[1].post("/v1/completions", json=body))
        await asyncio.sleep(0.3)
        assert not engines[1].seen
        engines[0].hold = engines[1].hold = False
        assert [(await task).status_code for task in (first, second)] == [200, 200]
        assert len(engines[1].seen) == 1


async def test_the_wait_in_the_queue_counts_towards_the_first_token(serving: Serving, text: TextModel) -> None:
    """What is left is what a request waits for an engine that dies then."""
    engine = held(text)
    async with serving(engine, admission=one_at_a_time()) as r:
        body = {"model": "tiny", "prompt": "x"}
        first = asyncio.create_task(r.client.post("/v1/completions", json=body))
        await eventually(lambda: len(engine.seen) == 1)
        second = asyncio.create_task(r.client.post("/v1/completions", json=body, headers={"x-slo-ttft-ms": "60000"}))
        await queued(r, 1)
        await asyncio.sleep(0.5)
        engine.hold = False
        assert [reply.status_code for reply in await asyncio.gather(first, second)] == [200, 200]
        left = engine.seen[-1].patience_s
        assert left is not None and 50 < left < 59.6
