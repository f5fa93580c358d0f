"""`penstock bench http-servers`: our HTTP/1.1 listener beside uvicorn and granian, with the same application.

Closed loops of kept-alive connections, the servers in turn (A B C A B C): short JSON answers, and streams of events
that come a few milliseconds apart, as tokens do. CPU time of the server's processes is what counts: requests per second
share the machine with this process, and streams are as fast as their pauses let them be. What it does not show: TLS,
HTTP/2, several processes, or bodies larger than a prompt.
"""

from __future__ import annotations

import asyncio
import dataclasses
import importlib.util
import socket
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console

from penstock.bench import report
from penstock.bench.gateway.harness import children, cpu_seconds, free_port, process
from penstock.bench.libraries.http_server import EVENTS, SERVERS
from penstock.bench.load import run_loop
from penstock.bench.stats import median
from penstock.errors import ConfigError, PenstockError
from penstock.interpreter import module

START_S = 30.0
PROMPT = b"Say something about water. " * 20
BODY = b'{"model":"m","messages":[{"role":"user","content":"%s"}],"stream":true}' % PROMPT
KINDS = {"short": 1, "stream": EVENTS}
"""Paths, and how many parts an answer has."""


@dataclass(frozen=True, slots=True)
class HttpServersBenchSettings:
    servers: tuple[str, ...] = tuple(SERVERS)
    seconds: float = 5.0
    """Length of each measurement."""
    rounds: int = 3
    at_once: int = 32
    """Connections."""


class Client(asyncio.Protocol):
    """A kept-alive connection that sends one request at a time and waits for the end of its answer."""

    def __init__(self, request: bytes, ending: bytes) -> None:
        self._request = request
        self._ending = ending
        self._answer: asyncio.Future[None] | None = None
        self._tail = b""
        self.transport: asyncio.Transport

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        self.transport = transport

    def data_received(self, data: bytes) -> None:
        if not self._tail and not data.startswith(b"HTTP/1.1 200"):
            self._finish(PenstockError(f"unexpected answer: {data[:200]!r}"))
        self._tail = (self._tail + data)[-len(self._ending) :]
        if self._tail == self._ending:
            self._finish(None)

    def connection_lost(self, error: Exception | None) -> None:
        self._finish(error or ConnectionError("the server closed the connection"))

    def _finish(self, error: Exception | None) -> None:
        answer, self._answer, self._tail = self._answer, None, b""
        if answer is not None and not answer.done():
            if error is None:
                answer.set_result(None)
            else:
                answer.set_exception(error)

    async def ask(self) -> None:
        self._answer = answer = asyncio.get_running_loop().create_future()
        self.transport.write(self._request)
        await answer


async def closed_loop(port: int, kind: str, at_once: int, seconds: float) -> tuple[int, float]:
    """Requests that were answered, and in how many seconds."""
    head = f"POST /{kind} HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: {len(BODY)}\r\n\r\n"
    ending = b"0\r\n\r\n" if kind == "stream" else b'"}}]}'
    loop = asyncio.get_running_loop()
    clients = [Client(head.encode() + BODY, ending) for _ in range(at_once)]
    for client in clients:
        await loop.create_connection(lambda client=client: client, "127.0.0.1", port)  # type: ignore[misc]
    done, began = 0, time.perf_counter()

    async def one(client: Client) -> None:
        nonlocal done
        while time.perf_counter() - began < seconds:
            await client.ask()
            done += 1

    async with asyncio.TaskGroup() as group:
        for client in clients:
            group.create_task(one(client))
    took = time.perf_counter() - began
    for client in clients:
        client.transport.close()
    return done, took


def tree(pid: int) -> list[int]:
    """A process and everything below it."""
    return [pid, *(below for child in children(pid) for below in tree(child))]


def available(servers: Sequence[str]) -> tuple[list[str], list[str]]:
    """Servers that can run here, and those that are not installed."""
    missing = [name for name in servers if name != "penstock" and importlib.util.find_spec(name) is None]
    return [name for name in servers if name not in missing], missing


def measure(settings: HttpServersBenchSettings, console: Console) -> dict[str, Any]:
    results: dict[str, Any] = {}
    found, missing = available(settings.servers)
    for name in missing:
        console.print(f"not here: {name}", style="dim")
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="servers-")))
        running: dict[str, tuple[int, int]] = {}
        for name in found:
            port, log = free_port(), folder / f"{name}.log"
            command = [*module("penstock.bench.libraries.http_server"), name, str(port)]
            started = stack.enter_context(process(command, log))
            running[name] = started.pid, port
            _wait(port, name, log)
        for kind, parts in KINDS.items():
            for turn in range(settings.rounds + 1):  # the first is a warm-up and not counted
                for name, (pid, port) in running.items():
                    before = cpu_seconds(tree(pid))
                    seconds = settings.seconds if turn else min(1.0, settings.seconds)
                    done, took = run_loop(closed_loop(port, kind, settings.at_once, seconds))
                    spent = cpu_seconds(tree(pid)) - before
                    if turn:
                        figures = results.setdefault(kind, {}).setdefault(name, {"per_s": [], "cpu_us": []})
                        figures["per_s"].append(done * parts / took)
                        figures["cpu_us"].append(spent / (done * parts) * 1e6)
    return results


def _wait(port: int, name: str, log: Path) -> None:
    deadline = time.monotonic() + START_S
    while True:
        try:
            socket.create_connection(("127.0.0.1", port), timeout=1.0).close()
            return
        except OSError:
            if time.monotonic() > deadline:
                raise PenstockError(f"{name} does not listen:\n{log.read_text()[-2000:]}") from None
            time.sleep(0.05)


def main(settings: HttpServersBenchSettings, json_file: Path | None, console: Console) -> None:
    unknown = [name for name in settings.servers if name not in SERVERS]
    if unknown:
        raise ConfigError(f"unknown server {unknown[0]!r}; there are: {', '.join(SERVERS)}")
    results = measure(settings, console)
    console.print(report.machine_line(), highlight=False)
    for kind, unit in (("short", "request"), ("stream", "event")):
        title = f"{settings.at_once} connections, {kind} answers; medians of {settings.rounds}"
        table = report.table(title, "", f"{unit}s/s", f"CPU us per {unit}", "CPU / ours")
        ours = median(results[kind]["penstock"]["cpu_us"]) if "penstock" in results[kind] else None
        for name, figures in results[kind].items():
            cpu = median(figures["cpu_us"])
            ratio = None if cpu is None or not ours else cpu / ours
            table.add_row(name, report.number(median(figures["per_s"]), 0), report.number(cpu), report.number(ratio, 2))
        console.print(table)
    if json_file is not None:
        report.write_json(json_file, "http-servers", dataclasses.asdict(settings), results)
