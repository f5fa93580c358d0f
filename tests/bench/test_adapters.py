"""The adapter benchmark runs both sides on one engine and prints their ratio."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from rich.console import Console

from penstock.bench import adapter_cost
from penstock.bench.adapters import compare_adapters
from penstock.bench.offline import OfflineBenchSettings
from penstock.bench.workloads import Workload
from tests.engine.harness import make_engine
from tests.engine.tiny import write_checkpoint


def test_both_sides_and_their_ratio(tmp_path: Path) -> None:
    base = write_checkpoint("llama-gqa", tmp_path / "base")
    engine = make_engine(base, adapter_slots=3, adapter_rank=4)
    console = Console(record=True, width=120)
    workload = Workload("tiny", 6, (4, 8), (3, 5))
    file = tmp_path / "figures.json"
    compare_adapters(engine, [workload], OfflineBenchSettings(adapters=3, adapter_rank=4), file, console)
    assert "ratio" in console.export_text()
    (result,) = json.loads(file.read_text())["results"]
    assert result["with"]["latency_ms"] > 0 and result["latency_ratio"] > 0
    load = engine.load_snapshot().adapters
    assert load is not None and load.copies == 3, "the requests of one side used the adapters"


@pytest.mark.slow
def test_the_cost_of_every_mixture_beside_its_bound(tmp_path: Path) -> None:
    base = write_checkpoint("llama-gqa", tmp_path / "base")
    console = Console(record=True, width=160)
    file = tmp_path / "figures.json"
    settings = OfflineBenchSettings(model=str(base), device="cpu", adapter_rank=4)
    adapter_cost.main(settings, [1, 2], [1, 2], 8, file, console)
    rows = json.loads(file.read_text())["results"]
    asked = [(row["targets"], row["batch"], row["adapters"]) for row in rows]
    mixtures = [(1, 1), (2, 1), (2, 2)]
    assert asked == [(name, *mixture) for name in ("every linear", "q_proj, v_proj") for mixture in mixtures]
    assert all(row["ratio"] > 0 and row["bound"] > 1 for row in rows)
    whole, few = rows[2], rows[5]
    assert (
        few["bound"] * few["without_ms"] - few["without_ms"]
        < whole["bound"] * whole["without_ms"] - whole["without_ms"]
    )
    assert "bytes" in console.export_text()
