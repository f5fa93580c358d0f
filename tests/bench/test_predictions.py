"""Predicted step times against what was measured on an H200 and on CPUs (R-PLAN-1: within 15%)."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from rich.console import Console

from penstock.bench import predictions
from penstock.bench.fit import factor
from penstock.bench.recorded_rows import FITS, Row, fit_rows, recorded_rows
from penstock.errors import ConfigError
from penstock.planning.calibration import calibration_for
from penstock.planning.catalogue import device

CALIBRATIONS = {name: calibration_for(device(name)) for name in FITS}
ROWS = {name: recorded_rows(name) for name in FITS}
JUDGED = [row for rows in ROWS.values() for row in rows if not row.outside]
H200 = [row for row in JUDGED if row.device == "h200"]


def named(row: Row) -> str:
    return f"{row.device} {row.name}, {row.measured:g}"


def within_15_percent(row: Row) -> bool:
    return abs(row.error(CALIBRATIONS[row.device])) < 0.15


@pytest.mark.parametrize("row", [row for row in JUDGED if row.held_out], ids=named)
def test_rows_that_the_factors_were_not_fitted_to(row: Row) -> None:
    assert within_15_percent(row), row.source


@pytest.mark.parametrize("row", [row for row in JUDGED if not row.held_out], ids=named)
def test_rows_that_the_factors_were_fitted_to(row: Row) -> None:
    assert within_15_percent(row), row.source


def test_there_are_fewer_factors_than_rows() -> None:
    """Or the fitted rows would not show anything: with a factor each, they could all be met."""
    fitted, held_out = ({row.name for row in H200 if row.held_out == held} for held in (False, True))
    assert len(FITS["h200"].factors) == 13 < len(fitted) == 17
    assert len(held_out) == 6 and not fitted & held_out
    for name in ("cpu-2", "cpu-2-amx"):
        assert len(FITS[name].factors) <= sum(not row.held_out for row in ROWS[name])


@pytest.mark.slow
@pytest.mark.parametrize("name", FITS)
def test_the_packaged_factors_are_this_fit(name: str) -> None:
    fitted = fit_rows(ROWS[name])
    assert fitted.source == CALIBRATIONS[name].source
    for key in FITS[name].factors:
        assert factor(CALIBRATIONS[name], key) == pytest.approx(factor(fitted, key), rel=0.01), key


def test_every_row_has_its_source_and_those_outside_a_reason() -> None:
    rows = [row for rows in ROWS.values() for row in rows]
    assert all(row.source.startswith("2026-") for row in rows)
    assert [row.name for row in rows if row.outside] == ["qwen3-30b-a3b bf16 ttft128", "llama-8b bf16 ttft128"]


def test_the_page_has_these_figures() -> None:
    """`docs/results/planning.md` is a copy of what the command prints."""
    page = (Path(__file__).parents[2] / "docs" / "results" / "planning.md").read_text()
    for row in JUDGED:
        digits = 0 if row.measured >= 1000 else 1
        cells = f"| {row.measured:,.{digits}f} | {row.predicted(CALIBRATIONS[row.device]):,.{digits}f} |"
        assert cells in page, f"{row.name}: {cells}"


def test_the_command_prints_and_writes(tmp_path: Path) -> None:
    console = Console(record=True, width=140)
    predictions.main("h200", None, None, tmp_path / "rows.json", console)
    text = console.export_text()
    assert "19 rows fitted: median error" in text and "8 rows held out: median error" in text
    assert len(json.loads((tmp_path / "rows.json").read_text())["results"]) == len(ROWS["h200"])


def test_a_device_without_rows() -> None:
    with pytest.raises(ConfigError, match="no recorded rows of l4; there are some of: h200, cpu-2"):
        predictions.main("l4", None, None, None, Console())
