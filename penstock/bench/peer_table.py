"""`penstock bench table`: the rows that a page of results begins with, measured in one go.

Rows are data (`data/h200_rows.yaml`, or a file of the same form): the benchmark command that measures them, what the
peer was measured to reach, and the bar. Each command runs in a process of its own, because each wants the whole device.
What was found is written after every run, so that nothing is lost if the time on a machine ends; a run that would not
end in time is not begun.
"""

from __future__ import annotations

import json
import shlex
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from importlib import resources
from pathlib import Path
from typing import Any, Literal

import msgspec
from rich.console import Console
from rich.table import Table

from penstock.bench import report, stats
from penstock.bench.engine import BenchError
from penstock.bench.served import environment
from penstock.errors import ConfigError
from penstock.interpreter import module

_STOP_S = 30.0
"""How long a run that is stopped may take to stop its server."""
_TAIL = 1500
"""Characters of a failed run's output that are shown."""


class Row(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One figure of a run's results."""

    name: str
    figure: str
    of: dict[str, str | int] = {}
    scale: float = 1.0
    better: Literal["higher", "lower"] = "higher"
    peer: float | None = None
    bar: float | None = None


class Run(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    command: str
    rows: list[Row]
    start_s: float
    turn_s: float | None = None
    """None: the command has no `--repeat`."""

    def seconds(self, repeat: int) -> float:
        return self.start_s + repeat * (self.turn_s or 0.0)


class Rows(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    title: str
    peer: str
    runs: dict[str, Run]


@dataclass(frozen=True, slots=True)
class Measured:
    """A row's figure, or why there is none."""

    run: str
    name: str
    figure: float | None
    peer: float | None = None
    ratio: float | None = None
    bar: float | None = None
    met: bool | None = None
    missing: str | None = None


def read_rows(path: Path | None) -> Rows:
    """None: those of the package."""
    own = resources.files("penstock.bench").joinpath("data/h200_rows.yaml")
    try:
        text = path.read_bytes() if path is not None else own.read_bytes()
        return msgspec.yaml.decode(text, type=Rows)
    except (OSError, msgspec.DecodeError) as error:
        raise ConfigError(f"{path or own.name} cannot be read as rows of a table: {error}") from error


def figure_of(results: Any, row: Row) -> float:
    """The row's figure in the results of its run."""
    if row.of:
        found = [entry for entry in results if all(entry.get(key) == value for key, value in row.of.items())]
        if len(found) != 1:
            raise BenchError(f"{len(found)} results are of {row.of}")
        (results,) = found
    values = [results]
    for step in row.figure.split("/"):
        try:
            values = [inner for value in values for inner in (value if step == "*" else [value[step]])]
        except (KeyError, TypeError) as error:
            raise BenchError(f"the results have no {row.figure}") from error
    middle = stats.median(value for value in values if value is not None)
    if middle is None:
        raise BenchError(f"the results have no value of {row.figure}")
    return middle * row.scale


def judged(run: str, row: Row, figure: float) -> Measured:
    """Beside the peer and the bar; a ratio above 1 is ahead of the peer whichever way is better."""
    higher = row.better == "higher"
    ratio = None if row.peer is None else figure / row.peer if higher else row.peer / figure
    met = None if row.bar is None else figure >= row.bar if higher else figure <= row.bar
    return Measured(run, row.name, figure, row.peer, ratio, row.bar, met)


def measure(name: str, run: Run, repeat: int, left: float | None, say: Callable[[str], None]) -> list[Measured]:
    """The rows of one run. `left`: seconds until it has to end; None: no matter."""
    expected = run.seconds(repeat)
    if left is not None and left < expected:
        return _without(name, run, f"not begun: about {expected:.0f} s are needed, {max(0.0, left):.0f} s are left")
    turns = () if run.turn_s is None else ("--repeat", str(repeat))
    with tempfile.TemporaryDirectory() as folder:
        results_file = Path(folder) / "results.json"
        say(f"{name}: penstock bench {run.command} {' '.join(turns)}")
        reason = _ran(
            [*module("penstock", "bench"), *shlex.split(run.command), *turns, "--json", str(results_file)], left
        )
        # A benchmark that misses a goal of its own exits with 1 and has still measured.
        if not results_file.exists():
            return _without(name, run, reason or "the run wrote no results")
        results = json.loads(results_file.read_bytes())["results"]
    measured = []
    for row in run.rows:
        try:
            measured.append(judged(name, row, figure_of(results, row)))
        except BenchError as error:
            measured.append(Measured(name, row.name, None, row.peer, bar=row.bar, missing=str(error)))
    return measured


def _without(name: str, run: Run, reason: str) -> list[Measured]:
    return [Measured(name, row.name, None, row.peer, bar=row.bar, missing=reason) for row in run.rows]


def _ran(command: Sequence[str], left: float | None) -> str | None:
    """Runs it to its end, and says what went wrong."""
    with tempfile.TemporaryFile("w+", errors="replace") as output:
        process = subprocess.Popen(command, env=environment(), stdout=output, stderr=subprocess.STDOUT)
        stopped = False
        try:
            process.wait(left)
        except subprocess.TimeoutExpired:
            stopped = True
        finally:
            _stop(process)
        output.seek(0)
        tail = output.read()[-_TAIL:].strip()
    if stopped:
        return "stopped: the time was over"
    return f"exit status {process.returncode}: {tail}" if process.returncode else None


def _stop(process: subprocess.Popen[bytes]) -> None:
    """It stops the server that it has started, if it is let."""
    if process.poll() is None:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(_STOP_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def main(
    rows: Rows,
    names: Sequence[str],
    repeat: int,
    seconds: float | None,
    json_file: Path | None,
    console: Console,
) -> bool:
    """Measures, prints, and says whether every figure is there, no bar is missed and no peer is ahead."""
    for name in names:
        if name not in rows.runs:
            raise ConfigError(f"there is no run {name!r}; there are: {', '.join(rows.runs)}")
    chosen = names or list(rows.runs)
    until = None if seconds is None else time.monotonic() + seconds
    found: list[Measured] = []
    for name in chosen:
        run, left = rows.runs[name], None if until is None else until - time.monotonic()
        with console.status(f"{name}, about {run.seconds(repeat):.0f} s"):
            found += measure(name, run, repeat, left, lambda line: console.print(line, style="dim", soft_wrap=True))
        if json_file is not None:
            facts = {"title": rows.title, "peer": rows.peer, "repeat": repeat}
            report.write_json(json_file, "table", facts, [asdict(one) for one in found])
    console.print(f"[bold]{rows.title}[/bold]: {report.machine_line()}")
    console.print(_table(rows, found, repeat))
    for one in found:
        if one.missing is not None:
            console.print(f"{one.run}, {one.name}: {one.missing}", style="yellow", highlight=False, soft_wrap=True)
    return all(one.figure is not None and one.met is not False and (one.ratio or 1.0) >= 1.0 for one in found)


def _table(rows: Rows, found: Sequence[Measured], repeat: int) -> Table:
    runs = f"medians of {repeat}" if repeat > 1 else "one turn"
    table = report.table(f"{runs}; peer: {rows.peer}", "", "figure", "peer", "ratio", "bar", "")
    for one in found:
        verdict = {None: "", True: "met", False: "missed"}[one.met]
        table.add_row(
            one.name,
            *(report.number(value, _digits(value)) for value in (one.figure, one.peer)),
            report.number(one.ratio, 2),
            report.number(one.bar, _digits(one.bar)),
            verdict,
        )
    return table


def _digits(value: float | None) -> int:
    return 0 if value is None or value >= 1000 else 1 if value >= 10 else 3
