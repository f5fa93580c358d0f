"""Ten thousand streams at once, each steadily receiving tokens, some of them not reading: is anything lost?

A synthetic engine speaks the real protocol, `penstock gateway` runs with its defaults (ledger and request log
included), and this process reads every stream beside them on the same cores. Every stream has a text of its own that is
checked letter by letter. A few streams are heavy and stop reading for a while; theirs must come whole too, and nobody
else may notice.

    python bench/streams.py                                   # 10,000 streams, a token per second each
    python bench/streams.py --streams 2000 --interval 0.2 --workers 2 --json streams.json

What it does not show: a network (all is loopback), an engine that computes on the same cores, or TLS.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import re
import socket
import sys
import tempfile
import time
from array import array
from pathlib import Path
from typing import Any

import uvloop
from gateway_harness import MODEL, Gateway, cpu_seconds, gateway, memory
from rich.console import Console

from penstock.bench import report
from penstock.bench.stats import percentiles
from penstock.gateway.process.limits import raise_file_limit
from penstock.testing.synthetic_engine import text_of

CONTENT = re.compile(rb'"content":"(\w*)"')
SLOW_PER_STEP = 5000
"""Tokens per step of a stream that stops reading: enough to fill the buffers between it and the gateway."""
SLOW_BUFFER = 4096
SLOW_SEGMENT = 536
"""Small segments keep the kernel's buffers small on both sides; on loopback they would otherwise hold megabytes."""


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

    def __init__(self, load: Load, number: int, tokens: int, slow: bool) -> None:
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
        head = f"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-length: {len(data)}\r\n\r\n"
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


class Load:
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


async def connect(load: Load, port: int, number: int, tokens: int, slow: bool) -> Reader:
    loop = asyncio.get_running_loop()
    sock = socket.socket()
    sock.setblocking(False)
    if slow:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, SLOW_BUFFER)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_MAXSEG, SLOW_SEGMENT)
    await loop.sock_connect(sock, ("127.0.0.1", port))
    _, reader = await loop.create_connection(lambda: Reader(load, number, tokens, slow), sock=sock)
    return reader


async def run(running: Gateway, options: argparse.Namespace, console: Console) -> dict[str, Any]:
    warm = Load(50)
    for number in range(50):
        await connect(warm, running.port, number, 2, False)
    await asyncio.wait_for(warm.all_ended.wait(), 60)
    idle = memory(running.workers)

    load = Load(options.streams)
    ramp_s = options.streams / options.ramp
    tokens = round((ramp_s + options.seconds) / options.interval) + 2
    began = time.monotonic()
    readers: list[Reader] = []
    for number in range(options.streams):
        slow = number < options.slow
        readers.append(await connect(load, running.port, number, tokens * (SLOW_PER_STEP if slow else 1), slow))
        ahead = (number + 1) / options.ramp - (time.monotonic() - began)
        if ahead > 0:
            await asyncio.sleep(ahead)
    console.print(f"{options.streams:,} connections after {time.monotonic() - began:.1f} s", highlight=False)
    await asyncio.wait_for(load.all_begun.wait(), 120)
    plateau = time.monotonic()
    ramp_gaps = len(load.gaps)
    in_flight = running.metric('penstock_http_requests_in_flight{route="/v1/chat/completions"}')
    for reader in readers[: options.slow]:
        assert reader.transport is not None
        reader.transport.pause_reading()
    spent = {"gateways": running.workers, "engine": [running.engine_pid], "readers": [os.getpid()]}
    before = {name: cpu_seconds(pids) for name, pids in spent.items()}
    received = sum(reader.got for reader in readers)
    await asyncio.sleep(max(1.0, options.seconds * 0.6))
    seconds = time.monotonic() - plateau
    cores = {name: (cpu_seconds(pids) - before[name]) / seconds for name, pids in spent.items()}
    rate = (sum(reader.got for reader in readers) - received) / seconds
    busy = memory(running.workers)
    steady = percentiles(load.gaps[ramp_gaps:])
    for reader in readers[: options.slow]:
        assert reader.transport is not None
        if not reader.transport.is_closing():
            reader.transport.resume_reading()
    await asyncio.wait_for(load.all_ended.wait(), 120 + tokens * options.interval)
    slow_broken = sum(reader.slow for reader in load.broken)
    return {
        "streams": options.streams,
        "tokens_per_stream": tokens,
        "complete": load.complete,
        "broken": len(load.broken),
        "out_of_order": sum(reader.wrong > 0 for reader in readers),
        "slow_readers": options.slow,
        "slow_readers_broken": slow_broken,
        "slow_readers_held": sum(reader.largest > SLOW_PER_STEP for reader in readers[: options.slow]),
        "in_flight": in_flight,
        "together_s": (load.first_end or 0.0) - plateau,
        "tokens_per_s": rate,
        "gap_s": steady.as_dict() if steady else None,
        "memory_idle": idle,
        "memory_busy": busy,
        "memory_per_stream": (busy - idle) / options.streams,
        "cores": cores,
    }


def show(results: dict[str, Any], options: argparse.Namespace, console: Console) -> None:
    table = report.table(f"{options.streams:,} streams, {options.workers} gateway(s)", "", "")
    gaps = results["gap_s"] or {}
    gap = " / ".join(f"{gaps.get(name, 0) * 1000:,.0f}" for name in ("p50", "p99", "largest"))
    slow_broken = results["slow_readers_broken"]
    idle, busy = (f"{results[name] / 2**20:,.0f}" for name in ("memory_idle", "memory_busy"))
    rows = [
        ("complete, letter by letter", f"{results['complete']:,} of {options.streams:,}"),
        ("broken / out of order", f"{results['broken']} / {results['out_of_order']}"),
        ("in flight at once (gateway's own count)", f"{results['in_flight']:,.0f}"),
        ("all of them together for", f"{results['together_s']:.1f} s"),
        ("tokens received per second", report.number(results["tokens_per_s"], 0)),
        ("between two tokens of a stream: asked", f"{options.interval * 1000:,.0f} ms"),
        ("  p50 / p99 / largest", f"{gap} ms"),
        ("slow readers: whole / broken", f"{options.slow - slow_broken} / {slow_broken}"),
        ("  whose tokens waited in the gateway", f"{results['slow_readers_held']}"),
        ("gateway memory per stream", f"{results['memory_per_stream'] / 1024:,.1f} KiB"),
        ("gateway memory, idle / busy", f"{idle} / {busy} MiB"),
        *((f"cores used: {name}", f"{value:.2f}") for name, value in results["cores"].items()),
    ]
    for row in rows:
        table.add_row(*row)
    console.print(table)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--streams", type=int, default=10_000)
    parser.add_argument("--interval", type=float, default=1.0, help="seconds between two tokens of a stream")
    parser.add_argument("--seconds", type=float, default=20.0, help="how long all streams are open at least")
    parser.add_argument("--ramp", type=float, default=500.0, help="connections opened per second")
    parser.add_argument("--slow", type=int, default=20, help="streams that stop reading for a while")
    parser.add_argument("--workers", type=int, default=1, help="gateway processes")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the figures to FILE")
    options = parser.parse_args()
    console = Console()
    if raise_file_limit() < options.streams + 100:
        raise SystemExit(f"this shell may open too few files for {options.streams} connections: ulimit -Hn")
    settings = {"generation": {"time_limit_s": None}}
    with (
        tempfile.TemporaryDirectory(prefix="streams-") as name,
        gateway(Path(name), interval_s=options.interval, workers=options.workers, settings=settings) as running,
    ):
        results = uvloop.run(run(running, options, console))
    console.print(report.machine_line(), highlight=False)
    show(results, options, console)
    if options.json is not None:
        settings = {key: value for key, value in vars(options).items() if key != "json"}
        report.write_json(options.json, "streams", settings, results)
    return 0 if results["complete"] == options.streams else 1


if __name__ == "__main__":
    sys.exit(main())
