"""All parts at once: nothing leaks, every answer is that of the request alone; and the soak notices when that fails."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from penstock.bench.engine import BenchError
from penstock.bench.soak.forms import forms
from penstock.bench.soak.run import Report, Soak, SoakSettings
from penstock.bench.soak.traffic import VOCABULARY
from penstock.cli.app import app
from penstock.engine.adapters import pool as adapters
from penstock.engine.core import Engine
from penstock.engine.grammar.guidance import GuidanceCompiler
from penstock.engine.kv.block_hash import root_name
from penstock.engine.scheduler import Scheduler
from penstock.engine.sequence import Sequence


def soak(**settings: Any) -> Report:
    heard: list[str] = []
    run = Soak(
        SoakSettings(**settings),
        forms(),
        lambda size: GuidanceCompiler(VOCABULARY, size),
        lambda report, what: heard.append(what),
    )
    report = run.run()
    assert any("round" in what for what in heard)
    return report


@pytest.mark.slow
def test_a_short_soak_of_everything() -> None:
    report = soak(seed=3, rounds=4, requests=10, faults=0.04)
    assert report.requests == 40 and report.tokens > 400
    assert not report.missing, report
    assert report.ties <= 2


@pytest.mark.slow
def test_the_command_shows_and_writes_its_figures(tmp_path: Path) -> None:
    file = tmp_path / "soak.json"
    command = ["bench", "soak", "--rounds", "1", "--start", "1", "--requests", "6", "--json", str(file)]
    result = CliRunner().invoke(app, command)
    assert result.exit_code == 0 and "requests compared" in result.output, result.output
    figures = json.loads(file.read_text())["results"]
    assert figures["requests"] == 6 and figures["counts"]["steps of draft-int8"] > 0


@pytest.mark.slow
def test_a_cache_that_mixes_adapters_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if blocks were named without the adapter that they were computed with."""
    monkeypatch.setattr(adapters, "root_name", lambda salt, version: root_name(salt))
    with pytest.raises(BenchError, match=r"(?s)alone .*penstock bench soak --seed 3 --start 0 --rounds 1"):
        soak(seed=3, rounds=1, requests=20)


def test_a_leak_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if a cancelled request kept one of its blocks."""
    abort = Engine.abort

    def leak(engine: Engine, request_id: str) -> None:
        seq: Sequence | None = engine.scheduler.get(request_id)
        if seq is not None and seq.blocks:
            engine.scheduler.allocator.pool.share(seq.blocks[-1])
        abort(engine, request_id)

    monkeypatch.setattr(Engine, "abort", leak)
    result = CliRunner().invoke(app, ["bench", "soak", "--seed", "3", "--rounds", "1", "--requests", "20"])
    assert result.exit_code == 1
    assert "blocks leaked" in result.output and "To repeat it: penstock bench soak --seed 3" in result.output


@pytest.mark.slow
def test_sequences_that_stay_in_memory_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    kept = []
    finish = Scheduler.finish
    monkeypatch.setattr(Scheduler, "finish", lambda self, seq: (kept.append(seq), finish(self, seq))[1])
    monkeypatch.setattr(Scheduler, "SLACK", 0)
    with pytest.raises(BenchError, match="sequences are in memory"):
        soak(seed=3, rounds=1, requests=24)


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("seed", [11])
def test_ten_minutes_of_everything(seed: int) -> None:
    report = soak(seed=seed, minutes=10.0)
    assert report.ties < report.requests / 100, report
