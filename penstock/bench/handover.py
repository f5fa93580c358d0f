"""`penstock bench handover`: running streams while long prompts arrive, with roles for the replicas and without.

Two servers with two engines each, on the same machine in the same run: two replicas that do everything, and one that
computes prompts for one that writes answers. They alternate; while one is measured the other is idle. A round is a
number of streams that begin at once, and a long prompt at regular intervals until they have ended: what is compared is
the time between two tokens of a stream. The speed of block transfers is measured separately (`transfer`).
"""

from __future__ import annotations

import asyncio
import json
import os
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from penstock.bench import report, stats, transfer
from penstock.bench.arrivals import Planned, closed
from penstock.bench.engine import BenchError
from penstock.bench.load import DEFAULT_VOCAB, LoadGenerator, Tally, discover
from penstock.bench.wire import Connection, Target, WireError
from penstock.engine.config import KVDType
from penstock.interpreter import module

if TYPE_CHECKING:
    from rich.console import Console

START_S = 600.0
LONG_OUTPUT = 2
"""Output tokens of a long prompt, which are not measured."""
SETUPS: dict[str, dict[str, Any]] = {
    "both, both": {},
    "prefill, decode": {"replica_roles": ["prefill", "decode"]},
}


@dataclass(frozen=True, slots=True)
class HandoverBenchSettings:
    model: str = "smollm2-135m"
    streams: int = 8
    output_len: int = 256
    tokens: int = 1024
    """Of a long prompt."""
    every_s: float = 4.0
    prompts: int = 8
    """The most in a round, so that a server that cannot keep up is not flooded."""
    rounds: int = 2
    devices: tuple[str, ...] = ()
    """Of the two engines; both wherever the model goes by default when empty."""
    kv_dtype: KVDType = "auto"
    memory_share: float | None = None
    threads: int | None = None

    def model_config(self, setup: dict[str, Any]) -> dict[str, Any]:
        config = {
            "name": "measured",
            "source": self.model,
            "replicas": 2,
            "replica_devices": list(self.devices),
            "kv_dtype": self.kv_dtype,
            "memory_share": self.memory_share,
            "threads": self.threads,
            "max_model_len": self.tokens + self.output_len,
            "handover_tokens": self.tokens // 2,
            **setup,
        }
        return {key: value for key, value in config.items() if value is not None}


@dataclass(slots=True)
class Figures:
    """What a setup showed, over all rounds. Seconds."""

    gaps: list[float] = field(default_factory=list)
    long_ttft: list[float] = field(default_factory=list)
    tokens: int = 0
    seconds: float = 0.0
    handovers: float = 0.0
    received_bytes: float = 0.0

    def summary(self) -> dict[str, Any]:
        gaps, firsts = stats.percentiles(self.gaps), stats.percentiles(self.long_ttft)
        return {
            "itl_s": gaps.as_dict() if gaps else None,
            "long_ttft_s": firsts.as_dict() if firsts else None,
            "stream_tps": self.tokens / self.seconds,
            "handovers": self.handovers,
            "received_bytes": self.received_bytes,
        }


@contextmanager
def server(model: dict[str, Any], folder: Path) -> Iterator[str]:
    """`penstock serve` with one model; its address once it is ready. Two cores are shared out by `threads`."""
    folder.mkdir()
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    config = {
        "server": {"port": port, "console": False, "drain_s": 1},
        "generation": {"time_limit_s": None},
        "store": {"url": f"sqlite:///{folder}/store.db"},
        "encoders": [],
        "models": [model],
    }
    (folder / "penstock.yaml").write_text(json.dumps(config))
    command = [*module("penstock"), "serve", "--config", str(folder / "penstock.yaml")]
    with (folder / "log").open("wb") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log, env={**os.environ, "PENSTOCK_STATE": str(folder)})
    try:
        url = f"http://127.0.0.1:{port}"
        _wait_for(url, process, folder / "log")
        yield url
    finally:
        process.terminate()
        process.wait()


def _wait_for(url: str, process: subprocess.Popen[bytes], log: Path) -> None:
    deadline = time.monotonic() + START_S
    while not asyncio.run(_ready(Target.parse(url))):
        if process.poll() is not None or time.monotonic() > deadline:
            raise BenchError(f"the server did not become ready:\n{log.read_text()[-2000:]}")
        time.sleep(0.2)


async def _ready(target: Target) -> bool:
    connection = Connection(target)
    try:
        await connection.request("GET", "/health/ready")
        return True
    except WireError:
        return False
    finally:
        await connection.close()


async def measure(url: str, settings: HandoverBenchSettings, seed: int, figures: Figures) -> None:
    """One round."""
    target = Target.parse(url)
    vocab_size = (await discover(target)).data[0].vocab_size or DEFAULT_VOCAB
    load = LoadGenerator(target, "measured", vocab_size)
    await _finished(load, closed(2, 16, 4), seed + 1)  # warm-up
    begin = time.perf_counter()
    streams = asyncio.create_task(_finished(load, closed(settings.streams, 16, settings.output_len), seed))
    arrivals: list[asyncio.Task[Tally]] = []
    await asyncio.wait([streams], timeout=settings.every_s / 2)
    while not streams.done() and len(arrivals) < settings.prompts:
        long = closed(1, settings.tokens, LONG_OUTPUT)
        arrivals.append(asyncio.create_task(_finished(load, long, seed + 1000 + len(arrivals))))
        await asyncio.wait([streams], timeout=settings.every_s)
    tally = await streams
    figures.seconds += time.perf_counter() - begin
    figures.gaps += tally.gaps
    figures.tokens += tally.output_tokens
    for arrival in arrivals:
        figures.long_ttft += (await arrival).ttft
    metrics = await _metrics(target)
    figures.handovers = metrics.get("penstock_handovers_total", 0.0)
    figures.received_bytes = metrics.get("penstock_handover_bytes_received_total", 0.0)


async def _finished(load: LoadGenerator, plan: list[Planned], seed: int) -> Tally:
    """All of them at once."""
    tally = await load.closed(load.ready(plan, seed), len(plan), lambda: None)
    if tally.errors:
        raise BenchError(f"a request failed: {next(iter(tally.errors))}")
    return tally


async def _metrics(target: Target) -> dict[str, float]:
    """Summed over engines."""
    connection = Connection(target)
    try:
        text = (await connection.request("GET", "/metrics")).decode()
    finally:
        await connection.close()
    found: dict[str, float] = {}
    for line in text.splitlines():
        if line.startswith("penstock_handover"):
            name, value = line.split("{")[0], float(line.rsplit(" ", 1)[1])
            found[name] = found.get(name, 0.0) + value
    return found


def main(settings: HandoverBenchSettings, json_file: Path | None, console: Console) -> None:
    figures = {name: Figures() for name in SETUPS}
    with tempfile.TemporaryDirectory(prefix="penstock-bench-") as folder, console.status("transfer") as status:
        crossing = transfer.measure(settings.model, settings.tokens, settings.devices, settings.kv_dtype)
        status.update("starting two servers")
        first, second = (settings.model_config(setup) for setup in SETUPS.values())
        with server(first, Path(folder, "0")) as plain, server(second, Path(folder, "1")) as roles:
            urls = dict(zip(SETUPS, (plain, roles), strict=True))
            for attempt in range(settings.rounds):
                for name, url in urls.items():
                    status.update(f"round {attempt + 1} of {settings.rounds}: {name}")
                    asyncio.run(measure(url, settings, 10_000 * attempt, figures[name]))
    console.print(f"[bold]{settings.model}[/bold]: {report.machine_line()}")
    title = f"{settings.streams} streams; every {settings.every_s:g} s a prompt of {settings.tokens:,} tokens"
    rows = report.table(title, "roles", "ITL p50 ms", "p99 ms", "max ms", "tok/s", "prompt p50 ms", "handed over")
    summaries = {name: found.summary() for name, found in figures.items()}
    for name, found in figures.items():
        gaps, firsts = stats.percentiles(found.gaps), stats.percentiles(found.long_ttft)
        if gaps is None:
            raise BenchError("no stream had two pieces")
        rows.add_row(
            name,
            *(report.number(1e3 * value, 0) for value in (gaps.p50, gaps.p99, gaps.largest)),
            report.number(found.tokens / found.seconds),
            report.number(1e3 * firsts.p50 if firsts else None, 0),
            f"{found.handovers:.0f} of {len(found.long_ttft)}",
        )
    console.print(rows)
    p99 = [summary["itl_s"]["p99"] for summary in summaries.values()]
    console.print(f"99th percentile of ITL, without roles over with: {p99[0] / p99[1]:.2f}x", style="bold")
    console.print(
        f"Blocks cross at {crossing.bytes_per_s / 1e9:.2f} GB/s: {crossing.blocks} blocks, "
        f"{crossing.bytes / 2**20:,.0f} MiB of {settings.tokens:,} tokens, in {1e3 * crossing.seconds:,.1f} ms, "
        f"where computing them took {1e3 * crossing.computing_s:,.0f} ms."
    )
    if json_file is not None:
        report.write_json(json_file, "handover", asdict(settings), summaries | {"transfer": asdict(crossing)})
