"""`penstock bench overhead`: what a gateway adds to a request, and how many requests it passes on, beside LiteLLM.

Three measurements, with the store, the ledger and the request log on, as they are by default:

- lone streams: one prompt of 128 token ids after the other, with a pause between them, each streamed. The backend
  answers at once, so the time to the first token is what gateway, protocol and sockets add to a lone request.
- overhead: an open loop of short completions at a fixed rate. A request that is sent late counts from when it was due.
  The backend answers at once, so what a client waits for is the gateway, plus this process's own reading and writing:
  that is measured against the bare backend and shown, as is how late this process was itself (`late p99`; its garbage
  collector is off meanwhile). CPU milliseconds per request are given for each process: unlike waiting times they also
  hold on a busy machine.
- requests/s: a closed loop of clients, Penstock and LiteLLM in turn (A B A B), one process each, both checking a key.

LiteLLM needs an environment of its own (pip install 'litellm[proxy]'); nothing is installed here. It runs as its
documentation advises for load: one worker, no callbacks, no verbose logging. Penstock is measured with the synthetic
engine behind the real protocol, and in front of the same backend as LiteLLM; the ratio is of those two.
"""

from __future__ import annotations

import asyncio
import dataclasses
import gc
import json
import os
import secrets
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import uvloop
from rich.console import Console

from penstock.bench import arrivals, report
from penstock.bench.gateway.harness import MODEL, VOCABULARY, cpu_seconds, free_port, gateway, process, wait_for
from penstock.bench.load import LoadGenerator
from penstock.bench.stats import median, percentiles
from penstock.bench.stream import read_answer
from penstock.bench.wire import Connection, Target
from penstock.errors import ConfigError
from penstock.interpreter import module

P50_MS, P99_MS, RATIO = 2.0, 10.0, 5.0
"""What must hold: milliseconds, and requests/s as a multiple of LiteLLM's."""
LONE, PAUSE_S = 100, 0.02
"""Lone streams, and the seconds between them."""
REMOTE = "remote"
BACKEND = "penstock.testing.synthetic_openai"


@dataclass(frozen=True, slots=True)
class OverheadBenchSettings:
    rate: float = 500.0
    """Requests per second of the open loop."""
    seconds: float = 10.0
    """Length of each measurement."""
    rounds: int = 2
    at_once: int = 32
    """Clients of the closed loop."""
    tokens: int = 8
    workers: int = 1
    """Gateway processes of Penstock."""
    litellm: str | None = None
    """An interpreter that has LiteLLM's proxy; it is left out otherwise."""


class Client(asyncio.Protocol):
    """A kept-alive connection that sends one request at a time and waits for its whole answer."""

    def __init__(self, port: int, request: bytes) -> None:
        self._port = port
        self._request = request
        self._answer: asyncio.Future[bytes] | None = None
        self._buffer = b""

    async def connect(self) -> Client:
        await asyncio.get_running_loop().create_connection(lambda: self, "127.0.0.1", self._port)
        return self

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        self.transport = transport

    def data_received(self, data: bytes) -> None:
        self._buffer += data
        end = self._buffer.find(b"\r\n\r\n")
        if end < 0:
            return
        head = self._buffer[:end].lower()
        at = head.find(b"content-length:")
        if at < 0:
            self._finish(RuntimeError(f"no content-length: {head[:200]!r}"))
            return
        if len(self._buffer) >= end + 4 + int(head[at + 15 :].split(b"\r\n", 1)[0]):
            self._finish(None if head.startswith(b"http/1.1 200") else RuntimeError(repr(self._buffer[:600])))

    def connection_lost(self, error: Exception | None) -> None:
        self._finish(error or ConnectionError("the server closed the connection"))

    def _finish(self, error: Exception | None) -> None:
        answer, self._answer = self._answer, None
        if answer is not None and not answer.done():
            if error is not None:
                answer.set_exception(error)
            else:
                answer.set_result(self._buffer)
            self._buffer = b""

    async def ask(self) -> float:
        self._answer = answer = asyncio.get_running_loop().create_future()
        began = time.perf_counter()
        self.transport.write(self._request)
        await answer
        return time.perf_counter() - began


def request(tokens: int, key: str, model: str = MODEL) -> bytes:
    messages = [{"role": "user", "content": "Say something about water."}]
    body = json.dumps({"model": model, "messages": messages, "max_tokens": tokens, "seed": 1}).encode()
    head = (
        "POST /v1/chat/completions HTTP/1.1\r\nhost: 127.0.0.1\r\ncontent-type: application/json\r\n"
        f"authorization: Bearer {key}\r\ncontent-length: {len(body)}\r\n\r\n"
    )
    return head.encode() + body


async def open_loop(port: int, payload: bytes, rate: float, seconds: float) -> tuple[list[float], list[float]]:
    """Latencies, counted from when a request was due: waiting for a free connection, or for this process to wake up
    and send it, is waiting too. And how late each was begun here. A thread keeps the time: an event loop's timers go by
    milliseconds, so that requests would be sent early, which would be counted for less than they take, or in pairs."""
    idle: list[Client] = [await Client(port, payload).connect() for _ in range(64)]
    latencies: list[float] = []
    late: list[float] = []
    running: set[asyncio.Task[None]] = set()

    async def one(due: float) -> None:
        late.append(time.perf_counter() - due)
        client = idle.pop() if idle else await Client(port, payload).connect()
        await client.ask()
        latencies.append(time.perf_counter() - due)
        idle.append(client)

    def start(due: float) -> None:
        task = asyncio.create_task(one(due))
        running.add(task)
        task.add_done_callback(running.discard)

    loop = asyncio.get_running_loop()

    def keep_time() -> None:
        begin = time.perf_counter()
        for number in range(round(rate * seconds)):
            due = begin + number / rate
            time.sleep(max(due - time.perf_counter(), 0.0))
            loop.call_soon_threadsafe(start, due)

    await asyncio.to_thread(keep_time)
    await asyncio.gather(*running)
    for client in idle:
        client.transport.close()
    return latencies, late


async def lone_streams(port: int, key: str, count: int = LONE) -> list[float]:
    """Seconds to the first token of streams that have the server to themselves."""
    target = Target.parse(f"http://127.0.0.1:{port}", key)
    load, connection = LoadGenerator(target, MODEL, VOCABULARY), Connection(target)
    found: list[float] = []
    try:
        for ready in load.ready(arrivals.closed(count, 128, 8), seed=1):
            await asyncio.sleep(PAUSE_S)
            began = time.perf_counter()
            found.append((await read_answer(connection, "/v1/completions", ready.body)).first - began)
    finally:
        await connection.close()
    return found


async def closed_loop(port: int, payload: bytes, at_once: int, seconds: float) -> float:
    """Requests per second."""
    clients = [await Client(port, payload).connect() for _ in range(at_once)]
    until = time.perf_counter() + seconds
    done = 0

    async def one(client: Client) -> None:
        nonlocal done
        while time.perf_counter() < until:
            await client.ask()
            done += 1

    began = time.perf_counter()
    await asyncio.gather(*map(one, clients))
    took = time.perf_counter() - began
    for client in clients:
        client.transport.close()
    return done / took


@contextmanager
def without_collections() -> Iterator[None]:
    """This process makes as much garbage in a measurement as fits; looking for it would delay requests."""
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def penstock_key(url: str) -> str:
    """A tenant with a key, as a customer has one; it closes the server to everybody else."""
    httpx.post(f"{url}/v1/admin/tenants", json={"id": "bench"}).raise_for_status()
    made = httpx.post(f"{url}/v1/admin/keys", json={"tenant": "bench", "scopes": ["inference", "metrics"]})
    return str(made.raise_for_status().json()["key"])


@contextmanager
def litellm(python: str, backend: int, folder: Path) -> Iterator[tuple[int, str]]:
    """LiteLLM's proxy in front of the synthetic backend: its port and its key."""
    port = free_port()
    config = {
        "model_list": [
            {
                "model_name": MODEL,
                "litellm_params": {
                    "model": f"openai/{MODEL}",
                    "api_base": f"http://127.0.0.1:{backend}/v1",
                    "api_key": "none",
                },
            }
        ],
        "litellm_settings": {"set_verbose": False, "json_logs": False, "callbacks": []},
    }
    (folder / "litellm.yaml").write_text(json.dumps(config))
    log = folder / "litellm.log"
    program = Path(python).with_name("litellm")
    command = [
        python,
        str(program),
        "--config",
        str(folder / "litellm.yaml"),
        "--port",
        str(port),
        "--num_workers",
        "1",
    ]
    env = {**os.environ, "LITELLM_MODE": "PRODUCTION", "LITELLM_LOG": "ERROR", "LITELLM_LOCAL_MODEL_COST_MAP": "True"}
    env["LITELLM_MASTER_KEY"] = key = f"sk-{secrets.token_hex(32)}"
    env.pop("PYTHONPATH", None)
    with process(command, log, env=env) as running:
        wait_for(f"http://127.0.0.1:{port}/health/liveliness", running, log, within=180)
        yield port, key


def measure(settings: OverheadBenchSettings, console: Console) -> dict[str, Any]:
    results: dict[str, Any] = {}
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="overhead-")))
        backend = free_port()
        bare = stack.enter_context(process([*module(BACKEND), str(backend)], folder / "backend.log"))
        wait_for(f"http://127.0.0.1:{backend}/v1/models", bare, folder / "backend.log")
        remotes = [{"name": REMOTE, "model": MODEL, "urls": [f"http://127.0.0.1:{backend}/v1"]}]
        config = {"remotes": remotes}
        ours = stack.enter_context(gateway(folder, interval_s=0.0, workers=settings.workers, settings=config))
        key = penstock_key(ours.url)
        payload = request(settings.tokens, key)
        uvloop.run(closed_loop(ours.port, payload, settings.at_once, 2.0))  # warm
        console.print(f"penstock: {LONE} lone streams", highlight=False)
        with without_collections():
            lone = percentiles(uvloop.run(lone_streams(ours.port, key)))
        results["lone streams"] = lone.as_dict() if lone else None
        for name, port in (("bare backend", backend), ("penstock", ours.port)):
            console.print(f"{name}: {settings.rate:g} requests/s for {settings.seconds:g} s", highlight=False)
            processes = {
                "gateway": ours.workers,
                "engine": [ours.engine_pid],
                "backend": [bare.pid],
                "generator": [os.getpid()],
            }
            before = {process: cpu_seconds(pids) for process, pids in processes.items()}
            with without_collections():
                latencies, late = uvloop.run(open_loop(port, payload, settings.rate, settings.seconds))
            for what, times in (("latency", latencies), ("late", late)):
                found = percentiles(times)
                results[f"{what}, {name}"] = found.as_dict() if found else None
            results[f"cpu_ms_per_request, {name}"] = {
                process: (cpu_seconds(pids) - before[process]) / len(latencies) * 1000
                for process, pids in processes.items()
            }
        sides = {"penstock": (ours.port, payload), "penstock, same backend": (ours.port, request(8, key, REMOTE))}
        if settings.litellm is not None:
            port, key = stack.enter_context(litellm(settings.litellm, backend, folder))
            sides["litellm"] = port, request(settings.tokens, key)
            uvloop.run(closed_loop(*sides["litellm"], settings.at_once, 3.0))
        rates: dict[str, list[float]] = {name: [] for name in sides}
        for _ in range(settings.rounds):
            for name, side in sides.items():
                rates[name].append(uvloop.run(closed_loop(*side, settings.at_once, settings.seconds)))
                console.print(f"{name}: {rates[name][-1]:,.0f} requests/s", highlight=False)
        results["requests_per_s"] = rates
        if "litellm" in sides:
            ours_rate, theirs = median(rates["penstock, same backend"]), median(rates["litellm"])
            results["ratio"] = ours_rate / theirs if ours_rate and theirs else 0.0
    return results


def show(results: dict[str, Any], settings: OverheadBenchSettings, console: Console) -> bool:
    title = f"short completions at {settings.rate:g} requests/s"
    table = report.table(title, "", "p50 ms", "p99 ms", "largest ms", "late p99 ms")
    for name in ("bare backend", "penstock"):
        found, late = results[f"latency, {name}"], results[f"late, {name}"]
        shown = [*(found[key] for key in ("p50", "p99", "largest")), late["p99"]]
        table.add_row(name, *(report.number(seconds * 1000, 2) for seconds in shown))
    console.print(table)
    lone = results["lone streams"]
    table = report.table("a lone stream after a prompt of 128 tokens", "", "p50 ms", "p90 ms", "largest ms")
    shown = [report.number(lone[key] * 1000, 2) for key in ("p50", "p90", "largest")]
    table.add_row("penstock: first token", *shown)
    console.print(table)
    table = report.table(f"{settings.at_once} clients at once", "", "requests/s")
    for name, rates in results["requests_per_s"].items():
        table.add_row(name, report.number(median(rates), 0))
    console.print(table)
    table = report.table("CPU ms per request", "", *results["cpu_ms_per_request, penstock"])
    for name in ("bare backend", "penstock"):
        table.add_row(name, *(report.number(spent, 2) for spent in results[f"cpu_ms_per_request, {name}"].values()))
    console.print(table)
    ours = results["latency, penstock"]
    bars = [
        (f"p50 under {P50_MS:g} ms", ours["p50"] * 1000 < P50_MS),
        (f"p99 under {P99_MS:g} ms", ours["p99"] * 1000 < P99_MS),
    ]
    if "ratio" in results:
        bars.append((f"at least {RATIO:g} times LiteLLM: {results['ratio']:.1f}", results["ratio"] >= RATIO))
    else:
        console.print("LiteLLM was not measured: --python litellm=PATH/bin/python", highlight=False)
    for what, holds in bars:
        console.print(f"{'yes' if holds else 'NO '}  {what}", highlight=False)
    return all(holds for _, holds in bars)


def main(settings: OverheadBenchSettings, json_file: Path | None, console: Console) -> bool:
    """Measures, prints, and says whether everything that must hold does."""
    if settings.litellm is not None:
        probe = subprocess.run([settings.litellm, "-c", "import litellm"], check=False, capture_output=True)
        if probe.returncode:
            raise ConfigError(f"--python litellm={settings.litellm}: it cannot import litellm")
    results = measure(settings, console)
    console.print(report.machine_line(), highlight=False)
    good = show(results, settings, console)
    if json_file is not None:
        report.write_json(json_file, "overhead", dataclasses.asdict(settings), results)
    return good
