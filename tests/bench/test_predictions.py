"""Predicted step times against what an H200 measured (R-PLAN-1: within 15%)."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from rich.console import Console

from penstock.bench import predictions
from penstock.bench.fit import factor
from penstock.bench.predictions import Row, h200_rows
from penstock.planning.calibration import calibration_for
from penstock.planning.catalogue import device

CALIBRATION = calibration_for(device("h200"))
ROWS = h200_rows()
JUDGED = [row for row in ROWS if not row.outside]


HELD_OUT = [row for row in JUDGED if row.held_out]


def named(row: Row) -> str:
    return f"{row.name}, {row.measured:g}"


@pytest.mark.parametrize("row", HELD_OUT, ids=named)
def test_rows_that_the_factors_were_not_fitted_to(row: Row) -> None:
    assert row.predicted(CALIBRATION) == pytest.approx(row.measured, rel=0.15), row.source


@pytest.mark.parametrize("row", [row for row in JUDGED if not row.held_out], ids=named)
def test_rows_that_the_factors_were_fitted_to(row: Row) -> None:
    assert row.predicted(CALIBRATION) == pytest.approx(row.measured, rel=0.15), row.source


def test_there_are_fewer_factors_than_rows() -> None:
    """Or the fitted rows would not show anything: with a factor each, they could all be met."""
    fitted = {row.name for row in JUDGED if not row.held_out}
    assert len(predictions.FITTED) == 13 < len(fitted) == 17
    assert len(HELD_OUT) == 8 and not fitted & {row.name for row in HELD_OUT}


@pytest.mark.slow
def test_the_packaged_factors_are_this_fit() -> None:
    fitted = predictions.fit_rows(ROWS)
    assert fitted.source == CALIBRATION.source
    for name in predictions.FITTED:
        assert factor(CALIBRATION, name) == pytest.approx(factor(fitted, name), rel=0.01), name


def test_every_row_has_its_source_and_those_outside_a_reason() -> None:
    assert all(row.source.startswith("2026-") for row in ROWS)
    assert [row.name for row in ROWS if row.outside] == ["qwen3-30b-a3b bf16 ttft128", "llama-8b bf16 ttft128"]


def test_the_page_has_these_figures() -> None:
    """`docs/results/planning.md` is a copy of what the command prints."""
    page = (Path(__file__).parents[2] / "docs" / "results" / "planning.md").read_text()
    for row in JUDGED:
        digits = 0 if row.measured >= 1000 else 1
        cells = f"| {row.measured:,.{digits}f} | {row.predicted(CALIBRATION):,.{digits}f} |"
        assert cells in page, f"{row.name}: {cells}"


def test_the_command_prints_and_writes(tmp_path: Path) -> None:
    console = Console(record=True, width=140)
    predictions.main(None, None, tmp_path / "rows.json", console)
    text = console.export_text()
    assert "19 rows fitted: median error" in text and "8 rows held out: median error" in text
    assert len(json.loads((tmp_path / "rows.json").read_text())["results"]) == len(ROWS)
