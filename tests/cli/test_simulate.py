"""`penstock simulate` as a user types it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from penstock.cli.app import app

ROOT = Path(__file__).resolve().parents[2]
SMALL = ["--gpu", "l40s", "--duration", "4s", "--input-len", "100", "--output-len", "10"]


def simulate(*arguments: str, code: int = 0) -> str:
    result = CliRunner().invoke(app, ["simulate", *arguments], env={"COLUMNS": "140"})
    assert result.exit_code == code, result.output
    return result.output


def test_options_alone(tmp_path: Path) -> None:
    files = {name: tmp_path / f"out.{name}" for name in ("json", "html", "svg")}
    outputs = ["--json", str(files["json"]), "--html", str(files["html"]), "--chart", str(files["svg"])]
    told = simulate("--model", "llama-3-8b", *SMALL, "--rate", "5", "--replicas", "2", "--slo-ttft", "500", *outputs)
    assert "within TTFT 500 ms" in told and "times as fast as real time" in told and "step times" in told
    document = json.loads(files["json"].read_text())
    assert document["settings"]["workload"]["rate"] == 5 and document["results"]["everyone"]["served"] > 5
    assert files["html"].read_text().startswith("<!doctype html>") and files["svg"].read_text().startswith("<svg")


def test_a_scenario_with_keys_changed() -> None:
    changes = ["--set", "workload.spikes.0.at_s=2", "--set", "workload.spikes.0.seconds=1"]
    told = simulate(str(ROOT / "examples" / "simulate" / "spike.yaml"), "--duration", "6", *changes)
    assert "bank (premium)" in told and "Ten times the traffic" in told


def test_a_closed_loop_and_a_trace(tmp_path: Path) -> None:
    assert "requests/s served" in simulate(*SMALL, "--concurrency", "4")
    (tmp_path / "t.jsonl").write_text('{"at": 0, "input_len": 9, "output_len": 3}\n')
    assert "1 │      1" in simulate("--gpu", "l40s", "--trace", str(tmp_path / "t.jsonl"))


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ((), "name a scenario file"),
        (("--rate", "-3"), "workload.rate: expected a number of at least 0.0001, or null, found '-3.0'"),
        (("--rate", "1", "--replicas", "2000"), "expected a whole number from 1 to 1000"),
        (("--rate", "1", "--gpu", "h20"), "h200"),
        (("--rate", "1", "--model", "lama-3-8b"), "llama-3"),
        (("--rate", "1", "--model", "llama-3-70b", "--gpu", "l40s"), "would do"),
        (("--rate", "1", "--duration", "soon"), "write seconds, or 90s, 10m, 24h"),
        (("--rate", "1", "--set", "replicas"), "write it as KEY=VALUE"),
        (("--rate", "1", "--policy", "psychic"), "expected one of"),
        (("--rate", "1", "--compare", "autoscale"), "needs a scenario with `autoscale:`"),
        (("--trace", "t.csv", "--input-len", "9"), "a trace has its own lengths"),
        (("--trace", "t.csv", "--rate", "9"), "so no rate and no users"),
        (("--compare", "policies", "--against", "engine"), "exclude each other"),
        (("--against", "engine", "--rate", "3"), "takes --model, --duration, --seed only, not workload.rate"),
        (("absent.yaml",), "no such file"),
    ],
)
def test_mistakes_are_sentences(arguments: tuple[str, ...], said: str) -> None:
    result = CliRunner().invoke(app, ["simulate", *arguments], env={"COLUMNS": "400"})
    assert result.exit_code != 0 and said in " ".join(result.output.split()), result.output
    assert "Traceback" not in result.output


def test_help_has_examples() -> None:
    assert simulate("--help").count("penstock simulate") >= 5
