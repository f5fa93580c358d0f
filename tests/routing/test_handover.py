"""Prefill/decode disaggregation in the router: which replica prefills and which decodes (R-ENG-11)."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, replace

import pytest

from penstock.backends.mailbox import Mailbox
from penstock.backends.native import NativeBackend
from penstock.config.routing import AdmissionConfig
from penstock.engine.config import Role
from penstock.engine.request import EngineLoad, Handover, HandoverLoad, Request, SamplingParams
from penstock.routing.admission.capacity import EngineCapacity
from penstock.routing.dispatch import Resilience
from penstock.routing.handover import HandoverPolicy
from penstock.routing.loads import total_load
from penstock.routing.replicas import ReplicaSet
from tests.engine_host.client import Running, serving
from tests.engine_host.scripted import ScriptedEngine
from tests.gateway.conftest import eventually

LONG, SHORT = 600, 20


class Seen(ScriptedEngine):
    """Remembers what was asked of it."""

    def __init__(self, role: Role, number: int, kv_format: str) -> None:
        super().__init__(instance=str(number), step_s=0.01)
        self.info = replace(self.info, role=role, kv_format=kv_format)
        self.seen: dict[str, Handover | None] = {}

    def submit(self, request: Request) -> None:
        self.seen[request.request_id] = request.handover
        super().submit(request)


@dataclass
class World:
    replicas: ReplicaSet
    engines: list[Seen]
    servers: list[Running]

    async def run(self, request_id: str, tokens: int, *, produced: int = 0) -> None:
        request = Request(request_id, [5] * tokens, SamplingParams(max_tokens=produced + 2), produced=[5] * produced)
        async for _ in self.replicas.generate(request):
            pass

    def where(self, request_id: str) -> list[int]:
        return [index for index, engine in enumerate(self.engines) if request_id in engine.seen]


@asynccontextmanager
async def world(*roles: Role, formats: tuple[str, ...] = ()) -> AsyncIterator[World]:
    async with AsyncExitStack() as stack:
        formats = formats or ("bf16",) * len(roles)
        engines = [Seen(role, number, formats[number]) for number, role in enumerate(roles)]
        servers = [stack.enter_context(serving(engine)) for engine in engines]
        backends = [NativeBackend(running.endpoint, name=str(index)) for index, running in enumerate(servers)]
        policy = HandoverPolicy(least_tokens=512, wait_s=3.0)
        resilience = Resilience(stall_s=1e6)
        replicas = ReplicaSet("scripted", backends, resilience=resilience, handover=policy)
        await replicas.start()
        stack.push_async_callback(replicas.close)
        await eventually(lambda: all(backend.ready for backend in backends))
        yield World(replicas, engines, servers)


async def test_long_prompts_name_a_prefill_replica_and_short_ones_do_not() -> None:
    async with world("prefill", "decode") as it:
        await it.run("long", LONG)
        await it.run("short", SHORT)
        await it.run("resumed", SHORT, produced=LONG)
        assert it.engines[0].seen == {}, "it runs no request of its own while another can"
        expected = Handover(it.servers[0].endpoint, least_tokens=512, wait_s=3.0)
        assert it.engines[1].seen == {"long": expected, "short": None, "resumed": expected}


async def test_a_replica_for_both_computes_its_own_prompts() -> None:
    async with world("prefill", "both") as it:
        await it.run("long", LONG)
        assert it.engines[1].seen == {"long": None}


async def test_without_another_a_prefill_replica_runs_whole_requests_and_without_it_the_other_computes() -> None:
    async with world("prefill", "decode") as it:
        it.servers[1].server.stop()
        await eventually(lambda: not it.replicas.members[1].backend.ready)
        await it.run("alone", LONG)
        assert it.where("alone") == [0]
    async with world("prefill", "decode") as it:
        it.servers[0].server.stop()
        await eventually(lambda: not it.replicas.members[0].backend.ready)
        await it.run("alone", LONG)
        assert it.engines[1].seen == {"alone": None}


async def test_the_prefill_replica_with_the_least_to_do_is_named() -> None:
    async with world("prefill", "prefill", "decode") as it:
        mailboxes = [Mailbox() for _ in range(4)]
        for number, mailbox in enumerate(mailboxes):
            request = Request(f"r{number}", [5] * LONG, SamplingParams(max_tokens=50))
            it.replicas.submit(request, mailbox)
        await eventually(lambda: len(it.engines[2].seen) == 4)
        named = [source.endpoint for source in it.engines[2].seen.values() if source is not None]
        assert sorted(named) == sorted([it.servers[0].endpoint, it.servers[1].endpoint] * 2)
        for mailbox in mailboxes:
            await mailbox.take()
        assert all(member.meter.in_flight == 0 for member in it.replicas.members[:2]), "prompts are done"
        for number in range(4):
            it.replicas.abort(f"r{number}")


async def test_a_prefill_replica_with_too_much_to_do_is_not_asked() -> None:
    async with world("prefill", "decode") as it:
        for number in range(11):
            request = Request(f"r{number}", [5] * LONG, SamplingParams(max_tokens=50))
            it.replicas.submit(request, Mailbox())
        await eventually(lambda: len(it.engines[1].seen) == 11)
        assert [source is not None for source in it.engines[1].seen.values()] == [True] * 9 + [False] * 2
        for number in range(11):
            it.replicas.abort(f"r{number}")
        await eventually(lambda: it.replicas.members[0].meter.in_flight == 0)


async def test_replicas_whose_blocks_differ_are_not_paired_and_the_log_says_so_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async with world("prefill", "decode", formats=("int8", "bf16")) as it:
        await it.run("a", LONG)
        await it.run("b", LONG)
        assert it.engines[1].seen == {"a": None, "b": None}
    (told,) = [record for record in caplog.records if "different KV block formats" in record.getMessage()]
    assert (vars(told)["prefill_has"], vars(told)["decode_has"]) == ("int8", "bf16")


async def test_a_prefill_replica_is_no_room_for_requests() -> None:
    async with world("prefill", "decode") as it:
        capacity = EngineCapacity(it.replicas, AdmissionConfig(ahead=0))
        assert capacity().slots == it.engines[1].info.max_running


def test_counts_of_several_engines_add_up() -> None:
    loads = [
        EngineLoad(handover=HandoverLoad(handovers=1, seconds=0.5)),
        EngineLoad(),
        EngineLoad(handover=HandoverLoad(handovers=2)),
    ]
    assert total_load(loads).handover == HandoverLoad(handovers=3, seconds=0.5)
    assert total_load(loads[1:2] * 2).handover is None
