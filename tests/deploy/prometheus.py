"""A real Prometheus that scrapes a gateway, with the shipped rules, in fast motion."""

from __future__ import annotations

import asyncio
import re
import shutil
import subprocess
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml

from tests.gateway.conftest import free_port

ROOT = Path(__file__).resolve().parents[2]
RULES = ROOT / "deploy/prometheus/rules.yml"
INSTALL = "no prometheus here: apt-get install prometheus, to test dashboards and alerts"
SCRAPE_S = 0.25
EVERY = f"{int(SCRAPE_S * 1000)}ms"

need_prometheus = pytest.mark.skipif(
    shutil.which("prometheus") is None or shutil.which("promtool") is None, reason=INSTALL
)


def in_fast_motion(rules: str) -> str:
    """The rules with minutes made seconds: what takes an hour takes a few, and nothing else is different."""
    rules = re.sub(r"\[5m\]", "[2s]", rules)
    rules = re.sub(r"\[15m\]", "[2s]", rules)
    rules = re.sub(r"\[1h\] offset 5m", "[8s] offset 2s", rules)
    rules = re.sub(r"for: \d+m", "for: 1s", rules)
    assert not re.search(r"\b\d+[mh]\]|offset \d+m|for: \d+m", rules)
    return rules


@dataclass
class Prometheus:
    client: httpx.AsyncClient

    async def query(self, expression: str) -> list[dict[str, Any]]:
        reply = await self.client.get("/api/v1/query", params={"query": expression})
        body = reply.json()
        assert body["status"] == "success", (expression, body)
        return list(body["data"]["result"])

    async def exemplars(self, name: str) -> list[dict[str, Any]]:
        reply = await self.client.get("/api/v1/query_exemplars", params={"query": name, "start": 0, "end": 4e9})
        return [exemplar for series in reply.json()["data"] for exemplar in series["exemplars"]]

    async def firing(self) -> set[str]:
        alerts = (await self.client.get("/api/v1/alerts")).json()["data"]["alerts"]
        return {alert["labels"]["alertname"] for alert in alerts if alert["state"] == "firing"}

    async def until(self, expression: str, within: float = 20.0) -> list[dict[str, Any]]:
        """The result of a query, once there is one."""
        deadline = asyncio.get_running_loop().time() + within
        while not (found := await self.query(expression)):
            assert asyncio.get_running_loop().time() < deadline, f"no result of {expression}"
            await asyncio.sleep(0.1)
        return found


@asynccontextmanager
async def scraping(gateway_port: int, folder: Path, rules: str = "") -> AsyncIterator[Prometheus]:
    config: dict[str, Any] = {
        "global": {"scrape_interval": EVERY, "scrape_timeout": EVERY, "evaluation_interval": EVERY},
        "scrape_configs": [{"job_name": "penstock", "static_configs": [{"targets": [f"127.0.0.1:{gateway_port}"]}]}],
    }
    if rules:
        (folder / "rules.yml").write_text(rules)
        config["rule_files"] = ["rules.yml"]
    (folder / "prometheus.yml").write_text(yaml.safe_dump(config))
    port = free_port()
    command = [
        "prometheus",
        f"--config.file={folder / 'prometheus.yml'}",
        f"--storage.tsdb.path={folder / 'data'}",
        f"--web.listen-address=127.0.0.1:{port}",
        "--enable-feature=exemplar-storage",
        "--log.level=warn",
    ]
    with (folder / "log").open("wb") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log)  # noqa: ASYNC220
    try:
        async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", timeout=10) as client:
            for _ in range(200):
                try:
                    if (await client.get("/-/ready")).status_code == 200:
                        break
                except httpx.HTTPError:
                    assert process.poll() is None, (folder / "log").read_text()
                await asyncio.sleep(0.05)
            yield Prometheus(client)
    finally:
        process.terminate()
        process.wait(10)
