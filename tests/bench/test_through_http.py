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
from tokenizers import Tokenizer

from penstock.bench import arrivals, random_model, served, shapes, through_http, workloads
from penstock.config.load import model_name
from penstock.engine.loading.checkpoint import open_checkpoint
from penstock.engine.loading.random_checkpoint import tensor_shapes


def test_the_ratio_is_taken_turn_by_turn() -> None:
    turns = [through_http.Turn(100.0, 90.0, {"engine": 2.0}), through_http.Turn(50.0, 49.0, {"engine": 4.0}),
             through_http.Turn(100.0, 95.0, {"engine": 3.0})]  # fmt: skip
    screen = io.StringIO()
    console = Console(file=screen, width=160)
    through_http._show({"c16": turns}, through_http.ThroughHttpBenchSettings(repeat=3), console)
    row, _ = [line for line in screen.getvalue().splitlines() if "c16" in line]
    assert [cell.strip() for cell in row.strip("│ ").split("│")] == ["c16", "100.0", "90.0", "95%", "3.000", "–", "–"]


def test_open_loops_have_the_lengths_of_a_workload_and_arrive_in_order() -> None:
    mix = workloads.named("mix")
    plan = arrivals.with_lengths(list(mix.lengths()), 12.0)
    assert [(planned.input_len, planned.output_len) for planned in plan] == list(mix.lengths())
    assert sorted(plan, key=lambda planned: planned.at) == plan and 15 < plan[-1].at < 30
    assert all(planned.at == 0.0 for planned in arrivals.with_lengths(list(mix.lengths()), None))


def test_a_shape_becomes_a_folder_that_the_engine_reads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tiny = shapes.named("qwen3-0.6b") | {"num_hidden_layers": 1, "hidden_size": 64, "intermediate_size": 64}
    monkeypatch.setitem(
        shapes.SHAPES,
        "tiny",
        tiny | {"vocab_size": 600, "num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 16},
    )
    told: list[tuple[int, int]] = []
    random_model.write(tmp_path / "tiny", "tiny", lambda done, total: told.append((done, total)))
    assert told[-1][0] == told[-1][1]
    checkpoint = open_checkpoint(tmp_path / "tiny")
    assert set(checkpoint.names()) == set(tensor_shapes(checkpoint.config))
    tokenizer = Tokenizer.from_file(str(tmp_path / "tiny" / "tokenizer.json"))
    assert tokenizer.get_vocab_size() == 600 and tokenizer.decode([300, 301]) == "w300w301"


def test_the_folder_of_a_shape_with_fewer_layers_names_the_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(random_model, "write", lambda folder, shape, progress: None)
    path = served.random_model("llama-8b:2", tmp_path, Console(quiet=True))
    assert model_name(path) == "llama-8b-2"


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
