"""A real Prometheus that scrapes a gateway, with the shipped rules, in fast motion."""

from __future__ import annotations

import asyncio
import json
import re
import shutil
import subprocess
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml

from tests.ports import free_port

ROOT = Path(__file__).resolve().parents[2]
RULES = ROOT / "deploy/prometheus/rules.yml"
INSTALL = "no prometheus here: apt-get install prometheus, to test dashboards and alerts"
SCRAPE_S = 0.25
EVERY = f"{int(SCRAPE_S * 1000)}ms"

need_prometheus = pytest.mark.skipif(
    shutil.which("prometheus") is None or shutil.which("promtool") is None, reason=INSTALL
)

has_alertmanager = shutil.which("prometheus-alertmanager") is not None or shutil.which("alertmanager") is not None
need_alertmanager = pytest.mark.skipif(
    not has_alertmanager, reason="no alertmanager here: apt-get install prometheus-alertmanager"
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


@contextmanager
def alerting(folder: Path) -> Iterator[tuple[int, dict[str, set[str]]]]:
    """A real Alertmanager with the shipped routes: its port, and the alerts that reached each receiver."""
    heard: dict[str, set[str]] = {"page": set(), "chat": set()}

    class Webhook(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["content-length"])))
            heard[self.path.strip("/")] |= {alert["labels"]["alertname"] for alert in body["alerts"]}
            self.send_response(200)
            self.end_headers()

        def log_message(self, format: str, *args: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Webhook)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    config = (RULES.parent / "alertmanager.yml").read_text().replace(":9099/", f":{server.server_address[1]}/")
    config = config.replace("group_wait: 30s", "group_wait: 0s").replace("group_interval: 5m", "group_interval: 1s")
    (folder / "alertmanager.yml").write_text(config)
    port = free_port()
    command = [
        "prometheus-alertmanager" if shutil.which("prometheus-alertmanager") else "alertmanager",
        f"--config.file={folder / 'alertmanager.yml'}",
        f"--storage.path={folder / 'alerts'}",
        f"--web.listen-address=127.0.0.1:{port}",
        "--cluster.listen-address=",
        "--log.level=warn",
    ]
    with (folder / "alertmanager.log").open("wb") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log)
    try:
        yield port, heard
    finally:
        process.terminate()
        process.wait(10)
        server.shutdown()
        thread.join()
        server.server_close()


@asynccontextmanager
async def scraping(
    gateway_port: int, folder: Path, rules: str = "", alertmanager: int | None = None
) -> AsyncIterator[Prometheus]:
    config: dict[str, Any] = {
        "global": {"scrape_interval": EVERY, "scrape_timeout": EVERY, "evaluation_interval": EVERY},
        "scrape_configs": [{"job_name": "penstock", "static_configs": [{"targets": [f"127.0.0.1:{gateway_port}"]}]}],
    }
    if rules:
        (folder / "rules.yml").write_text(rules)
        config["rule_files"] = ["rules.yml"]
    if alertmanager is not None:
        targets = [{"targets": [f"127.0.0.1:{alertmanager}"]}]
        config["alerting"] = {"alertmanagers": [{"static_configs": targets}]}
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
            for _ in range(2400):
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
