"""`penstock bench streams`: ten thousand streams at once that steadily receive tokens. Is anything lost?

A synthetic engine speaks the real protocol, `penstock gateway` runs with its defaults (ledger and request log
included), and this process reads every stream on the same cores. Every stream has its own text, which is checked letter
by letter. A few streams are heavy and stop reading for a while: they must arrive whole too, without delaying others.

What it does not show: a network (everything is loopback), an engine that computes on the same cores, or TLS.
"""

from __future__ import annotations

import asyncio
import dataclasses
import json
import os
import re
import socket
import tempfile
import time
from array import array
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import uvloop
from rich.console import Console

from penstock.bench import report
from penstock.bench.gateway.harness import MODEL, Gateway, cpu_seconds, gateway, memory
from penstock.bench.stats import percentiles
from penstock.errors import ConfigError
from penstock.gateway.process.limits import raise_file_limit
from penstock.testing.synthetic_engine import text_of

CONTENT = re.compile(rb'"content":"(\w*)"')
SLOW_PER_STEP = 5000
"""Tokens per step of a stream that stops reading: enough to fill the buffers between it and the gateway."""
SLOW_BUFFER = 4096
SLOW_SEGMENT = 536
"""Small segments keep the kernel's buffers small on both sides; on loopback they would otherwise hold megabytes."""


@dataclass(frozen=True, slots=True)
class StreamsBenchSettings:
    streams: int = 10_000
    interval: float = 1.0
    """Seconds between two tokens of a stream."""
    seconds: float = 20.0
    """How long all streams are open at least."""
    ramp: float = 500.0
    """Connections opened per second."""
    slow: int = 20
    """Streams that stop reading for a while."""
    workers: int = 1
    """Gateway processes."""


class Reader(asyncio.Protocol):
    """One client: sends its request, checks what comes."""

    __slots__ = (
        "_buffer",
        "_last",
        "_load",
        "_open",
        "got",
        "largest",
        "number",
        "slow",
        "tokens",
        "transport",
        "wrong",
    )

    def __init__(self, load: StreamClients, number: int, tokens: int, slow: bool) -> None:
        self._load = load
        self.number = number
        self.tokens = tokens
        self.slow = slow
        self.got = 0
        self.largest = 0
        self.wrong = 0
        self._buffer = b""
        self._last = 0.0
        self._open = True
        self.transport: asyncio.Transport | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        self.transport = transport
        body: dict[str, Any] = {
            "model": MODEL,
            "messages": [{"role": "user", "content": "Tell me a story."}],
            "seed": self.number,
            "max_tokens": self.tokens,
            "stream": True,
        }
        if self.slow:
            body["top_k"] = SLOW_PER_STEP
        data = json.dumps(body).encode()
        head = (
            "POST /v1/chat/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
            f"content-length: {len(data)}\r\n\r\n"
        )
        transport.write(head.encode() + data)

    def data_received(self, data: bytes) -> None:
        buffer = self._buffer + data if self._buffer else data
        cut = buffer.rfind(b"\n\n") + 2
        if cut == 1:
            self._buffer = buffer
            return
        whole, self._buffer = buffer[:cut], buffer[cut:]
        pieces = CONTENT.findall(whole)
        text = b"".join(pieces).decode()
        if text:
            if text != text_of(self.number, self.got, len(text)):
                self.wrong += 1
            now = time.monotonic()
            if not self.got:
                self._load.first(now)
            elif not self.slow:
                self._load.gaps.append(now - self._last)
            self.got += len(text)
            self.largest = max(self.largest, max(map(len, pieces)))
            self._last = now
        if b"data: [DONE]" in whole:
            self._end(whole)

    def _end(self, last: bytes) -> None:
        if self._open:
            self._open = False
            self._load.ended(self, complete=b"data: [DONE]" in last and self.got == self.tokens and not self.wrong)
            if self.transport is not None:
                self.transport.close()

    def connection_lost(self, error: Exception | None) -> None:
        self._end(self._buffer)


class StreamClients:
    """All clients together."""

    def __init__(self, count: int) -> None:
        self.count = count
        self.gaps = array("d")
        self.begun = 0
        self.complete = 0
        self.broken: list[Reader] = []
        self.first_end: float | None = None
        self.all_begun = asyncio.Event()
        self.all_ended = asyncio.Event()

    def first(self, now: float) -> None:
        self.begun += 1
        if self.begun == self.count:
            self.all_begun.set()

    def ended(self, reader: Reader, *, complete: bool) -> None:
        self.first_end = self.first_end or time.monotonic()
        self.complete += complete
        if not complete:
            self.broken.append(reader)
        if self.complete + len(self.broken) == self.count:
            self.all_begun.set()
            self.all_ended.set()


async def connect(load: StreamClients, port: int, number: int, tokens: int, slow: bool) -> Reader:
    loop = asyncio.get_running_loop()
    sock = socket.socket()
    sock.setblocking(False)
    if slow:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, SLOW_BUFFER)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_MAXSEG, SLOW_SEGMENT)
    await loop.sock_connect(sock, ("127.0.0.1", port))
    _, reader = await loop.create_connection(lambda: Reader(load, number, tokens, slow), sock=sock)
    return reader


async def run(running: Gateway, settings: StreamsBenchSettings, console: Console) -> dict[str, Any]:
    warm = StreamClients(50)
    for number in range(50):
        await connect(warm, running.port, number, 2, False)
    await asyncio.wait_for(warm.all_ended.wait(), 60)
    idle = memory(running.workers)

    load = StreamClients(settings.streams)
    ramp_s = settings.streams / settings.ramp
    tokens = round((ramp_s + settings.seconds) / settings.interval) + 2
    began = time.monotonic()
    readers: list[Reader] = []
    for number in range(settings.streams):
        slow = number < settings.slow
        readers.append(await connect(load, running.port, number, tokens * (SLOW_PER_STEP if slow else 1), slow))
        ahead = (number + 1) / settings.ramp - (time.monotonic() - began)
        if ahead > 0:
            await asyncio.sleep(ahead)
    console.print(f"{settings.streams:,} connections after {time.monotonic() - began:.1f} s", highlight=False)
    await asyncio.wait_for(load.all_begun.wait(), 120)
    plateau = time.monotonic()
    ramp_gaps = len(load.gaps)
    in_flight = running.metric('penstock_http_requests_in_flight{route="/v1/chat/completions"}')
    for reader in readers[: settings.slow]:
        assert reader.transport is not None
        reader.transport.pause_reading()
    spent = {"gateways": running.workers, "engine": [running.engine_pid], "readers": [os.getpid()]}
    before = {name: cpu_seconds(pids) for name, pids in spent.items()}
    received = sum(reader.got for reader in readers)
    await asyncio.sleep(max(1.0, settings.seconds * 0.6))
    seconds = time.monotonic() - plateau
    cores = {name: (cpu_seconds(pids) - before[name]) / seconds for name, pids in spent.items()}
    rate = (sum(reader.got for reader in readers) - received) / seconds
    busy = memory(running.workers)
    steady = percentiles(load.gaps[ramp_gaps:])
    for reader in readers[: settings.slow]:
        assert reader.transport is not None
        if not reader.transport.is_closing():
            reader.transport.resume_reading()
    await asyncio.wait_for(load.all_ended.wait(), 120 + tokens * settings.interval)
    slow_broken = sum(reader.slow for reader in load.broken)
    return {
        "streams": settings.streams,
        "tokens_per_stream": tokens,
        "complete": load.complete,
        "broken": len(load.broken),
        "out_of_order": sum(reader.wrong > 0 for reader in readers),
        "slow_readers": settings.slow,
        "slow_readers_broken": slow_broken,
        "slow_readers_held": sum(reader.largest > SLOW_PER_STEP for reader in readers[: settings.slow]),
        "in_flight": in_flight,
        "together_s": (load.first_end or 0.0) - plateau,
        "tokens_per_s": rate,
        "gap_s": steady.as_dict() if steady else None,
        "memory_idle": idle,
        "memory_busy": busy,
        "memory_per_stream": (busy - idle) / settings.streams,
        "cores": cores,
    }


def show(results: dict[str, Any], settings: StreamsBenchSettings, console: Console) -> None:
    table = report.table(f"{settings.streams:,} streams, {settings.workers} gateway(s)", "", "")
    gaps = results["gap_s"] or {}
    gap = " / ".join(f"{gaps.get(name, 0) * 1000:,.0f}" for name in ("p50", "p99", "largest"))
    slow_broken = results["slow_readers_broken"]
    idle, busy = (f"{results[name] / 2**20:,.0f}" for name in ("memory_idle", "memory_busy"))
    rows = [
        ("complete, letter by letter", f"{results['complete']:,} of {settings.streams:,}"),
        ("broken / out of order", f"{results['broken']} / {results['out_of_order']}"),
        ("in flight at once (gateway's own count)", f"{results['in_flight']:,.0f}"),
        ("all of them together for", f"{results['together_s']:.1f} s"),
        ("tokens received per second", report.number(results["tokens_per_s"], 0)),
        ("between two tokens of a stream: asked", f"{settings.interval * 1000:,.0f} ms"),
        ("  p50 / p99 / largest", f"{gap} ms"),
        ("slow readers: whole / broken", f"{settings.slow - slow_broken} / {slow_broken}"),
        ("  whose tokens waited in the gateway", f"{results['slow_readers_held']}"),
        ("gateway memory per stream", f"{results['memory_per_stream'] / 1024:,.1f} KiB"),
        ("gateway memory, idle / busy", f"{idle} / {busy} MiB"),
        *((f"cores used: {name}", f"{value:.2f}") for name, value in results["cores"].items()),
    ]
    for row in rows:
        table.add_row(*row)
    console.print(table)


def main(settings: StreamsBenchSettings, json_file: Path | None, console: Console) -> bool:
    """Measures, prints, and says whether every stream arrived whole."""
    if raise_file_limit() < settings.streams + 100:
        raise ConfigError(f"this shell may open too few files for {settings.streams} connections: ulimit -Hn")
    config = {"generation": {"time_limit_s": None}}
    with (
        tempfile.TemporaryDirectory(prefix="streams-") as name,
        gateway(Path(name), interval_s=settings.interval, workers=settings.workers, settings=config) as running,
    ):
        results = uvloop.run(run(running, settings, console))
    console.print(report.machine_line(), highlight=False)
    show(results, settings, console)
    if json_file is not None:
        report.write_json(json_file, "streams", dataclasses.asdict(settings), results)
    return bool(results["complete"] == settings.streams)
