"""What ends the work of an engine behind its socket: failed steps, draining, shutdown and sleep."""

from penstock.engine.request import Request
from penstock.protocol.messages import (
    ASLEEP,
    DRAINING,
    Drain,
    Shutdown,
    Sleep,
    State,
    Stopped,
    Wake,
)
from tests.engine_host.client import Client, connected, eventually, serving
from tests.engine_host.scripted import ScriptedEngine


def test_a_failing_step_fails_its_requests_and_the_engine_goes_on() -> None:
    failures = iter([RuntimeError("bad batch")])

    def before_step() -> None:
        for failure in failures:
            raise failure

    engine = ScriptedEngine(before_step=before_step)
    with serving(engine) as running, connected(running.endpoint) as client:
        client.hello()
        client.submit("a")
        last = client.finish("a")[1]
        assert last.finish_reason == "error" and "bad batch" in (last.error or "")
        client.submit("b")
        assert client.finish("b")[1].finish_reason == "length"


def test_an_engine_that_cannot_recover_tells_its_gateways_and_exits_non_zero() -> None:
    def before_step() -> None:
        raise RuntimeError("device lost")

    with serving(ScriptedEngine(before_step=before_step)) as running, connected(running.endpoint) as client:
        client.hello()
        client.submit("a")
        heard = []
        while not any(isinstance(message, Stopped) for message in heard):
            message = client.receive()
            assert message is not None, "no Stopped message"
            heard.append(message)
        assert running.join() == 1


def test_a_request_that_the_engine_rejects_by_raising_fails_alone() -> None:
    class Picky(ScriptedEngine):
        def submit(self, request: Request) -> None:
            if request.prompt == [13]:
                raise ValueError("unlucky")
            super().submit(request)

    with serving(Picky()) as running, connected(running.endpoint) as client:
        client.hello()
        client.submit("a", first=13)
        assert "unlucky" in (client.finish("a")[1].error or "")
        client.submit("b")
        assert client.finish("b")[1].finish_reason == "length"


def test_draining_finishes_what_runs_refuses_the_rest_and_exits_cleanly() -> None:
    engine = ScriptedEngine()
    engine.paused = True
    with serving(engine) as running, connected(running.endpoint) as client:
        client.hello()
        client.submit("a", tokens=30)
        client.send(Drain())
        client.submit("late")
        assert (client.finish("late")[1].error or "").startswith(DRAINING)
        engine.paused = False
        tokens, last = client.finish("a")
        assert len(tokens) == 30 and last.finish_reason == "length"
        assert running.join() == 0


def test_draining_has_a_limit() -> None:
    engine = ScriptedEngine(step_s=0.005)
    with serving(engine) as running, connected(running.endpoint) as client:
        client.hello()
        client.submit("a", tokens=10**9)
        assert eventually(lambda: "a" in engine.running)
        running.server.drain(0.1)
        assert running.join() == 0


def test_shutdown_stops_at_once() -> None:
    engine = ScriptedEngine(step_s=0.005)
    with serving(engine) as running, connected(running.endpoint) as client:
        client.hello()
        client.submit("a", tokens=10**9)
        client.send(Shutdown())
        assert running.join() == 0


class KeepingSleeper:
    """Keeps the engine while it sleeps; counts."""

    def __init__(self) -> None:
        self.calls: list[str] = []

    def sleep(self, engine: ScriptedEngine) -> ScriptedEngine:
        assert not engine.has_work
        self.calls.append("sleep")
        return engine

    def collect(self) -> None:
        self.calls.append("collect")

    def wake(self, sleeping: ScriptedEngine) -> ScriptedEngine:
        self.calls.append("wake")
        return sleeping


def states(client: Client, until: str) -> list[str]:
    """The states that the engine tells of, up to `until`."""
    seen: list[str] = []
    while not seen or seen[-1] != until:
        message = client.receive()
        assert message is not None, f"never {until}: {seen}"
        if isinstance(message, State):
            seen.append(message.state)
    return seen


def test_told_to_sleep_it_finishes_what_runs_refuses_what_comes_and_wakes_again() -> None:
    sleeper, engine = KeepingSleeper(), ScriptedEngine()
    engine.paused = True
    with (
        serving(engine, sleeper=sleeper) as running,
        connected(running.endpoint) as client,
        connected(running.endpoint) as other,
    ):
        assert client.hello().state == "awake"
        client.submit("a", tokens=20)
        client.send(Sleep())
        client.submit("late")
        _, late = client.finish("late")
        assert late.finish_reason == "error" and str(late.error).startswith(ASLEEP)
        engine.paused = False
        assert client.finish("a")[1].finish_reason == "length"
        assert eventually(lambda: sleeper.calls == ["sleep", "collect"])
        assert other.hello().state == "sleeping", "whoever comes later hears of it too"
        other.send(Wake())
        assert states(client, "awake")[-2:] == ["waking", "awake"]
        client.submit("b", first=7, tokens=2)
        assert client.finish("b")[0] == [7, 8]


def test_woken_while_it_still_works_it_just_goes_on() -> None:
    sleeper, engine = KeepingSleeper(), ScriptedEngine()
    engine.paused = True
    with serving(engine, sleeper=sleeper) as running, connected(running.endpoint) as client:
        client.hello()
        client.submit("a", tokens=50)
        client.send(Sleep())
        assert states(client, "drowsy") == ["drowsy"]
        client.send(Wake())
        assert states(client, "awake") == ["awake"]
        engine.paused = False
        client.submit("b", tokens=2)
        assert client.finish("b")[1].finish_reason == "length"
        assert sleeper.calls == []


def test_an_engine_that_cannot_sleep_says_so() -> None:
    with serving(ScriptedEngine()) as running, connected(running.endpoint) as client:
        client.hello()
        client.send(Sleep())
        while not isinstance(message := client.receive(), State):
            assert message is not None
        assert message.state == "awake" and message.problem == "this engine cannot sleep"
