"""The benchmark of deterministic mode runs both engines and checks the promise while it measures."""

from __future__ import annotations

import io
import json
from pathlib import Path

import pytest
from rich.console import Console

from penstock.bench import determinism
from penstock.bench.determinism import Case
from penstock.engine.config import EngineConfig
from tests.engine.tiny import write_checkpoint


def test_both_sides_are_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        determinism,
        "CASES",
        (Case("decode, alone", 1, 20, 5), Case("decode, 3 at once", 3, 20, 5), Case("p", 1, 40, 1)),
    )
    file = tmp_path / "out.json"
    determinism.main(
        EngineConfig(str(write_checkpoint("llama-gqa", tmp_path / "m")), device="cpu", dtype="float32", num_blocks=100),
        checkpoint=None,
        rounds=1,
        json_file=file,
        console=Console(file=io.StringIO(), width=200),
    )
    rows = json.loads(file.read_text())["results"]
    assert [row["workload"] for row in rows] == ["decode, alone", "decode, 3 at once", "p"]
    assert all(row["cost"] > 0 for row in rows)
