"""R-ENG-15: an engine with work that completes no step is declared stuck and becomes a dead process."""

import subprocess
import sys
import textwrap
import threading

import pytest

from penstock.engine_host.watchdog import EXIT_STUCK, Watchdog


def _watch(advance_to: list[float], script: str, within_s: float = 60.0) -> list[float]:
    now = [0.0]
    stuck: list[float] = []
    fired = threading.Event()

    def on_stuck(stalled: float) -> None:
        stuck.append(stalled)
        fired.set()

    watchdog = Watchdog(0.02, on_stuck=on_stuck, clock=lambda: now[0], last_resort=False)
    watchdog.start()
    for word, moment in zip(script.split(), advance_to, strict=True):
        now[0] = moment
        getattr(watchdog, word)()
    now[0] += 1.0
    fired.wait(within_s)
    watchdog.stop()
    return stuck


def test_a_step_that_does_not_end_is_noticed() -> None:
    assert _watch([0.0], "busy") == [1.0]


def test_steps_that_do_nothing_count_as_one_that_does_not_end() -> None:
    assert _watch([0.0, 0.5], "busy busy")[0] >= 0.5


def test_an_idle_engine_is_never_stuck() -> None:
    assert _watch([0.0, 0.01], "busy idle", within_s=0.2) == []


STUCK = """
    import threading
    from penstock.engine.request import Request, SamplingParams
    from penstock.protocol.messages import Hello, Submit
    from penstock.engine_host.server import EngineServer
    from penstock.protocol.transport import Listener
    from penstock.engine_host.watchdog import Watchdog
    from tests.engine_host.client import Client
    from tests.engine_host.scripted import ScriptedEngine

    begun = threading.Event()

    def stuck_here():
        begun.set()
        threading.Event().wait()

    with Listener("tcp://127.0.0.1:*") as listener:
        client = Client(listener.endpoint)
        client.send(Hello("test"))
        client.submit("a")
        watchdog = Watchdog(20.0, clock=lambda: 1e3 * begun.is_set())
        EngineServer(ScriptedEngine(before_step=stuck_here), listener, watchdog=watchdog).run()
"""


SILENT = """
    from penstock.engine.request import EngineLoad
    from penstock.protocol.messages import Hello
    from penstock.engine_host.server import EngineServer
    from penstock.protocol.transport import Listener
    from penstock.engine_host.watchdog import Watchdog
    from tests.engine_host.client import Client
    from tests.engine_host.scripted import ScriptedEngine

    class Prefilling(ScriptedEngine):
        def step(self):
            super().step()
            if self.steps == 100 and STOPS:
                server.stop()

        def load_snapshot(self):
            return EngineLoad(ADVANCES)

    with Listener("tcp://127.0.0.1:*") as listener:
        client = Client(listener.endpoint)
        client.send(Hello("test"))
        client.submit("a", tokens=10**9)
        engine = Prefilling(step_s=0.01)
        watchdog = Watchdog(0.9, clock=lambda: 0.6 * engine.steps, last_resort=False)
        server = EngineServer(engine, listener, watchdog=watchdog)
        raise SystemExit(server.run())
"""


@pytest.mark.parametrize(
    ("load", "code"), [("steps=self.steps", 0), ("restored_blocks=self.steps", 0), ("steps=0", EXIT_STUCK)]
)
def test_steps_without_tokens_are_progress_only_if_a_counter_moves(load: str, code: int) -> None:
    script = textwrap.dedent(SILENT).replace("ADVANCES", load).replace("STOPS", str(code == 0))
    result = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=200)
    assert result.returncode == code, result.stderr


def test_a_stuck_engine_process_shows_its_stacks_and_exits_with_its_code() -> None:
    result = subprocess.run([sys.executable, "-c", textwrap.dedent(STUCK)], capture_output=True, text=True, timeout=200)
    assert result.returncode == EXIT_STUCK
    assert "stuck_here" in result.stderr
