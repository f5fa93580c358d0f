"""Which server of a remote model gets a request: by the servers' own load, their providers' limits and their health
(R-RT-8)."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

import pytest

from penstock.backends.remote.chunk import Chunk
from penstock.backends.remote.failure import ServerOverloaded
from penstock.backends.remote.load import ServerLoad
from penstock.backends.remote.server import RemoteServer
from penstock.backends.remote.upstream import DialectName, Upstream
from penstock.identity.labels import NO_DEMAND
from penstock.protocol.errors import EngineUnavailable, Overloaded
from penstock.routing.remotes import RemoteModel
from tests.backends.remote.scripted_server import Asked, Reply, ScriptedServer, error, reply_json, scripted, sse
from tests.backends.remote.test_open_servers import chunk
from tests.gateway.conftest import eventually

ANSWER = sse(chunk({"content": "hi"}), chunk({}, "stop"), done=True)


@asynccontextmanager
async def model(*servers: ScriptedServer, dialect: DialectName = "vllm", **options: Any) -> AsyncIterator[RemoteModel]:
    clients = [RemoteServer(str(n), Upstream(s.root, "m", dialect=dialect)) for n, s in enumerate(servers)]
    made = RemoteModel("far", clients, **{"metrics_s": 0.05, "check_s": 0.05, **options})
    await made.start()
    try:
        yield made
    finally:
        await made.close()


def metrics(running: int, waiting: int, kv: float = 0.0) -> Reply:
    lines = (f"num_requests_running {running}", f"num_requests_waiting {waiting}", f"kv_cache_usage_perc {kv}")
    return Reply("".join(f"vllm:{line}\n" for line in lines).encode())


async def answer(it: RemoteModel, tokens: int = 1) -> list[Chunk]:
    return [c async for c in it.answer({"messages": []}, "r", it.choose(NO_DEMAND, tokens=tokens), NO_DEMAND)]


async def test_the_least_loaded_by_their_own_metrics() -> None:
    loads = [metrics(9, 4), metrics(2, 0)]
    async with AsyncExitStack() as stack:
        servers = [await stack.enter_async_context(scripted(lambda asked, n=n: loads[n])) for n in range(2)]
        it = await stack.enter_async_context(model(*servers, max_waiting=5))
        await eventually(lambda: all(member.server.load for member in it.members))
        assert it.choose(NO_DEMAND).server.name == "1"
        it.members[1].server.in_flight = 20  # sent since then
        assert it.choose(NO_DEMAND).server.name == "0"
        it.members[1].server.in_flight = 0
        loads[1] = metrics(2, 5)
        await eventually(lambda: it.members[1].waiting == 5)
        assert it.choose(NO_DEMAND).server.name == "0", "the other one is full"
        loads[0] = metrics(9, 6)
        await eventually(lambda: it.members[0].waiting == 6)
        with pytest.raises(Overloaded, match="11 waiting"):
            it.choose(NO_DEMAND)
        loads[0] = Reply(b"", 404)
        await eventually(lambda: it.members[0].server.load is None)
        assert it.choose(NO_DEMAND).server.name == "0", "a server that does not tell is not full"


async def test_a_server_that_need_not_load_the_model_is_preferred() -> None:
    async with scripted(reply_json({"models": []})) as there, model(there, there, dialect="ollama") as it:
        await eventually(lambda: all(member.server.load for member in it.members))
        it.members[1].server.load = ServerLoad(loaded=True)
        assert it.members[1].order() < it.members[0].order()


async def test_nothing_is_sent_into_a_limit_that_is_used_up() -> None:
    spent = {
        "x_ratelimit_limit_requests": "10",
        "x_ratelimit_remaining_requests": "0",
        "x_ratelimit_reset_requests": "100s",
    }

    def script(asked: Asked) -> Reply:
        named = {name.replace("_", "-"): value for name, value in spent.items()}
        return Reply(ANSWER, headers={"content-type": "text/event-stream", **named})

    async with scripted(script) as there, model(there, dialect="openai", check_s=60.0) as it:
        await eventually(lambda: bool(there.asked))  # the first check
        there.asked.clear()
        assert await answer(it)
        with pytest.raises(Overloaded, match="rate limit") as refused:
            it.choose(NO_DEMAND)
        assert refused.value.reason == "rate_limit" and 5 <= (refused.value.retry_after or 0) <= 10
        assert len(there.asked) == 1
        assert it.members[0].server.limits.remaining == {"requests": 0}


async def test_a_refusal_sends_requests_elsewhere_until_it_is_over() -> None:
    def busy(asked: Asked) -> Reply:
        return error(429, {"error": {"message": "slow down"}}, retry_after="30") if asked.body else Reply(b"")

    async with scripted(busy) as first, scripted(Reply(ANSWER)) as second:
        async with model(first, second, dialect="openai", retry_share=10.0) as it:
            it.members[1].server.in_flight = 1
            assert await answer(it), "retried on the other"
            assert it.members[0].breaker.state == "closed" and it.members[0].server.wait_s() > 20
            assert it.choose(NO_DEMAND).server.name == "1"
        async with model(first, dialect="openai") as it:
            with pytest.raises(ServerOverloaded):
                await answer(it)
            with pytest.raises(Overloaded, match="rate limit"):
                it.choose(NO_DEMAND)


async def test_a_key_that_is_refused_opens_the_breaker() -> None:
    denied = error(401, {"error": {"message": "Incorrect API key provided: sk-up***"}})
    async with scripted(denied) as there, model(there, dialect="openai", check_s=60.0) as it:
        for _ in range(3):
            with pytest.raises(EngineUnavailable):
                await answer(it)
        assert it.members[0].breaker.state == "open" and not it.ready


async def test_embeddings_and_counts_are_retried_elsewhere() -> None:
    def works(asked: Asked) -> Reply:
        if "tokenize" in asked.target:
            return reply_json({"count": 2, "tokens": [1, 2]})
        return reply_json({"data": [{"index": 0, "embedding": [1.0]}], "usage": {"prompt_tokens": 1}})

    async with (
        scripted(error(500, {})) as broken,
        scripted(works) as fine,
        model(broken, fine, retry_share=10.0, check_s=60.0) as it,
    ):
        it.members[1].server.in_flight = 1
        assert (await it.embed(["a"], "r", NO_DEMAND)).vectors == [[1.0]]
        assert (await it.count({"prompt": "a"}, "r", NO_DEMAND)).count == 2
        assert it.members[1].server.in_flight == 1
