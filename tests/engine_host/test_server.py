"""The engine behind its socket: streams reach their gateway, and no gateway can hurt the engine or another one."""

import itertools
import time
from collections.abc import Callable
from typing import Any, cast

import msgspec
import pytest

from penstock.engine.request import Delta, EngineLoad, Request, SamplingParams, StepOutput
from penstock.engine_host import quiet_time, server
from penstock.engine_host.erasures import NOT_NOW, REVIVING
from penstock.engine_host.peers import Peers
from penstock.protocol.codec import decode_from_engine
from penstock.protocol.messages import (
    NOT_REGISTERED,
    Abort,
    Begun,
    Erase,
    Erased,
    Goodbye,
    Hello,
    Ready,
    Step,
    Submit,
)
from penstock.protocol.versions import BEGUN_SINCE
from tests.engine_host.client import Client, connected, eventually, serving
from tests.engine_host.scripted import ScriptedEngine


def test_a_request_streams_its_tokens_in_order_and_finishes() -> None:
    with serving(ScriptedEngine()) as running, connected(running.endpoint) as client:
        assert client.hello().info.model == "scripted"
        client.submit("a", first=100, tokens=5)
        tokens, last = client.finish("a")
        assert tokens == [100, 101, 102, 103, 104]
        assert last.finish_reason == "length"


def test_one_message_per_step_carries_every_request_of_a_gateway() -> None:
    engine = ScriptedEngine(step_s=0.01)
    with serving(engine) as running, connected(running.endpoint) as client:
        client.hello()
        for name in "abc":
            client.submit(name, tokens=10**9)
        messages = 0
        together = False
        while not together:
            message = client.receive()
            assert isinstance(message, Step)
            messages += bool(message.output.deltas)
            together = len(message.output.deltas) == 3
        assert messages <= engine.steps


def test_first_tokens_come_first_in_a_message() -> None:
    """A gateway answers in the order of the message: whoever waits for a first token does not wait for the others."""
    socket = SentMessages()
    peers = Peers(cast(Any, socket))
    peer = peers.register(b"gateway", "gateway")
    for name in "abcd":
        peers.own(peer, name)
    deltas = [Delta("a", [1]), Delta("b", [2], "length"), Delta("c", [3], cached_tokens=0), Delta("d", [4])]
    peers.deliver(deltas, EngineLoad(running=4), 0.0)
    (step,) = (decode_from_engine(frame) for frame in socket.frames)
    assert isinstance(step, Step)
    assert [delta.request_id for delta in step.output.deltas] == ["c", "a", "b", "d"]


class SentMessages:
    """A socket that keeps what is sent."""

    def __init__(self) -> None:
        self.frames: list[bytes] = []

    def send_multipart(self, parts: list[bytes], flags: int) -> None:
        self.frames.append(parts[1])


def test_a_step_that_is_over_early_is_collected_at_once() -> None:
    """The engine says that its next step can wait, but then its device is done."""
    engine = ScriptedEngine()
    asked = itertools.count(1)

    def spare_s() -> float:
        return 0.0 if next(asked) % 4 == 0 else 1e6

    engine.spare_s = spare_s  # type: ignore[attr-defined]
    with serving(engine) as running, connected(running.endpoint) as client:
        client.hello()
        client.submit("a", tokens=3)
        assert len(client.finish("a")[0]) == 3


def test_an_engine_prepares_further_steps_when_it_has_been_quiet_for_a_moment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(quiet_time, "QUIET_S", 1e6)
    engine = ScriptedEngine()
    prepared: list[int] = []

    def improve(urgent: Callable[[], bool]) -> bool:
        prepared.append(engine.steps)
        return len(prepared) < 5

    engine.improve = improve  # type: ignore[attr-defined]
    with serving(engine) as running, connected(running.endpoint) as client:
        client.hello()
        for number in range(3):  # one after the other: none waits for what is prepared
            client.submit(f"r{number}", tokens=2)
            client.finish(f"r{number}")
        assert not prepared
        monkeypatch.setattr(quiet_time, "QUIET_S", 0.01)
        assert eventually(lambda: len(prepared) == 5)
        time.sleep(0.05)
        assert len(prepared) == 5, "there was nothing left"


def test_a_request_does_not_wait_for_what_is_being_prepared(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(quiet_time, "QUIET_S", 0.02)
    engine = ScriptedEngine()
    begun, left = [0], [0]

    def improve(urgent: Callable[[], bool]) -> bool:
        begun[0] += 1
        while not urgent():
            time.sleep(0.001)  # a layer
        left[0] += 1
        return True

    engine.improve = improve  # type: ignore[attr-defined]
    with serving(engine) as running, connected(running.endpoint) as client:
        client.hello()
        for number in range(3):
            assert eventually(lambda: begun[0] > left[0])
            client.submit(f"r{number}", tokens=2)
            client.finish(f"r{number}")
        assert left[0] >= 3


def test_nothing_is_prepared_while_blocks_are_handed_over(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(quiet_time, "QUIET_S", 0.0)
    busy = True
    monkeypatch.setattr(server.HandoverEndpoint, "busy", property(lambda self: busy))
    engine = ScriptedEngine()
    prepared: list[int] = []

    def improve(urgent: Callable[[], bool]) -> bool:
        prepared.append(1)
        return False

    engine.improve = improve  # type: ignore[attr-defined]
    with serving(engine) as running, connected(running.endpoint) as client:
        client.hello()
        client.submit("a", tokens=2)
        client.finish("a")
        time.sleep(0.05)
        assert not prepared
        busy = False
        assert eventually(lambda: prepared == [1])


def test_two_gateways_hear_only_of_their_own_requests() -> None:
    with serving(ScriptedEngine()) as running, connected(running.endpoint) as one, connected(running.endpoint) as two:
        one.hello()
        two.hello()
        one.submit("a", first=100)
        two.submit("b", first=200)
        assert one.finish("a")[0] == [100, 101, 102, 103]
        assert two.finish("b")[0] == [200, 201, 202, 203]
        assert {delta.request_id for delta in one.deltas(0.2)} == set()


def test_gateways_hear_that_an_engine_begins_with_their_requests_while_it_does() -> None:
    """Those that know what that means."""
    asked, told = [Request(name, [100], SamplingParams(max_tokens=1)) for name in "abc"], list[float]()

    class Slow(ScriptedEngine):
        def __init__(self) -> None:
            super().__init__()
            self.on_begun: Callable[[list[str]], None] = lambda request_ids: None

        def step(self) -> StepOutput | None:
            self.on_begun(list(self.running))
            assert eventually(lambda: bool(told)), "a step that takes long"
            return super().step()

    with serving(Slow()) as running, connected(running.endpoint) as one, connected(running.endpoint) as two:
        one.hello()
        for request in asked[:2]:
            one.send(Submit(request))
        heard = one.until(Begun)
        assert isinstance(heard, Begun) and heard.request_ids[0] == "a"
        told.append(time.monotonic())
        assert one.finish("b")[1].finish_reason == "length"
        two.send(Hello("of an older release", BEGUN_SINCE - 1))
        two.until(Ready)
        two.send(Submit(asked[2]))
        while not isinstance(message := two.receive(), Step) or not message.output.deltas:
            assert not isinstance(message, Begun)
        assert message.output.deltas[0].request_id == "c"


def test_an_idle_engine_sends_heartbeats_with_its_load() -> None:
    with serving(ScriptedEngine()) as running, connected(running.endpoint) as client:
        client.hello()
        beats = [client.receive() for _ in range(3)]
        assert all(isinstance(beat, Step) and not beat.output.deltas for beat in beats)


def test_an_idle_engine_does_not_burn_a_core() -> None:
    with serving(ScriptedEngine()) as running, connected(running.endpoint) as client:
        client.hello()
        assert running.thread.ident is not None
        its_clock = time.pthread_getcpuclockid(running.thread.ident)
        before, began = time.clock_gettime(its_clock), time.monotonic()
        time.sleep(1.0)
        assert time.clock_gettime(its_clock) - before < 0.5 * (time.monotonic() - began)


def test_a_cancelled_request_stops_and_says_so() -> None:
    engine = ScriptedEngine(step_s=0.005)
    with serving(engine) as running, connected(running.endpoint) as client:
        client.hello()
        client.submit("a", tokens=10**9)
        assert eventually(lambda: "a" in engine.running)
        client.send(Abort("a"))
        assert client.finish("a")[1].finish_reason == "abort"
        client.send(Abort("unknown"))
        client.submit("b")
        assert client.finish("b")[1].finish_reason == "length"


def test_a_gateway_cannot_cancel_the_request_of_another() -> None:
    engine = ScriptedEngine(step_s=0.002)
    with serving(engine) as running, connected(running.endpoint) as one, connected(running.endpoint) as two:
        one.hello()
        two.hello()
        one.submit("a", tokens=10**9)
        assert eventually(lambda: "a" in engine.running)
        two.send(Abort("a"))
        two.submit("b")  # is read after it
        assert two.finish("b")[1].finish_reason == "length"
        assert "a" in engine.running and not engine.aborted


@pytest.mark.parametrize(
    "frames",
    [
        [b""],
        [b"\xff\xfe\x00noise"],
        [b"two", b"frames"],
        [msgspec.msgpack.encode({"type": "submit", "request": {"prompt": "text"}})],
        [msgspec.msgpack.encode({"type": "nonsense"})],
        [b"\x91" * 50_000],
    ],
)
def test_a_malformed_message_is_dropped_and_the_next_good_one_served(frames: list[bytes]) -> None:
    with serving(ScriptedEngine()) as running, connected(running.endpoint) as client:
        client.hello()
        client.socket.send_multipart(frames)
        client.submit("a")
        assert client.finish("a")[1].finish_reason == "length"


def test_requests_of_a_gateway_that_vanishes_are_aborted() -> None:
    engine = ScriptedEngine(step_s=0.005)
    with serving(engine) as running, connected(running.endpoint) as stays:
        stays.hello()
        with connected(running.endpoint) as vanishes:
            vanishes.hello()
            vanishes.submit("orphan", tokens=100_000)
            assert eventually(lambda: "orphan" in engine.running)
        assert eventually(lambda: "orphan" in engine.aborted)
        stays.submit("a")
        assert stays.finish("a")[1].finish_reason == "length"


def test_goodbye_aborts_what_the_gateway_runs_and_hello_starts_afresh() -> None:
    engine = ScriptedEngine(step_s=0.005)
    with serving(engine) as running, connected(running.endpoint) as client:
        client.hello()
        client.submit("a", tokens=100_000)
        assert eventually(lambda: "a" in engine.running)
        client.send(Goodbye())
        assert eventually(lambda: engine.aborted == ["a"])
        client.send(Hello("test"))
        assert isinstance(client.until(Ready), Ready)
        client.submit("b")
        assert client.finish("b")[1].finish_reason == "length"


def test_a_gateway_that_does_not_read_loses_its_requests_and_blocks_nobody() -> None:
    engine = ScriptedEngine(step_s=0.002)
    with (
        serving(engine, send_limit=1, backlog_limit=300) as running,
        connected(running.endpoint, receive_limit=1) as slow,
        connected(running.endpoint) as good,
    ):
        slow.hello()
        good.hello()
        for index in range(20):
            slow.send(_large_request(f"slow-{index}"))
        good.submit("a", tokens=400)
        assert good.finish("a")[1].finish_reason == "length"
        assert eventually(lambda: len(engine.aborted) == 20)
        slow.send(Hello("back"))
        assert slow.until(Ready) is not None, "it may register again"


def _large_request(request_id: str) -> Submit:
    # A long id makes every delta long, so that the operating system's buffers fill within the test.
    return Submit(Request(request_id + "x" * 20_000, [1], SamplingParams(max_tokens=10**9)))


def test_hello_again_is_silent_and_a_new_instance_answers_it() -> None:
    with serving(ScriptedEngine()) as running, connected(running.endpoint) as client:
        client.hello()
        client.send(Hello("test"))
        assert all(isinstance(client.receive(), Step) for _ in range(3))


def test_a_request_from_a_stranger_is_refused_not_run() -> None:
    engine = ScriptedEngine()
    with serving(engine) as running, connected(running.endpoint) as client:
        client.submit("a")
        tokens, last = client.finish("a")
        assert tokens == [] and last.finish_reason == "error"
        assert last.error is not None and last.error.startswith(NOT_REGISTERED)
        assert engine.steps == 0


def test_another_protocol_version_is_told_ours_and_not_served() -> None:
    with serving(ScriptedEngine()) as running, connected(running.endpoint) as client:
        client.send(Hello("old", version=999))
        ready = client.receive()
        assert ready is not None and type(ready).__name__ == "Ready"
        client.submit("a")
        assert client.finish("a")[1].finish_reason == "error"


class SlowErasure:
    """Is over when it has been looked at a few times."""

    blocks, failed = 7, 1

    def __init__(self) -> None:
        self.looks = 0

    def advance(self) -> bool:
        self.looks += 1
        return self.looks > 3


def test_an_erasure_is_answered_when_it_is_over() -> None:
    engine, owners = ScriptedEngine(), list[str]()

    def erase(owner: str) -> SlowErasure:
        owners.append(owner)
        return SlowErasure()

    with serving(engine) as running, connected(running.endpoint) as client:
        client.hello()
        client.send(Erase("1", "acme"))
        assert answer_to("1", client).error == NOT_NOW, "as while it sleeps"
        engine.erase = erase  # type: ignore[attr-defined]
        client.send(Erase("2", "acme"))
        assert answer_to("2", client) == Erased("2", 7, 1) and owners == ["acme"]
        engine.reviving = True  # type: ignore[attr-defined]
        client.send(Erase("3", "acme"))
        assert answer_to("3", client).error == REVIVING and owners == ["acme"]


def answer_to(question: str, client: Client) -> Erased:
    while True:
        message = client.receive()
        assert message is not None
        if isinstance(message, Erased) and message.question == question:
            return message
