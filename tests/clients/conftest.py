"""Two servers for clients to talk to, the client that a test names, and the report of what was run.

    @pytest.mark.clients("litellm", "a tool loop of two turns")
    def test_...(client: Environment, scripted: ScriptedServer) -> None:

`client` is the environment of the named client, installed when it is missing. Each test is a row of docs/clients.md.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.clients.environment import Environment, ready
from tests.clients.report import Report, Row
from tests.clients.scripted_server import ScriptedServer, scripted_server
from tests.e2e.conftest import MODEL, Server
from tests.ports import free_port

HERE = Path(__file__).resolve().parent
REPORT = pytest.StashKey[Report]()
VERSION = pytest.StashKey[str]()
PATIENCE_S = 1500
"""A test may have to install its client first."""


def _named(item: pytest.Item) -> tuple[str, str] | None:
    mark = item.get_closest_marker("clients")
    if mark is None or not item.path.is_relative_to(HERE):
        return None
    client, what = mark.args
    return client, what


def pytest_configure(config: pytest.Config) -> None:
    config.stash[REPORT] = Report()


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    for item in items:
        if (named := _named(item)) is not None:
            config.stash[REPORT].known.add(named)
            if item.get_closest_marker("timeout") is None:
                item.add_marker(pytest.mark.timeout(PATIENCE_S))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]):  # type: ignore[no-untyped-def]
    result = yield
    named = _named(item)
    if named is not None and (call.when == "call" or result.failed):
        outcome = {"passed": "works", "failed": "fails", "skipped": "not run"}[result.outcome]
        used = set(getattr(item, "fixturenames", ()))
        against = " and ".join(
            word for word, fixture in (("model", "served"), ("script", "scripted")) if fixture in used
        )
        row = Row(named[0], item.stash.get(VERSION, "?"), named[1], against, outcome)
        item.config.stash[REPORT].add(row)
    return result


def pytest_sessionfinish(session: pytest.Session) -> None:
    report = session.config.stash[REPORT]
    if report.rows and os.environ.get("PENSTOCK_CLIENTS_REPORT"):
        report.write()


@pytest.fixture
def client(request: pytest.FixtureRequest) -> Environment:
    """The client that the test's mark names."""
    named = _named(request.node)
    assert named is not None, "the test has no mark `clients(client, what)`"
    capture = request.config.pluginmanager.getplugin("capturemanager")

    def say(text: str) -> None:
        with capture.global_and_fixture_disabled():
            print(f"\n  {text}", flush=True)

    found = ready(named[0], say)
    request.node.stash[VERSION] = found.version
    return found


@pytest.fixture(scope="session")
def scripted_once() -> Iterator[ScriptedServer]:
    with scripted_server() as server:
        yield server


@pytest.fixture
def scripted(scripted_once: ScriptedServer) -> ScriptedServer:
    """The real gateway over a scripted engine: tell it what to say with `answer`, ask `arrived` what came."""
    scripted_once.answer("Hello, world!")
    return scripted_once


@pytest.fixture(scope="session")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """`penstock serve` with the default model and the default embedding model, as a person would start it."""
    port, log = free_port(), tmp_path_factory.mktemp("served") / "log"
    command = [sys.executable, "-m", "penstock", "serve", MODEL, "--port", str(port), "--set", "server.drain_s=2"]
    with log.open("wb") as output:
        process = subprocess.Popen(command, stdout=output, stderr=output, env={**os.environ, "OMP_NUM_THREADS": "2"})
    running = Server(f"http://127.0.0.1:{port}", process.pid)
    try:
        running.wait_until_ready(180)
        yield running
    finally:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(30)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
