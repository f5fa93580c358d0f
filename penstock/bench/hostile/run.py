"""`penstock bench hostile`: one real server with keys, a well-behaved tenant, and the attacks one after the other.

Server, attacker and tenant are processes of their own on the same cores, so part of any slowdown is the attacker's own
work; an attack over a network would cost the tenant less. Before each attack comes a quiet period of the same length,
and the tenant's p99 under attack is compared with that of all quiet periods together. The memory column is how much all
processes of the server together grew during the attack, at most.
"""

from __future__ import annotations

import asyncio
import dataclasses
import json
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
from rich.console import Console

from penstock.bench import report
from penstock.bench.gateway.harness import children, free_port, memory, process, wait_for
from penstock.bench.hostile.attacks import ATTACKS
from penstock.bench.hostile.victim import MEASURES, Victim
from penstock.bench.stats import Percentiles, percentiles
from penstock.bench.wire import Target
from penstock.errors import ConfigError, PenstockError
from penstock.interpreter import module

COLLECTION = "hostile"
_RECOVERY_S = 3.0
"""Between an attack and the next quiet period, for what is under way to end."""


@dataclass(frozen=True, slots=True)
class HostileBenchSettings:
    attacks: tuple[str, ...] = ()
    """Empty: all."""
    seconds: float = 20.0
    bar: float = 2.0
    threads: int = 1
    workers: int = 1
    model: str = "smollm2-135m"
    stream_only: bool = False
    """Nothing else runs: gaps between tokens are the engine's own steps."""


@dataclass(frozen=True, slots=True)
class Server:
    url: str
    pid: int
    keys: dict[str, str]

    def processes(self) -> list[int]:
        """Of the whole server, grandchildren included."""
        found = [self.pid]
        for pid in found:
            try:
                found.extend(children(pid))
            except FileNotFoundError:
                continue
        return found

    def memory(self) -> int:
        total = 0
        for pid in self.processes():
            try:
                total += memory([pid])
            except (FileNotFoundError, ProcessLookupError, StopIteration):
                continue
        return total


@dataclass(frozen=True, slots=True)
class Row:
    """What one attack did to the tenant."""

    attack: str
    p99_s: dict[str, float | None]
    ratios: dict[str, float | None]
    failures: list[str]
    grown_mib: float
    answers: dict[str, int]

    @property
    def worst(self) -> float:
        return max((ratio for ratio in self.ratios.values() if ratio is not None), default=0.0)


@contextmanager
def serve(settings: HostileBenchSettings, folder: Path) -> Iterator[Server]:
    port, log, config = free_port(), folder / "log", folder / "penstock.yaml"
    content = {
        "server": {"port": port, "workers": settings.workers},
        "store": {"url": f"sqlite:///{folder}/store.db"},
        "models": [{"source": settings.model, "name": "model", "threads": settings.threads}],
        "logging": {"level": "warning"},
        "generation": {"time_limit_s": 600},
    }
    config.write_text(json.dumps(content))
    command = [*module("penstock")]
    keys = {}
    for tenant in ("tenant", "attacker"):
        create = [*command, "keys", "create", "-c", str(config), "--tenant", tenant]
        made = subprocess.run(create, capture_output=True, text=True, check=False)
        if made.returncode:
            raise PenstockError(f"could not create a key: {made.stdout}{made.stderr}")
        keys[tenant] = made.stdout.strip()
    with process([*command, "serve", "-c", str(config)], log) as running:
        url = f"http://127.0.0.1:{port}"
        wait_for(f"{url}/health/ready", running, log)
        yield Server(url, running.pid, keys)


async def quiet(server: Server, seconds: float, stream_only: bool) -> dict[str, list[float]]:
    victim = Victim(Target.parse(server.url, server.keys["tenant"]), "model", stream_only)
    await victim.run(seconds)
    if victim.failures:
        raise PenstockError(f"the tenant's requests failed without an attack: {victim.failures[0]}")
    return {name: list(values) for name, values in victim.latencies.items()}


async def under_attack(
    server: Server, attack: str, settings: HostileBenchSettings, log: Path
) -> tuple[Victim, float, dict[str, int]]:
    before = largest = server.memory()
    command = [*module("penstock.bench.hostile.attacks"), attack]
    command += [server.url, server.keys["attacker"], "model", COLLECTION]
    with log.open("ab") as errors:
        attacker = await asyncio.create_subprocess_exec(*command, stdout=subprocess.PIPE, stderr=errors)
    victim = Victim(Target.parse(server.url, server.keys["tenant"]), "model", settings.stream_only)
    try:
        await asyncio.sleep(1.0)  # the attack is under way when measuring begins
        running = asyncio.create_task(victim.run(settings.seconds))
        while not running.done():
            largest = max(largest, await asyncio.to_thread(server.memory))
            await asyncio.wait((running,), timeout=0.5)
        running.result()
        if attacker.returncode is not None:
            raise PenstockError(f"the attack {attack} ended by itself: {await asyncio.to_thread(_tail, log)}")
    finally:
        if attacker.returncode is None:
            attacker.terminate()
    out, _ = await attacker.communicate()
    return victim, (largest - before) / 2**20, json.loads(out or b"{}")


def _tail(log: Path) -> str:
    return log.read_text()[-2000:]


Results = dict[str, Any]


async def measure(
    server: Server, settings: HostileBenchSettings, log: Path, console: Console, keep: Callable[[Results], None]
) -> Results:
    """`keep` is given what is known after every attack: all of them take minutes, and the last may be broken off."""
    attacks = settings.attacks or tuple(ATTACKS)
    headers = {"authorization": f"Bearer {server.keys['attacker']}"}
    async with httpx.AsyncClient(base_url=server.url, headers=headers, timeout=300) as client:
        if "ingest" in attacks:
            # The encoder is fetched and started by the first document, which is not what is measured.
            (await client.post("/v1/collections", json={"name": COLLECTION})).raise_for_status()
            form = {"file": ("first.txt", b"The first document.", "text/plain")}
            (await client.post(f"/v1/collections/{COLLECTION}/documents", files=form)).raise_for_status()
    await quiet(server, min(5.0, settings.seconds), settings.stream_only)  # warm-up
    calm: dict[str, list[float]] = {name: [] for name in MEASURES}
    raw = []
    results: Results = {"quiet_p99_s": {}, "rows": []}
    for attack in attacks:
        for name, values in (await quiet(server, settings.seconds, settings.stream_only)).items():
            calm[name].extend(values)
        console.print(f"{attack} …", highlight=False)
        raw.append((attack, *await under_attack(server, attack, settings, log)))
        base = {name: percentiles(values) for name, values in calm.items()}
        rows = [_row(attack, victim, grown, answers, base) for attack, victim, grown, answers in raw]
        results = {"quiet_p99_s": {n: p.p99 if p else None for n, p in base.items()}, "rows": rows}
        console.print(f"  {_said(rows[-1])}", highlight=False)
        keep(results)
        await asyncio.sleep(_RECOVERY_S)
    return results


def _row(
    attack: str, victim: Victim, grown: float, answers: dict[str, int], base: dict[str, Percentiles | None]
) -> Row:
    p99: dict[str, float | None] = {}
    ratios: dict[str, float | None] = {}
    for name, found in victim.summary().items():
        calm = base[name]
        p99[name] = found.p99 if found else None
        ratios[name] = found.p99 / calm.p99 if found and calm else None
    return Row(attack, p99, ratios, victim.failures, grown, answers)


def _said(row: Row) -> str:
    shown = ", ".join(f"{name} {_cell(row.p99_s[name], row.ratios[name])}" for name in MEASURES)
    return f"p99 in ms: {shown}; {len(row.failures)} requests of the tenant failed"


def show(results: Results, settings: HostileBenchSettings, console: Console) -> None:
    title = f"A tenant's p99 under attack, against {settings.bar:g}x its quiet p99"
    table = report.table(title, "attack", *(f"{name}, ms" for name in MEASURES), "worst", "MiB", "failed", "answers")
    calm = results["quiet_p99_s"]
    table.add_row("(quiet)", *(report.number((calm[name] or 0) * 1000, 0) for name in MEASURES), "", "", "", "")
    for row in results["rows"]:
        cells = [_cell(row.p99_s[name], row.ratios[name]) for name in MEASURES]
        answers = ", ".join(f"{count} x {status}" for status, count in sorted(row.answers.items()))
        mark = "" if row.worst <= settings.bar else " !"
        table.add_row(
            row.attack, *cells, f"{row.worst:.2f}x{mark}", f"{row.grown_mib:+,.0f}", str(len(row.failures)), answers
        )
    console.print(table)


def _cell(p99: float | None, ratio: float | None) -> str:
    return "–" if p99 is None or ratio is None else f"{p99 * 1000:,.0f} ({ratio:.2f}x)"


def main(settings: HostileBenchSettings, json_file: Path | None, console: Console) -> bool:
    """Measures, prints, and says whether the tenant was protected from every attack."""
    unknown = [name for name in settings.attacks if name not in ATTACKS]
    if unknown:
        raise ConfigError(f"there is no attack {unknown[0]!r}; there are: {', '.join(ATTACKS)}")

    def keep(results: Results) -> None:
        if json_file is not None:
            stored = [dataclasses.asdict(row) | {"worst": row.worst} for row in results["rows"]]
            report.write_json(json_file, "hostile", dataclasses.asdict(settings), results | {"rows": stored})

    with tempfile.TemporaryDirectory(prefix="hostile-") as name:
        folder = Path(name)
        with serve(settings, folder) as server:
            results = asyncio.run(measure(server, settings, folder / "log", console, keep))
    console.print(report.machine_line(), highlight=False)
    show(results, settings, console)
    rows: list[Row] = results["rows"]
    for row in rows:
        if row.failures:
            console.print(f"{row.attack}: {row.failures[0]}", highlight=False)
    return all(row.worst <= settings.bar and not row.failures for row in rows)
