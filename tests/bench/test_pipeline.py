"""`penstock bench pipeline` on a tiny model: it measures three engines and compares them."""

from __future__ import annotations

import io
import json
from pathlib import Path
from unittest.mock import patch

from rich.console import Console

from penstock.bench.pipeline import PipelineBenchSettings, main
from penstock.engine.parallel import launch
from tests.engine.parallel import threads


def test_every_workload_is_measured_on_a_stage_the_pipeline_and_the_whole(tmp_path: Path) -> None:
    shown = io.StringIO()
    settings = PipelineBenchSettings(stages=2, layers=1, hidden=64, batch=2, output_len=4, input_len=8, rounds=1)
    with patch.object(launch, "_spawn", threads._spawn):
        main(settings, tmp_path / "out.json", Console(file=shown, width=200))
    results = json.loads((tmp_path / "out.json").read_text())["results"]
    assert [row["workload"] for row in results] == ["decode, 2 a step", "prompts of 8", "one prompt of 32"]
    assert all(row["full"] == row["pipeline"] / row["stage"] > 0 for row in results)
    assert "2 stages of 1 layers" in shown.getvalue()
