"""`examples/production`: two gateways, three engines, Redis, PostgreSQL, HAProxy and Prometheus, all the real programs.

It is started, loaded through HAProxy by two tenants, and broken piece by piece; every answer must be whole and in the
ledger, exactly once (R-OPS-5, R-OPS-7)."""

from __future__ import annotations

import asyncio
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest

from penstock.fleet.drills.accounting import Losses, balance, compare
from penstock.fleet.drills.ledger import charges
from penstock.fleet.drills.load import Load
from penstock.fleet.drills.model import write_model
from penstock.fleet.drills.services import free_port, postgres_url
from penstock.metering.prices import Price
from tests.deploy.prometheus import in_fast_motion

ROOT = Path(__file__).resolve().parents[2]
EXAMPLE = ROOT / "examples/production"
PROGRAMS = ("redis-server", "redis-cli", "haproxy", "prometheus", "curl", "setpriv")
missing = [name for name in PROGRAMS if shutil.which(name) is None]
if not list(Path("/usr/lib/postgresql").glob("*/bin")):
    missing.append("postgresql")

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(1500),
    pytest.mark.skipif(bool(missing), reason=f"apt-get install redis-server postgresql haproxy prometheus ({missing})"),
]


@dataclass
class Example:
    environment: dict[str, str]
    state: Path

    def __call__(self, *words: str, within: float = 400) -> str:
        """`./production WORDS`, which must succeed."""
        done = subprocess.run(
            [str(EXAMPLE / "production"), *words],
            env=self.environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=within,
        )
        assert done.returncode == 0, f"production {' '.join(words)}: {done.stdout}"
        return done.stdout

    def port(self, name: str) -> int:
        return int(self.environment[name])

    def key(self, name: str) -> str:
        return (self.state / f"{name}.key").read_text().split()[0]


@pytest.fixture
def example() -> Iterator[Example]:
    folder = Path(tempfile.mkdtemp(prefix="penstock-production-"))
    folder.chmod(0o755)  # PostgreSQL runs as another user
    model = folder / "model"
    write_model(model)
    rules = folder / "rules.yml"
    rules.write_text(in_fast_motion((ROOT / "deploy/prometheus/rules.yml").read_text()))
    names = ("BALANCER", "GATEWAY_1", "GATEWAY_2", "HAPROXY_METRICS", "REDIS", "POSTGRES", "PROMETHEUS")
    environment = {
        **os.environ,
        "PRODUCTION_STATE": str(folder / "state"),
        "PRODUCTION_MODEL": str(model),
        "PRODUCTION_RULES": str(rules),
        "PENSTOCK": f"{sys.executable} -m penstock",
        "PENSTOCK_STATE": str(folder / "home"),
        "PYTHONPATH": str(ROOT),
        "ENGINE_PORTS": " ".join(str(free_port()) for _ in range(3)),
        **{f"{name}_PORT": str(free_port()) for name in names},
    }
    running = Example(environment, folder / "state")
    try:
        running("up")
        yield running
    finally:
        for name in ("prometheus", "haproxy", "gateway-1", "gateway-2", "engine-1", "engine-2", "engine-3"):
            subprocess.run([str(EXAMPLE / "production"), "kill", name], env=environment, capture_output=True)
        for name in ("postgres", "redis"):
            subprocess.run([str(EXAMPLE / "production"), "stop", name], env=environment, capture_output=True)
        shutil.rmtree(folder, ignore_errors=True)


async def prometheus(example: Example, path: str, **query: str) -> Any:
    async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{example.port('PROMETHEUS_PORT')}", timeout=180) as client:
        return (await client.get(f"/api/v1/{path}", params=query)).json()["data"]


async def firing(example: Example, alert: str, within: float = 120) -> None:
    deadline = time.monotonic() + within
    while time.monotonic() < deadline:
        alerts = (await prometheus(example, "alerts"))["alerts"]
        if any(one["labels"]["alertname"] == alert and one["state"] == "firing" for one in alerts):
            return
        await asyncio.sleep(0.5)
    raise AssertionError(f"{alert} does not fire: {alerts}")


async def breaks(example: Example, load: Load) -> None:
    """One thing after the other, under load; between them some streams must end."""

    async def production(*words: str) -> None:
        await asyncio.to_thread(example, *words)
        load.check_alive()

    async def more() -> None:
        before, deadline = load.done, time.monotonic() + 240
        while load.done < before + 8:
            assert time.monotonic() < deadline, "no stream ends any more"
            load.check_alive()
            await asyncio.sleep(0.1)

    await more()
    await production("kill", "engine-1")
    await more()
    await production("restart", "engine-1")
    await production("kill", "gateway-1")
    await firing(example, "PenstockGatewayGone")
    await more()
    await production("restart", "gateway-1")
    for service in ("redis", "postgres"):
        await production("stop", service)
        await asyncio.sleep(3)
        await production("restart", service)
        await more()
    await production("rolling")
    await more()


async def test_the_example_is_broken_piece_by_piece_and_the_ledger_is_exact(example: Example) -> None:
    prefix = "production"
    urls = [f"http://127.0.0.1:{example.port('BALANCER_PORT')}"]
    load = Load(urls, [example.key("acme"), example.key("globex")], "chat", streams=6, tokens=200, prefix=prefix)
    try:
        await load.learn()
        load.start()
        await breaks(example, load)
        await load.stop()
        losses = Losses()
        compare(load.answers(), losses)
        rows = await charges(postgres_url(example.port("POSTGRES_PORT")), prefix)
        sums = balance(load.attempts(), rows, Price.per_million(1.0, 2.0), losses)
        await load.check_turns(losses)
        assert not losses, losses.lines()
        assert sums.exact >= load.done > 100 and len(load.told.turns) > 10
        assert {row.settled_by for row in rows} <= {"end", "recovery"}
    finally:
        await load.close()
    deadline = time.monotonic() + 60  # the last scrape may have met a gateway that was restarting
    while True:
        found = (await prometheus(example, "query", query="up"))["result"]
        if (up := {(one["metric"]["job"], one["value"][1]) for one in found}) == {("penstock", "1"), ("haproxy", "1")}:
            break
        assert time.monotonic() < deadline, up
        await asyncio.sleep(1)
    engines = (await prometheus(example, "query", query="sum by (instance) (penstock_engine_up)"))["result"]
    assert [one["value"][1] for one in engines] == ["3", "3"]
    tenants = (await prometheus(example, "query", query="sum by (tenant) (penstock_usage_requests_total)"))["result"]
    assert {"acme", "globex"} <= {one["metric"]["tenant"] for one in tenants}
    assert (await prometheus(example, "query", query="haproxy_backend_http_responses_total"))["result"]
    assert "is down" not in example("status")
