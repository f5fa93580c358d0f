"""R-GW-4, R-GW-2: several gateway processes on one port are one gateway: limits, keys, stored answers and metrics hold
over all of them, and one that dies takes only its own connections with it. Real processes, a scripted engine."""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import signal
import ssl
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
from prometheus_client.openmetrics.parser import text_string_to_metric_families

from penstock.config import load
from penstock.errors import ConfigError
from penstock.text import TextModel
from tests.engine_host.client import serving as serving_engine
from tests.ports import free_port
from tests.scripted import ScriptedEngine, make_text

WORKERS = 2
SSL = ssl.create_default_context()
"""Not used, and costly to make for every client."""
CONFIG = """
server: {{host: 127.0.0.1, port: {port}, workers: {workers}, drain_s: 60}}
store: {{url: "sqlite:///{folder}/store.db"}}
models: [{{name: tiny, source: {folder}, max_model_len: 4096}}]
auth: {{default_tier: plain, fresh_s: 60}}
tiers:
  - name: plain
  - {{name: ten, requests_per_minute: 10}}
  - {{name: six, concurrent_requests: 6}}
request_log: {{url: "off"}}
"""
COMMAND = """
from penstock.gateway.workers import coordinator
coordinator.ANSWER_S = 60.0  # a worker that is only slow must not look like one that does not answer
from penstock.cli import main
main()
"""
LONG = 3900
"""Tokens of a stream that does not end by itself."""


@dataclass
class Workers:
    url: str
    process: subprocess.Popen[bytes]
    admin: dict[str, str]
    engine: ScriptedEngine
    received: int = 0
    """Lines of all streams."""

    def connections(self, pid: int) -> int:
        """How many connections of clients a worker has."""
        port = f":{int(self.url.rpartition(':')[2]):04X}"
        rows = [row.split() for row in Path("/proc/net/tcp").read_text().splitlines()[1:]]
        ours = {f"socket:[{row[9]}]" for row in rows if row[1].endswith(port) and row[3] == "01"}
        found = 0
        for file in Path(f"/proc/{pid}/fd").iterdir():
            with contextlib.suppress(FileNotFoundError):  # closed meanwhile
                found += os.readlink(file) in ours
        return found

    @property
    def pids(self) -> list[int]:
        return [
            int(pid) for pid in Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children").read_text().split()
        ]

    def metric(self, name: str) -> float:
        """As a scraper sees it, on a connection of its own: whichever worker takes it."""
        text = httpx.get(f"{self.url}/metrics", headers=self.admin, verify=SSL).text
        rows = re.findall(rf"^{re.escape(name)}(?:{{.*}})? (\S+)$", text, re.M)
        return sum(map(float, rows))

    def key(self, tier: str) -> dict[str, str]:
        tenant = f"{tier}-{time.monotonic_ns()}"
        made = httpx.post(
            f"{self.url}/v1/admin/tenants", json={"id": tenant, "tier": tier}, headers=self.admin, verify=SSL
        )
        assert made.status_code == 200, made.text
        reply = httpx.post(f"{self.url}/v1/admin/keys", json={"tenant": tenant}, headers=self.admin, verify=SSL)
        return {"authorization": f"Bearer {reply.json()['key']}", "x-key-id": reply.json()["id"]}

    async def ask(self, headers: dict[str, str], path: str = "/v1/completions", **body: Any) -> httpx.Response:
        """On a connection of its own, so that the kernel chooses the worker anew."""
        async with httpx.AsyncClient(base_url=self.url, timeout=120, headers=headers, verify=SSL) as client:
            return await client.post(path, json={"model": "tiny", "prompt": "hi", "max_tokens": 3, **body})

    async def stream(self, headers: dict[str, str], tokens: int, started: asyncio.Event) -> str:
        """The end of a stream: its last line, or what broke it."""
        last = ""
        try:
            async with httpx.AsyncClient(base_url=self.url, timeout=120, headers=headers, verify=SSL) as client:
                body = {"model": "tiny", "prompt": "hi", "max_tokens": tokens, "stream": True}
                async with client.stream("POST", "/v1/completions", json=body) as reply:
                    async for line in reply.aiter_lines():
                        started.set()
                        self.received += 1
                        last = line or last
        except httpx.HTTPError:
            return "broken"
        finally:
            started.set()
        return last

    async def streams(self, count: int, tokens: int, headers: dict[str, str]) -> list[asyncio.Task[str]]:
        """Streams that have all received something."""
        started = [asyncio.Event() for _ in range(count)]
        tasks = [asyncio.create_task(self.stream(headers, tokens, event)) for event in started]
        await asyncio.gather(*(event.wait() for event in started))
        return tasks


@pytest.fixture(scope="module")
def workers() -> Iterator[Workers]:
    with tempfile.TemporaryDirectory(prefix="ps-") as name:
        folder = Path(name)
        text = make_text(folder)
        port = free_port()
        (folder / "penstock.yaml").write_text(CONFIG.format(port=port, workers=WORKERS, folder=folder))
        engine = ScriptedEngine(
            text, lambda request: [text.encode("x")[0]] * 4000, step_s=0.01, max_model_len=4096, num_blocks=16_384
        )
        endpoint = f"ipc://{folder}/engine"
        with serving_engine(engine, endpoint):
            command = [*(sys.executable, "-c", COMMAND, "gateway", "-c", str(folder / "penstock.yaml"))]
            log = (folder / "log").open("wb")
            process = subprocess.Popen([*command, "-e", f"tiny={endpoint}"], stdout=log, stderr=log)
            running = Workers(f"http://127.0.0.1:{port}", process, {}, engine)
            try:
                _until_announced(folder / "log", process)
                _close_the_doors(running)
                yield running
            finally:
                process.terminate()
                code = process.wait(60)
                log.close()
        assert code == 0, (folder / "log").read_text()[-3000:]


def _until_announced(log: Path, process: subprocess.Popen[bytes]) -> None:
    deadline = time.monotonic() + 200
    while b"is ready" not in log.read_bytes():
        assert process.poll() is None and time.monotonic() < deadline, log.read_text()
        time.sleep(0.05)


def _close_the_doors(running: Workers) -> None:
    httpx.post(f"{running.url}/v1/admin/tenants", json={"id": "ops", "tier": "plain"})
    body = {"tenant": "ops", "scopes": ["admin", "metrics", "inference"]}
    running.admin["authorization"] = f"Bearer {httpx.post(f'{running.url}/v1/admin/keys', json=body).json()['key']}"


async def test_a_scrape_of_any_worker_shows_all_of_them(workers: Workers) -> None:
    before = await asyncio.to_thread(workers.metric, "vllm:request_generation_tokens_count")
    replies = await asyncio.gather(*(workers.ask(workers.admin) for _ in range(24)))
    assert [reply.status_code for reply in replies] == [200] * 24
    scrapes = [await asyncio.to_thread(workers.metric, "vllm:request_generation_tokens_count") for _ in range(8)]
    assert scrapes == [before + 24] * 8
    assert await asyncio.to_thread(workers.metric, "penstock_gateway_workers") == WORKERS
    # What every worker sees of the one engine is not counted twice.
    assert await asyncio.to_thread(workers.metric, "penstock_engine_up") == 1


async def test_any_worker_knows_the_timeline_of_a_request_that_another_answered(workers: Workers) -> None:
    names = [f"traced-{i}" for i in range(8)]
    await asyncio.gather(*(workers.ask({**workers.admin, "x-request-id": name}) for name in names))

    async def get(path: str, headers: dict[str, str]) -> httpx.Response:
        async with httpx.AsyncClient(base_url=workers.url, headers=headers) as client:
            return await client.get(path)

    replies = await asyncio.gather(*(get(f"/v1/traces/{name}", workers.admin) for name in names))
    assert [reply.json().get("request_id") for reply in replies] == names
    listing = (await get("/v1/traces?limit=8", workers.admin)).json()["data"]
    assert {entry["request_id"] for entry in listing} == set(names)
    stranger = await asyncio.to_thread(workers.key, "plain")
    replies = await asyncio.gather(*(get(f"/v1/traces/{name}", stranger) for name in names))
    assert [reply.status_code for reply in replies] == [404] * 8


async def test_openmetrics_of_several_workers_is_well_formed(workers: Workers) -> None:
    await asyncio.gather(*(workers.ask(workers.admin) for _ in range(4)))
    headers = {**workers.admin, "accept": "application/openmetrics-text"}
    reply = await asyncio.to_thread(httpx.get, f"{workers.url}/metrics", headers=headers)
    assert reply.headers["content-type"].startswith("application/openmetrics-text")
    assert "vllm:generation_tokens" in {family.name for family in text_string_to_metric_families(reply.text)}


async def test_a_limit_of_ten_is_ten_over_all_workers(workers: Workers) -> None:
    key = await asyncio.to_thread(workers.key, "ten")
    replies = await asyncio.gather(*(workers.ask(key) for _ in range(24)))
    statuses = [reply.status_code for reply in replies]
    assert statuses.count(200) == 10 and statuses.count(429) == 14, statuses
    left = sorted(int(r.headers["x-ratelimit-remaining-requests"]) for r in replies if r.status_code == 200)
    assert left == list(range(10))


async def test_keys_made_or_revoked_through_one_worker_hold_for_all_at_once(workers: Workers) -> None:
    # Changes made elsewhere would be seen after fresh_s, a minute here.
    key = await asyncio.to_thread(workers.key, "plain")
    assert {(await workers.ask(key)).status_code for _ in range(6)} == {200}
    where = f"{workers.url}/v1/admin/keys/{key['x-key-id']}"
    one = {"limits": {"requests_per_minute": 1}}
    await asyncio.to_thread(httpx.patch, where, json=one, headers=workers.admin)
    assert [(await workers.ask(key)).status_code for _ in range(6)] == [200, *[429] * 5], "limits of its own, too"
    await asyncio.to_thread(httpx.delete, where, headers=workers.admin)
    assert {(await workers.ask(key)).status_code for _ in range(6)} == {401}


async def test_a_stored_response_is_continued_by_any_worker(workers: Workers) -> None:
    first = await _respond(workers, input="hello")
    id = first.json()["id"]
    for _ in range(6):
        reply = await _respond(workers, input="more", previous_response_id=id)
        assert reply.status_code == 200, reply.text


async def _respond(workers: Workers, **body: Any) -> httpx.Response:
    async with httpx.AsyncClient(base_url=workers.url, headers=workers.admin, verify=SSL) as client:
        return await client.post("/v1/responses", json={"model": "tiny", "max_output_tokens": 2, **body})


async def test_a_killed_worker_loses_its_own_streams_and_comes_back(workers: Workers) -> None:
    name = "vllm:request_success_total"
    key = await asyncio.to_thread(workers.key, "six")
    before = set(workers.pids)
    held = await workers.streams(6, LONG, key)  # all that the tier allows
    assert (await workers.ask(key)).status_code == 429
    counted = await asyncio.to_thread(workers.metric, name)
    victim = workers.pids[0]
    others = await workers.streams(4, LONG, workers.admin)
    while not all(workers.connections(pid) for pid in workers.pids):  # the kernel chooses who gets a connection
        others += await workers.streams(1, LONG, workers.admin)
    workers.engine.hold = True  # nothing ends by itself
    lost = workers.connections(victim)
    os.kill(victim, signal.SIGKILL)
    await _eventually(lambda: sum(task.done() for task in (*held, *others)) == lost)
    assert {task.result() for task in (*held, *others) if task.done()} == {"broken"}
    assert await asyncio.to_thread(workers.metric, name) >= counted
    workers.engine.hold, seen = False, workers.received
    await _eventually(lambda: workers.received > seen + 20)  # the others go on
    # What the dead worker's requests held is free again, at once, and no more than that.
    free = sum(task.done() for task in held)
    again = await workers.streams(free + 1, LONG, key)
    await _eventually(lambda: any(task.done() for task in again))
    await asyncio.sleep(0.05)  # others that were refused end, too
    assert sum(task.done() for task in again) == 1
    await _eventually(lambda: len(set(workers.pids)) == WORKERS and victim not in workers.pids)
    assert len(set(workers.pids) & before) == WORKERS - 1, "the others were not touched"
    await _eventually(lambda: workers.metric("penstock_gateway_workers") == WORKERS)
    assert await asyncio.to_thread(workers.metric, name) >= counted
    for task in (*held, *others, *again):
        task.cancel()
    await asyncio.gather(*held, *others, *again, return_exceptions=True)


async def test_told_to_stop_all_workers_let_their_streams_finish(workers: Workers) -> None:
    running = await workers.streams(8, 150, workers.admin)
    workers.process.terminate()
    assert {await task for task in running} == {"data: [DONE]"}
    assert await asyncio.to_thread(workers.process.wait, 60) == 0


async def _eventually(condition: Any, within: float = 60.0) -> None:
    deadline = time.monotonic() + within
    while True:
        try:
            if await asyncio.to_thread(condition):
                return
        except httpx.HTTPError:
            pass  # a connection that waited for the dead worker
        assert time.monotonic() < deadline, "it did not happen in time"
        await asyncio.sleep(0.05)


def test_models_that_take_turns_need_one_gateway(text: TextModel, tmp_path: Path) -> None:
    file = tmp_path / "penstock.yaml"
    file.write_text("server: {workers: 2}\nmodels: [{name: a, source: /x, time_slice: gpu}]\n")
    with pytest.raises(ConfigError, match=r"server\.workers.*time_slice"):
        load(file, environ={})
