"""Predicted step times against what an H200 measured (R-PLAN-1: within 15%)."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest
from rich.console import Console

from penstock.bench import predictions
from penstock.bench.predictions import Row, h200_rows
from penstock.planning.calibration import calibration_for
from penstock.planning.catalogue import device

CALIBRATION = calibration_for(device("h200"))
ROWS = h200_rows()
JUDGED = [row for row in ROWS if not row.outside]


@pytest.mark.parametrize("row", JUDGED, ids=lambda row: f"{row.name}, {row.measured:g}")
def test_within_15_percent(row: Row) -> None:
    assert row.predicted(CALIBRATION) == pytest.approx(row.measured, rel=0.15), row.source


def test_there_are_fewer_factors_than_rows() -> None:
    """Or the rows would not show anything: with a factor each, they could all be met."""
    formats = len(CALIBRATION.weights) * 3
    others = sum(
        getattr(CALIBRATION, field.name) > 0 and field.name not in ("link", "few_tokens", "launch_layer_s", "verify_s")
        for field in dataclasses.fields(CALIBRATION)
        if field.type in ("float", "int")
    )
    assert formats + others <= 13 < len({row.name for row in JUDGED})


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
    predictions.main(None, tmp_path / "rows.json", console)
    assert "27 rows: median error" in console.export_text()
    assert len(json.loads((tmp_path / "rows.json").read_text())["results"]) == len(ROWS)
