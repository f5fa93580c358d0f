"""`penstock bench start`: how long `penstock serve` takes to its first answer, and where the time goes.

Each turn starts a server of its own in an empty folder, waits until it is ready, has it generate one token and stops
it. What other starts left behind stays: kernels that were compiled before, files in the system's cache. So the first
turn may take longer than the others, and is shown on its own.
"""

from __future__ import annotations

import dataclasses
import tempfile
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table

from penstock.bench import report, stats
from penstock.bench.served import Running, random_model, server


@dataclass(frozen=True, slots=True)
class StartBenchSettings:
    model: str = "smollm2-135m"
    device: str = "auto"
    repeat: int = 3
    shape: str | None = None
    """Random weights instead of a model."""
    serve: tuple[str, ...] = ()
    """Further settings of the server, `key=value`."""


def main(settings: StartBenchSettings, json_file: Path | None, console: Console) -> None:
    runs: list[Running] = []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        model = settings.model if settings.shape is None else random_model(settings.shape, folder, console)
        for turn in range(settings.repeat):
            own = folder / str(turn)
            own.mkdir()
            with (
                console.status(f"start {turn + 1} of {settings.repeat}"),
                server(model, own, device=settings.device, settings=settings.serve, settle_s=0.0) as running,
            ):
                runs.append(running)
    label = settings.model if settings.shape is None else f"{settings.shape} (random weights)"
    console.print(f"[bold]{label}[/bold]: {report.machine_line()}")
    console.print(_table(runs))
    console.print(
        "Moments are counted from the beginning of the supervisor's process. Phases are lengths, one after the other "
        "in the engine's process, which is started before the configuration is read: start is its interpreter, its "
        "command line and its configuration, wait is the time until the supervisor gave it the command line; kernels "
        "are built while weights are read, and compile is what is left of that.",
        style="dim",
    )
    if json_file is not None:
        report.write_json(json_file, "start", dataclasses.asdict(settings), [running.start for running in runs])


def _table(runs: list[Running]) -> Table:
    first, others = runs[0], runs[1:] or runs
    rows = report.table("Seconds from starting the process", "", "first start", f"median of {len(others)} more")
    rows.add_row("ready", report.number(first.ready_s, 2), report.number(stats.median(r.ready_s for r in others), 2))
    rows.add_row(
        "first answer",
        report.number(first.first_answer_s, 2),
        report.number(stats.median(r.first_answer_s for r in others), 2),
    )
    for moment, seconds in first.moments.items():
        of_others = stats.median(running.moments.get(moment, 0.0) for running in others)
        rows.add_row(f"{moment}, at", report.number(seconds, 2), report.number(of_others, 2))
    for phase, seconds in first.phases.items():
        of_others = stats.median(running.phases.get(phase, 0.0) for running in others)
        rows.add_row(f"engine, phase {phase}", report.number(seconds, 2), report.number(of_others, 2))
    return rows
