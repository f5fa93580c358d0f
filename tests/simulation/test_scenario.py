"""Scenario files and options."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from penstock.errors import ConfigError
from penstock.simulation.scenario import load

EXAMPLES = Path(__file__).resolve().parents[2] / "examples" / "simulate"


def complaint(text: str, tmp_path: Path, **flags: str) -> str:
    file = tmp_path / "scenario.yaml"
    file.write_text(text)
    with pytest.raises(ConfigError) as raised:
        load(file, flags)
    return str(raised.value)


@pytest.mark.parametrize("file", sorted(EXAMPLES.glob("*.yaml")), ids=lambda file: file.stem)
def test_the_examples_are_valid(file: Path) -> None:
    assert load(file).name


def test_options_alone_are_a_scenario() -> None:
    made = load(None, {"model": "llama-3-70b", "replicas": "4", "workload.rate": "12", "engine.tensor_parallel": "4"})
    assert (made.model, made.replicas, made.workload.rate, made.engine.tensor_parallel) == ("llama-3-70b", 4, 12.0, 4)
    assert made.title == "llama-3-70b on h200"


def test_options_go_over_a_file(tmp_path: Path) -> None:
    (tmp_path / "s.yaml").write_text("workload: {rate: 1, tenants: [{name: a}]}\nadmission: {wait_s: 3}\n")
    made = load(tmp_path / "s.yaml", {"workload.rate": "2", "admission.queue": "9"})
    assert (made.workload.rate, made.admission.wait_s, made.admission.queue) == (2.0, 3.0, 9)


def test_a_trace_is_beside_its_scenario(tmp_path: Path) -> None:
    (tmp_path / "t.jsonl").write_text('{"at": 0, "input_len": 1, "output_len": 1}\n')
    (tmp_path / "s.yaml").write_text("workload: {arrivals: trace, trace: t.jsonl}\n")
    assert load(tmp_path / "s.yaml").workload.trace == os.fspath(tmp_path / "t.jsonl")
    assert load(tmp_path / "s.yaml").duration_s == 1.0, "the whole trace"
    assert load(tmp_path / "s.yaml", {"duration_s": "9"}).duration_s == 9.0


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("workload: {rate: -1}", "scenario.yaml:1: workload.rate: expected a number of at least 0.0001"),
        ("workload: {}", "workload.rate: needed with arrivals: poisson; or users"),
        ("workload: {rate: 1, users: 5}", "give users or rate, not both"),
        ("workload: {rate: 1}\nreplicas: 0", "scenario.yaml:2: replicas: expected a whole number from 1 to 1000"),
        ("workload: {rate: 1}\nreplicas: 1001", "from 1 to 1000"),
        ("workload: {rate: 1}\nreplica: 2", 'did you mean "replicas"?'),
        ("workload: {rate: 1, day: ofice}", "did you mean office?"),
        ("workload: {arrivals: trace}", "workload.trace: arrivals: trace needs a file"),
        ("workload: {rate: 1, trace: x.csv}", "workload.trace: needs arrivals: trace"),
        ("workload: {arrivals: closed, day: office}", "has its own times"),
        ("workload: {arrivals: closed, rate: 3}", "has its own times, so no rate"),
        ("workload: {arrivals: closed, turns: 3}", "conversations begin at a rate"),
        ("workload: {rate: 1, tenants: [{name: a, tier: gold}]}", 'no tier "gold"; there are free, standard'),
        ("workload: {rate: 1, tenants: [{name: a}, {name: a}]}", "workload.tenants[1].name: a name of its own"),
        ("workload: {rate: 1, input_tokens: 9000}", "set at least 13692"),
        ("workload: {rate: 1}\nfailures: [{at_s: 5}]", "failures[0]: say which replica or which node"),
        ("workload: {rate: 1}\nfailures: [{at_s: 5, replica: 1}]", "there are replicas 0 to 0"),
        ("workload: {rate: 1}\nfailures: [{at_s: 700, replica: 0}]", "the simulation ends after 600 s"),
        ("workload: {rate: 1}\nautoscale: {min: 3, max: 2}", "autoscale: min (3) must be at most max (2)"),
        ("workload: {rate: 1}\nautoscale: {max: 2}\nspot: {share: 0.5}", "autoscale.spot says"),
        ("workload: {rate: 1}\nrouting: {policy: psychic}", "expected one of round_robin"),
        ("workload: {rate: 1}\nadmission: {url: 'redis://x'}", "one queue in memory"),
        ("workload: [", "not valid YAML"),
    ],
)
def test_mistakes_are_sentences(text: str, said: str, tmp_path: Path) -> None:
    assert said in complaint(text, tmp_path)


def test_all_mistakes_at_once(tmp_path: Path) -> None:
    told = complaint("workload: {rate: x, spread: 2}\nseed: -1\n", tmp_path)
    assert len(told.splitlines()) == 3


def test_an_option_is_named_in_its_mistake(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"option workload\.rate: workload\.rate: expected a number"):
        load(None, {"workload.rate": "fast"})
    with pytest.raises(ConfigError, match="no such file; scenarios to begin with are in examples/simulate"):
        load(tmp_path / "absent.yaml")
