"""`penstock bench http`: the same work offline and through HTTP, and what the processes in between spend."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from rich.console import Console

from penstock.bench import through_http
from penstock.bench.engine import BenchError


def test_the_ratio_is_taken_turn_by_turn() -> None:
    turns = [through_http.Turn(100.0, 90.0, {"engine": 2.0}), through_http.Turn(50.0, 49.0, {"engine": 4.0}),
             through_http.Turn(100.0, 95.0, {"engine": 3.0})]  # fmt: skip
    screen = io.StringIO()
    console = Console(file=screen, width=160)
    through_http._show({"c16": turns}, through_http.ThroughHttpBenchSettings(repeat=3), console)
    (row,) = [line for line in screen.getvalue().splitlines() if "c16" in line]
    assert [cell.strip() for cell in row.strip("│ ").split("│")] == ["c16", "100.0", "90.0", "95%", "3.000", "–", "–"]


def test_a_workload_that_is_not_a_closed_loop_is_refused() -> None:
    with pytest.raises(BenchError, match="not a closed loop"):
        through_http.main(through_http.ThroughHttpBenchSettings(), ["b64"], None, Console(file=io.StringIO()))


@pytest.mark.slow
def test_both_sides_run_and_cpu_time_is_told(default_model: Path, tmp_path: Path) -> None:
    found = tmp_path / "results.json"
    command = [sys.executable, "-m", "penstock", "bench", "http", "-w", "c1", "--repeat", "1", "--json", str(found)]
    subprocess.run([*command, "--model", str(default_model)], check=True, timeout=600, env=os.environ.copy())
    (result,) = json.loads(found.read_text())["results"]
    (turn,) = result["turns"]
    assert turn["offline_tps"] > 0 and turn["http_tps"] > 0
    if sys.platform == "linux":
        assert turn["cpu_s"]["engine"] > turn["cpu_s"]["gateway"] > 0
