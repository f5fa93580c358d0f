"""The benchmark compares like with like: the same tokens on both sides, guesses only on one."""

from __future__ import annotations

import io
import json
from pathlib import Path

import pytest
from rich.console import Console

from penstock.bench import speculation
from penstock.bench.speculation import Scenario
from penstock.engine.config import EngineConfig
from penstock.errors import ConfigError
from tests.engine.speculative.forced import eager_engine
from tests.engine.tiny import write_checkpoint


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint("llama-gqa", tmp_path_factory.mktemp("bench"), spread=0.3)


def test_only_one_side_guesses_and_both_write_the_same(checkpoint: Path) -> None:
    engine = eager_engine(checkpoint)
    scenario = Scenario("s", [[1, 2, 3], [4, 5, 6]])
    plain, guessed = speculation.measure(engine, scenario, rounds=2, output_len=60, temperature=0.0, acceptance=None)
    assert len(plain) == len(guessed) == 2
    assert all(turn.drafted == 0 for turn in plain) and all(turn.accepted > 0 for turn in guessed)
    assert guessed[0].tokens == plain[0].tokens and guessed[0].steps < plain[0].steps
    assert engine.speculation is not None


@pytest.mark.slow
def test_known_texts_are_guessed_at_the_given_acceptance(checkpoint: Path) -> None:
    engine = eager_engine(checkpoint)
    _, guessed = speculation.measure(
        engine, Scenario("s", [[1, 2, 3]]), rounds=1, output_len=200, temperature=1.0, acceptance=1.0
    )
    assert guessed[0].accepted == guessed[0].drafted > 100


def test_the_report_has_a_row_per_workload(checkpoint: Path, tmp_path: Path) -> None:
    config = EngineConfig(
        model=str(checkpoint), device="cpu", dtype="float32", max_running=64, speculation="ngram", num_blocks=2000
    )
    file = tmp_path / "out.json"
    speculation.main(
        config,
        lambda text: [ord(letter) % 199 for letter in text[:80]],
        rounds=1,
        output_len=4,
        temperature=0.0,
        acceptance=None,
        only=["quote"],
        json_file=file,
        console=Console(file=io.StringIO(), width=200),
    )
    rows = json.loads(file.read_text())["results"]
    assert [(row["workload"], row["batch"]) for row in rows] == [("quote", 1), ("quote", 4)]
    assert all(row["ratio"] > 0 and row["same_text"] == 1 for row in rows)
    with pytest.raises(ConfigError, match="no workload is called nope"):
        speculation.scenarios(None, 10, ["nope"])
