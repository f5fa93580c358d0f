"""`penstock bench predictions`: what `planning.step_time` predicts beside what was measured, row by row."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from penstock.bench import report
from penstock.bench.recorded_rows import FITS, fit_rows, recorded_rows
from penstock.errors import ConfigError
from penstock.planning.calibration import calibration_for, read_calibration, write_calibration
from penstock.planning.catalogue import device


def main(device_name: str, path: Path | None, fit_to: Path | None, json_file: Path | None, console: Console) -> None:
    if device_name not in FITS:
        raise ConfigError(f"there are no recorded rows of {device_name}; there are some of: {', '.join(FITS)}")
    rows = recorded_rows(device_name)
    if fit_to is not None:
        write_calibration(fit_rows(rows), fit_to)
        path = fit_to
    calibration = calibration_for(device(device_name)) if path is None else read_calibration(path)
    table = report.table(
        f"Predicted and measured, {device(device_name).title}", "row", "unit", "measured", "predicted", "error"
    )
    for row in rows:
        digits = 0 if row.measured >= 1000 else 1
        mark = "*" if row.outside else ", held out" if row.held_out else ""
        table.add_row(
            row.name + mark,
            row.in_unit,
            report.number(row.measured, digits),
            report.number(row.predicted(calibration), digits),
            f"{row.error(calibration):+.1%}",
        )
    console.print(table)
    for kind, judged in (("fitted", False), ("held out", True)):
        errors = sorted(abs(row.error(calibration)) for row in rows if row.held_out == judged and not row.outside)
        if errors:
            console.print(f"{len(errors)} rows {kind}: median error {_middle(errors):.1%}, largest {errors[-1]:.1%}")
    console.print(f"Calibration: {calibration.title}. {calibration.source.note}")
    for row in rows:
        if row.outside:
            console.print(f"* {row.name}: {row.outside}", style="dim")
    if json_file is not None:
        results = [
            {
                "row": row.name,
                "unit": row.unit,
                "measured": row.measured,
                "predicted": row.predicted(calibration),
                "held_out": row.held_out,
            }
            for row in rows
        ]
        report.write_json(json_file, "predictions", {"calibration": calibration.title}, results)


def _middle(values: Sequence[float]) -> float:
    return values[len(values) // 2]
