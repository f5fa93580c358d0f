"""`penstock bench table`: rows are found in what benchmarks write, and judged beside their peer and their bar."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.main import get_command
from typer.testing import CliRunner

from penstock.bench import workloads
from penstock.bench.commands.app import app
from penstock.bench.engine import BenchError
from penstock.bench.peer_table import Row, figure_of, judged, read_rows
from penstock.errors import ConfigError

TURNS = [
    {"workload": "b1", "turns": [{"http_tps": at, "ttft": {"p50": at / 1000}} for at in (3.0, 1.0, 2.0)]},
    {"workload": "b64", "turns": [{"http_tps": 9.0, "ttft": None}]},
]
ROWS = """
title: Here
peer: somebody else
runs:
  quick:
    command: predictions
    start_s: 1
    rows:
      - {name: speed, of: {row: llama-8b bf16 c16}, figure: predicted, peer: 0.001, bar: 1000000000}
      - {name: nothing, of: {row: llama-8b bf16 c16}, figure: no_such}
  broken:
    command: predictions --no-such
    start_s: 1
    rows: [{name: never, figure: median}]
  long:
    command: engine
    start_s: 100000
    rows: [{name: no time, figure: median}]
"""


def test_a_figure_is_the_median_over_turns() -> None:
    row = Row(name="", of={"workload": "b1"}, figure="turns/*/http_tps")
    assert figure_of(TURNS, row) == 2.0
    assert figure_of(TURNS, Row(name="", of={"workload": "b1"}, figure="turns/*/ttft/p50", scale=1000)) == 2.0
    assert figure_of([{"s": 4.0}, {"s": 2.0}], Row(name="", figure="*/s")) == 3.0
    assert figure_of({"share, later": 0.5}, Row(name="", figure="share, later")) == 0.5


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        (Row(name="", of={"workload": "b2"}, figure="turns/*/http_tps"), "0 results are of"),
        (Row(name="", of={"workload": "b1"}, figure="turns/*/gap/p50"), "no turns/"),
        (Row(name="", of={"workload": "b64"}, figure="turns/*/ttft/p50"), "no turns/"),
        (Row(name="", of={"workload": "b64"}, figure="turns/*/ttft"), "no value"),
    ],
)
def test_a_figure_that_is_not_there_is_missing(row: Row, reason: str) -> None:
    with pytest.raises(BenchError, match=reason):
        figure_of(TURNS, row)


def test_ahead_is_above_one_whichever_way_is_better() -> None:
    faster = judged("run", Row(name="tok/s", figure="", peer=100.0, bar=150.0), 200.0)
    assert (faster.ratio, faster.met) == (2.0, True)
    later = judged("run", Row(name="ms", figure="", peer=100.0, bar=150.0, better="lower"), 200.0)
    assert (later.ratio, later.met) == (0.5, False)
    alone = judged("run", Row(name="tok/s", figure=""), 1.0)
    assert (alone.ratio, alone.met) == (None, None)


def test_the_packaged_commands_are_commands() -> None:
    """Every option of every run exists: what is wrong is found before the device is there."""
    commands = get_command(app).commands  # type: ignore[attr-defined]
    for run in read_rows(None).runs.values():
        name, *arguments = run.command.split()
        repeat = ["--repeat", "3"] if run.turn_s is not None else []
        with commands[name].make_context(name, [*arguments, *repeat, "--json", "x.json"]) as context:
            for workload in context.params.get("workload") or ():
                assert workloads.named(workload)
                assert any(row.of.get("workload") == workload for row in run.rows)


def test_rows_that_are_none_are_refused(tmp_path: Path) -> None:
    wrong = tmp_path / "rows.yaml"
    wrong.write_text("title: x\npeer: y\nruns: {a: {command: engine, start_s: 1, rows: [{name: x, figur: y}]}}")
    with pytest.raises(ConfigError, match="figur"):
        read_rows(wrong)


@pytest.mark.slow
def test_runs_are_run_and_one_that_fails_does_not_lose_the_others(tmp_path: Path) -> None:
    rows, found = tmp_path / "rows.yaml", tmp_path / "found.json"
    rows.write_text(ROWS)
    ended = CliRunner().invoke(
        app, ["table", "--rows", str(rows), "--repeat", "1", "--seconds", "600", "--json", str(found)]
    )
    assert ended.exit_code == 1, ended.output
    by_name = {row["name"]: row for row in json.loads(found.read_text())["results"]}
    speed = by_name["speed"]
    assert speed["figure"] > 0 and speed["ratio"] > 1 and speed["met"] is False
    assert "no no_such" in by_name["nothing"]["missing"]
    assert "--no-such" in by_name["never"]["missing"]
    assert "not begun" in by_name["no time"]["missing"]
    assert "missed" in ended.output
