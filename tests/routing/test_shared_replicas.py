"""Several gateways in front of the same engines choose alike: prefixes and sessions stay where they are, through
whichever gateway they come, also when one dies (R-RT-3, R-OPS-3)."""

from __future__ import annotations

import itertools
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, replace

from penstock.backends.mailbox import Mailbox
from penstock.backends.native import NativeBackend
from penstock.engine.request import Request, SamplingParams
from penstock.routing.replicas import ReplicaSet
from tests.engine_host.client import Running, serving
from tests.engine_host.scripted import ScriptedEngine
from tests.gateway.conftest import eventually

_numbers = itertools.count()


@dataclass
class World:
    """Three engines; gateways are connected to all of them."""

    engines: list[ScriptedEngine]
    servers: list[Running]
    stack: AsyncExitStack

    async def gateway(self, shared: bool = True) -> ReplicaSet:
        backends = [NativeBackend(server.endpoint, name=f"host{i}.0") for i, server in enumerate(self.servers)]
        # How fast each engine seems to be would count, too: a clock that stands still measures nothing.
        replicas = ReplicaSet("m", backends, shared=shared, clock=lambda: 0.0)
        await replicas.start()
        self.stack.push_async_callback(replicas.close)
        await eventually(lambda: all(backend.ready for backend in backends))
        return replicas


@asynccontextmanager
async def world() -> AsyncIterator[World]:
    async with AsyncExitStack() as stack:
        engines = [ScriptedEngine(instance=str(index)) for index in range(3)]
        for engine in engines:
            engine.info = replace(engine.info, num_blocks=10_000)
        yield World(engines, [stack.enter_context(serving(engine)) for engine in engines], stack)


async def ask(gateway: ReplicaSet, prompt: list[int], session: str = "") -> str:
    """Runs a request; returns its replica."""
    request = Request(f"r{next(_numbers)}", prompt, SamplingParams(max_tokens=1), affinity=session, cache_salt="t")
    mailbox = Mailbox()
    name = gateway.submit(request, mailbox)
    while gateway.holds(request.request_id):
        await mailbox.take()
    return name


def heard(gateway: ReplicaSet, prompts: int) -> bool:
    """Whether the other gateway's prompts are known here."""
    index = gateway.dispatcher.order.policy._prefixes._held  # type: ignore[attr-defined]
    return sum(map(len, index.values())) >= prompts


async def test_a_conversation_goes_on_where_it_began_through_any_gateway_and_after_one_died() -> None:
    async with world() as running:
        one, two = await running.gateway(), await running.gateway()
        conversations = [[1000 * number + token for token in range(800)] for number in range(1, 7)]
        begun = [await ask(one, prompt) for prompt in conversations]
        await eventually(lambda: heard(two, 6 * 50))
        longer = [[*prompt, *range(160)] for prompt in conversations]
        assert [await ask(two, prompt) for prompt in longer] == begun
        await one.close()
        three = await running.gateway()
        await eventually(lambda: heard(three, 6 * 60))
        assert [await ask(three, [*prompt, *range(160)]) for prompt in longer] == begun, "the engines remember"
        assert len(set(begun)) > 1, "they are not all on one"


async def test_gateways_choose_the_same_replica_for_a_session_without_telling_each_other() -> None:
    async with world() as running:
        one, two = await running.gateway(shared=False), await running.gateway(shared=False)
        sessions = [str(number) for number in range(9)]
        chosen = [await ask(one, [number] * 20, session) for number, session in enumerate(sessions)]
        assert [await ask(two, [number] * 20, session) for number, session in enumerate(sessions)] == chosen
        assert len(set(chosen)) > 1
