"""Several replicas behind one backend: requests survive the loss of theirs, token by token (R-RT-7)."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from typing import Any

import pytest

from penstock.backends.mailbox import Mailbox
from penstock.backends.native import NativeBackend
from penstock.engine.request import Delta, Request, SamplingParams
from penstock.metering.engine_counts import merged, usage_of
from penstock.protocol.errors import ApiError, EngineLost, EngineUnavailable, InvalidRequest, ServerError
from penstock.routing.dispatch import Resilience
from penstock.routing.replicas import ReplicaSet
from tests.engine_host.client import Running, serving
from tests.engine_host.scripted import ScriptedEngine
from tests.gateway.conftest import eventually
from tests.ports import free_port

PATIENT = Resilience(stall_s=1e6)
"""However busy the machine is, no replica is taken for stuck."""


@dataclass
class World:
    """Replicas on real sockets; token k of a request is its prompt's first token plus k."""

    replicas: ReplicaSet
    engines: list[ScriptedEngine]
    servers: list[Running]
    stack: AsyncExitStack
    now: float = 0.0
    """The clock of the replicas: it stands still unless a test moves it."""

    def go_on(self) -> None:
        """Of all engines that are paused."""
        for engine in self.engines:
            engine.pause_at = None

    def crash(self, index: int) -> None:
        """No last words: the connection just closes."""
        self.servers[index].server._peers.tell_all = lambda *args: None  # type: ignore[method-assign]
        self.stop(index)

    def stop(self, index: int) -> None:
        running = self.servers[index]
        running.server.stop()
        running.join()
        running.server._listener.close()
        self.engines[index].running.clear()

    def start(self, index: int) -> None:
        self.engines[index] = ScriptedEngine(instance=f"again {index}", step_s=0.01)
        self.servers[index] = self.stack.enter_context(serving(self.engines[index], self.servers[index].endpoint))

    def on(self, request_id: str) -> int:
        return next(i for i, engine in enumerate(self.engines) if request_id in engine.running)


@asynccontextmanager
async def world(
    count: int = 2, *, resilience: Resilience = PATIENT, pause_at: int | None = None
) -> AsyncIterator[World]:
    """`pause_at`: the engines work no further than that, so that what happens then happens in the midst of it."""
    async with AsyncExitStack() as stack:
        engines = [ScriptedEngine(instance=str(index), step_s=0.01) for index in range(count)]
        for engine in engines:
            engine.pause_at = pause_at
        # Some are started again at the same port.
        servers = [stack.enter_context(serving(engine, f"tcp://127.0.0.1:{free_port()}")) for engine in engines]
        backends = [NativeBackend(running.endpoint, name=str(index)) for index, running in enumerate(servers)]
        replicas = ReplicaSet("scripted", backends, resilience=resilience, clock=lambda: it.now)
        it = World(replicas, engines, servers, stack)
        await replicas.start()
        stack.push_async_callback(replicas.close)
        await eventually(lambda: all(backend.ready for backend in backends))
        yield it


class Cable:
    """A TCP path that can be cut: as with a real one, nobody is told, and what was sent arrives once it is mended."""

    def __init__(self, port: int) -> None:
        self._to = port
        self._whole = asyncio.Event()
        self._whole.set()
        self._ends: set[asyncio.Task[None]] = set()
        self._server: asyncio.Server | None = None

    async def lay(self) -> str:
        self._server = await asyncio.start_server(self._connect, "127.0.0.1", 0)
        return f"tcp://127.0.0.1:{self._server.sockets[0].getsockname()[1]}"

    def cut(self) -> None:
        self._whole.clear()

    def mend(self) -> None:
        self._whole.set()

    async def close(self) -> None:
        assert self._server is not None
        self._server.close()
        for end in self._ends:
            end.cancel()
        await asyncio.gather(*self._ends, return_exceptions=True)

    async def _connect(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await self._whole.wait()
        there, back = await asyncio.open_connection("127.0.0.1", self._to)
        for source, sink in ((reader, back), (there, writer)):
            self._ends.add(asyncio.create_task(self._carry(source, sink)))

    async def _carry(self, source: asyncio.StreamReader, sink: asyncio.StreamWriter) -> None:
        try:
            while data := await source.read(65536):
                await self._whole.wait()
                sink.write(data)
        except ConnectionError:
            pass  # the other end has hung up, and so does this one
        finally:
            sink.close()


def request(id: str, tokens: int = 40, **options: Any) -> Request:
    return Request(id, [100], SamplingParams(max_tokens=tokens), **options)


async def read(replicas: ReplicaSet, asked: Request) -> list[int]:
    tokens: list[int] = []
    async for delta in replicas.generate(asked):
        tokens += delta.tokens
    return tokens


async def test_requests_are_spread_and_the_set_looks_like_one_engine() -> None:
    async with world() as it:
        answers = await asyncio.gather(*(read(it.replicas, request(f"r{i}")) for i in range(8)))
        assert answers == [list(range(100, 140))] * 8
        assert all(engine.steps > 20 for engine in it.engines), "both have worked"
        assert it.replicas.ready and it.replicas.state == "awake" and it.replicas.in_flight == 0
        assert it.replicas.load.steps == sum(backend.load.steps for backend in it.replicas.replicas)


@pytest.mark.parametrize("how", ["crash", "stop"])
async def test_streams_of_a_lost_replica_go_on_elsewhere_behind_their_last_token(how: str) -> None:
    async with world(pause_at=8) as it:
        streams = [asyncio.create_task(read(it.replicas, request(f"r{i}"))) for i in range(10)]
        await eventually(lambda: all(engine.steps == 8 and len(engine.running) == 5 for engine in it.engines))
        getattr(it, how)(0)
        it.go_on()
        assert await asyncio.gather(*streams) == [list(range(100, 140))] * 10
        assert it.replicas.dispatcher.counts.failovers == 5 and it.replicas.dispatcher.counts.given_up == 0


async def test_the_reader_hears_of_the_prompt_once_and_the_rest_of_the_time_is_what_is_left() -> None:
    async with world(pause_at=8) as it:
        seen: list[Delta] = []
        asked = request("r", timeout_s=60.0)
        async for delta in it.replicas.generate(asked):
            seen.append(delta)
            if len(seen) == 5:
                first = it.on("r")
                other = it.engines[1 - first]
                it.now += 1.0
                it.crash(first)
                await eventually(lambda other=other: "r" in other.running)  # type: ignore[misc]
                again = other.running["r"][0]
                it.go_on()
        assert again.prompt == asked.prompt and len(again.produced) >= 5 and again.params == asked.params
        assert again.timeout_s is not None and again.timeout_s == 59.0
        assert again.priority < asked.priority, "a stream that stands still goes first"
        assert [token for delta in seen for token in delta.tokens] == list(range(100, 140))


async def test_with_no_replica_left_requests_wait_for_one_to_come_back() -> None:
    async with world(pause_at=8) as it:
        stream = asyncio.create_task(read(it.replicas, request("r")))
        await eventually(lambda: any(engine.steps == 8 for engine in it.engines))
        it.crash(it.on("r"))
        await eventually(lambda: any("r" in engine.running for engine in it.engines))
        it.crash(it.on("r"))
        await eventually(lambda: it.replicas.dispatcher.parked == 1)
        it.start(0)
        assert await stream == list(range(100, 140))


async def test_a_request_under_which_every_replica_dies_is_given_up() -> None:
    async with world(3, resilience=Resilience(attempts=2, stall_s=1e6), pause_at=2) as it:
        stream = asyncio.create_task(read(it.replicas, request("poison")))
        for _ in range(2):
            await eventually(lambda: any("poison" in engine.running for engine in it.engines))
            killed = it.on("poison")
            it.crash(killed)
        with pytest.raises(EngineLost):
            await stream
        assert sum(backend.ready for backend in it.replicas.replicas) == 1, "the third one lives"


async def test_a_stuck_replica_is_left_and_gets_nothing_new() -> None:
    async with world(pause_at=8) as it:
        streams = [asyncio.create_task(read(it.replicas, request(f"r{i}"))) for i in range(4)]
        await eventually(lambda: all(engine.steps == 8 and len(engine.running) == 2 for engine in it.engines))
        thaw = threading.Event()
        it.engines[0]._before_step = lambda: thaw.wait(200.0) and None
        it.go_on()
        it.replicas.members[0]._stall_s = 0.3
        try:
            assert await asyncio.gather(*streams) == [list(range(100, 140))] * 4
            assert await read(it.replicas, request("new")) == list(range(100, 140))
            assert it.replicas.members[0].breaker.state != "closed"
        finally:
            thaw.set()


async def test_a_cut_network_is_a_lost_replica_and_a_mended_one_brings_it_back() -> None:
    async with AsyncExitStack() as stack:
        engines = [ScriptedEngine(instance=str(index), step_s=0.01) for index in range(2)]
        for engine in engines:
            engine.pause_at = 8
        servers = [stack.enter_context(serving(engine)) for engine in engines]
        cable = Cable(int(servers[0].endpoint.rpartition(":")[2]))
        stack.push_async_callback(cable.close)
        ends = (await cable.lay(), servers[1].endpoint)
        backends = [NativeBackend(end, name=str(index)) for index, end in enumerate(ends)]
        replicas = ReplicaSet("scripted", backends, resilience=PATIENT)
        await replicas.start()
        stack.push_async_callback(replicas.close)
        await eventually(lambda: all(backend.ready for backend in backends))
        streams = [asyncio.create_task(read(replicas, request(f"r{i}"))) for i in range(6)]
        await eventually(lambda: all(engine.steps == 8 and len(engine.running) == 3 for engine in engines))
        cable.cut()
        backends[0]._silence_s = 0.5
        for engine in engines:
            engine.pause_at = None
        assert await asyncio.gather(*streams) == [list(range(100, 140))] * 6
        assert replicas.dispatcher.counts.failovers == 3 and not backends[0].ready
        assert await read(replicas, request("meanwhile", 5)) == list(range(100, 105))
        backends[0]._silence_s = 75.0
        cable.mend()
        await eventually(lambda: backends[0].ready)
        await eventually(lambda: not engines[0].running)
        before = engines[0].steps
        answers = await asyncio.gather(*(read(replicas, request(f"late{i}", 10)) for i in range(4)))
        assert answers == [list(range(100, 110))] * 4 and engines[0].steps > before, "it works again"


async def test_a_draining_replica_finishes_what_it_has_and_new_requests_go_elsewhere() -> None:
    async with world(pause_at=8) as it:
        streams = [asyncio.create_task(read(it.replicas, request(f"r{i}"))) for i in range(4)]
        await eventually(lambda: all(engine.steps == 8 for engine in it.engines))
        it.servers[0].server.drain()
        late = [asyncio.create_task(read(it.replicas, request(f"late{i}"))) for i in range(4)]
        await eventually(lambda: any("late0" in engine.running for engine in it.engines))
        it.go_on()
        assert await asyncio.gather(*streams, *late) == [list(range(100, 140))] * 8
        assert it.servers[0].join() == 0
        assert it.replicas.dispatcher.counts.given_up == 0


async def test_what_is_wrong_with_a_request_is_not_tried_elsewhere_and_failures_only_within_the_budget() -> None:
    async with world(resilience=Resilience(stall_s=1e6, park_s=0.2)) as it:

        def refuse(error: str) -> None:
            for engine in it.engines:
                engine.submit = lambda asked, engine=engine: engine._final.append(  # type: ignore[method-assign, misc]
                    Delta(asked.request_id, finish_reason="error", error=error)
                )

        refuse("the grammar cannot be used: no")
        with pytest.raises(InvalidRequest):
            await read(it.replicas, request("bad"))
        assert it.replicas.dispatcher.counts.retries == 0
        refuse("the engine failed while running this request: boom")
        asked = [asyncio.create_task(read(it.replicas, request(f"r{index}"))) for index in range(40)]
        await eventually(lambda: it.replicas.dispatcher.parked + sum(each.done() for each in asked) == 40)
        it.now += 0.3  # those that wait for a replica give up
        errors = await asyncio.gather(*asked, return_exceptions=True)
        assert all(isinstance(error, ApiError) for error in errors)
        assert any(isinstance(error, ServerError) for error in errors), "which of them were waiting is not known"
        assert it.replicas.dispatcher.counts.retries <= 4, "at most a tenth"
        assert all(member.breaker.state == "open" for member in it.replicas.members)
        with pytest.raises(EngineUnavailable, match="failing"):
            await it.replicas.wait_ready(1.0)


async def test_a_request_without_a_token_is_hedged_and_the_slower_one_is_stopped() -> None:
    async with world(resilience=Resilience(stall_s=1e6, hedge_s=0.05, retry_share=1.0)) as it:
        slow = it.engines[0]
        slow.step = lambda: None  # type: ignore[method-assign]
        answers = [await read(it.replicas, request(f"r{i}", 5)) for i in range(6)]
        assert answers == [list(range(100, 105))] * 6
        assert it.replicas.dispatcher.counts.hedges >= 1
        await eventually(lambda: not slow.running)


async def test_replicas_join_and_retire_under_load() -> None:
    async with world(1) as it:
        lone = asyncio.create_task(read(it.replicas, request("lone")))
        engine = ScriptedEngine(instance="new", step_s=0.01)
        running = it.stack.enter_context(serving(engine))
        await it.replicas.join(NativeBackend(running.endpoint, name="1"))
        await eventually(lambda: it.replicas.replicas[1].ready)
        streams = [asyncio.create_task(read(it.replicas, request(f"r{i}"))) for i in range(6)]
        await eventually(lambda: engine.steps > 3)
        it.replicas.retire("0")
        late = asyncio.create_task(read(it.replicas, request("late")))
        assert await asyncio.gather(lone, late, *streams) == [list(range(100, 140))] * 8
        await eventually(lambda: len(it.replicas.replicas) == 1)
        assert await read(it.replicas, request("last", 5)) == list(range(100, 105))


async def test_streams_of_a_single_replica_go_on_when_it_has_been_restarted() -> None:
    async with world(1, pause_at=8) as it:
        streams = [asyncio.create_task(read(it.replicas, request(f"r{i}"))) for i in range(4)]
        await eventually(lambda: it.engines[0].steps == 8 and len(it.engines[0].running) == 4)
        it.crash(0)
        await eventually(lambda: it.replicas.dispatcher.parked == 4)
        late = asyncio.create_task(read(it.replicas, request("sent before anybody knows", 5)))
        it.start(0)
        assert await asyncio.gather(*streams) == [list(range(100, 140))] * 4
        assert await late == list(range(100, 105))
        assert it.replicas.dispatcher.counts.failovers == 4 and it.replicas.dispatcher.counts.given_up == 0
        assert it.replicas.dispatcher.budget.taken == 0, "moving on is free"


async def test_a_single_replica_that_does_not_come_back_in_time_is_an_error() -> None:
    async with world(1, resilience=Resilience(park_s=0.1, resume_s=0.6), pause_at=8) as it:
        seen: list[int] = []

        async def begin() -> None:
            async for delta in it.replicas.generate(request("begun")):
                seen.extend(delta.tokens)

        begun = asyncio.create_task(begin())
        await eventually(lambda: len(seen) == 8)
        it.crash(0)
        await eventually(lambda: it.replicas.dispatcher.parked == 1)
        new = asyncio.create_task(read(it.replicas, request("new")))
        await eventually(lambda: it.replicas.dispatcher.parked == 2)
        it.now += 0.3
        with pytest.raises(EngineUnavailable, match="No replica"):
            await new
        assert not begun.done(), "what has begun waits longer"
        it.now += 0.4
        with pytest.raises(EngineLost, match=r"did not restart within 0\.6 s"):
            await begun
        assert it.replicas.in_flight == 0


async def test_a_request_waits_no_longer_for_its_first_token_than_its_client_allows() -> None:
    async with world(1, resilience=Resilience(park_s=5.0)) as it:
        it.engines[0].step = lambda: None  # type: ignore[method-assign]
        asked = asyncio.create_task(read(it.replicas, request("r", patience_s=0.5)))
        other = asyncio.create_task(read(it.replicas, request("s")))
        await eventually(lambda: len(it.engines[0].running) == 2)
        it.now += 0.3
        it.crash(0)
        await eventually(lambda: it.replicas.dispatcher.parked == 2)
        it.now += 0.3
        with pytest.raises(EngineUnavailable, match="this request waits no longer") as refused:
            await asked
        assert refused.value.reason == "queue_timeout" and not other.done()
        it.now += 5.0
        with pytest.raises(EngineLost, match="did not restart within 5 s"):
            await other


async def test_a_request_that_others_can_answer_does_not_wait_before_its_first_token() -> None:
    async with world(1) as it:
        it.engines[0].step = lambda: None  # type: ignore[method-assign]
        asked = asyncio.create_task(read(it.replicas, request("r", patient=False)))
        await eventually(lambda: bool(it.engines[0].running))
        it.crash(0)
        with pytest.raises(EngineLost):
            await asked
        with pytest.raises(EngineUnavailable):
            await read(it.replicas, request("s", patient=False))


async def test_what_a_single_replica_refuses_or_fails_is_not_tried_on_it_again() -> None:
    async with world(1, resilience=Resilience(retry_share=1.0)) as it:
        for error in ("the engine failed while running this request: boom", "the waiting queue is full"):
            it.engines[0].submit = lambda asked, error=error: it.engines[0]._final.append(  # type: ignore[method-assign, misc]
                Delta(asked.request_id, finish_reason="error", error=error)
            )
            with pytest.raises(ServerError if "boom" in error else ApiError):
                await read(it.replicas, request("r"))
        assert it.replicas.dispatcher.counts.retries == 0 and it.replicas.dispatcher.parked == 0


async def test_leaving_early_leaves_nothing_behind() -> None:
    async with world() as it:
        mailbox = Mailbox()
        for index in range(6):
            it.replicas.submit(request(f"r{index}"), mailbox, index)
        await mailbox.take()
        for index in range(6):
            it.replicas.abort(f"r{index}")
        await eventually(lambda: not any(engine.running for engine in it.engines))
        await eventually(lambda: not any(member.legs for member in it.replicas.members))
        assert it.replicas.in_flight == 0


async def test_what_an_aborted_request_produced_is_known_to_its_last_token() -> None:
    async with world() as it:
        mailbox = Mailbox()
        for index in range(4):
            it.replicas.submit(request(f"c{index}:0.0.0", 10**6), mailbox, index)
        await eventually(lambda: len(mailbox.produced) == 4)
        for index in range(4):
            it.replicas.abort(f"c{index}:0.0.0")
        await eventually(lambda: not any(it.replicas.holds(f"c{index}:0.0.0") for index in range(4)))
        told = await it.replicas.produced([f"c{index}" for index in range(4)])
        assert {entry.request_id: entry.tokens for entry in told} == {
            f"c{index}:0.0.0": count for index, count in mailbox.produced.items()
        }
        assert {entry.finish_reason for entry in told} == {"abort"}


async def test_a_request_that_went_on_elsewhere_is_counted_once() -> None:
    async with world(pause_at=8) as it:
        mailbox = Mailbox()
        it.replicas.submit(request("c:0.0.0", 60), mailbox)
        await eventually(lambda: mailbox.produced.get(0, 0) == 8)
        first = it.replicas.members[it.on("c:0.0.0")]
        leg = first.legs["c:0.0.0"]
        first.backend.abort("c:0.0.0")  # it is alive and remembers its part
        leg.fail(EngineLost("as if it had made no progress"))
        it.go_on()
        await eventually(lambda: mailbox.produced[0] == 60 and not any(engine.has_work for engine in it.engines))
        told = await it.replicas.produced(["c"])
        assert len(told) == 2 and {entry.finish_reason for entry in told} == {"abort", "length"}
        assert usage_of(merged(told)).completion == 60
