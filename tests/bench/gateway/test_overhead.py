"""The overhead benchmark on real processes, in small."""

from __future__ import annotations

import io
import json
from pathlib import Path

import pytest
from rich.console import Console

from penstock.bench.gateway.overhead import OverheadBenchSettings, main, show
from penstock.errors import ConfigError

SMALL = OverheadBenchSettings(rate=50.0, seconds=0.5, rounds=1, at_once=4)


@pytest.mark.slow
def test_all_measurements_are_taken_and_written(tmp_path: Path) -> None:
    console, file = Console(file=io.StringIO(), width=120), tmp_path / "overhead.json"
    main(SMALL, file, console)
    document = json.loads(file.read_text())
    assert document["benchmark"] == "overhead" and document["settings"]["rate"] == 50.0
    results = document["results"]
    assert results["latency, penstock"]["p50"] > results["latency, bare backend"]["p50"] > 0
    assert 0 < results["lone streams"]["p50"] <= results["lone streams"]["largest"]
    assert set(results["cpu_ms_per_request, penstock"]) == {"gateway", "engine", "backend", "generator"}
    assert {name: len(rates) for name, rates in results["requests_per_s"].items()} == {
        "penstock": 1,
        "penstock, same backend": 1,
    }


@pytest.mark.parametrize(("p99_ms", "ratio", "good"), [(9.0, 6.0, True), (11.0, 6.0, False), (9.0, 4.0, False)])
def test_the_verdict_follows_from_latency_and_ratio(p99_ms: float, ratio: float, good: bool) -> None:
    latency = {"p50": 0.001, "p99": p99_ms / 1000, "largest": 0.02}
    results = {f"{what}, {who}": latency for what in ("latency", "late") for who in ("bare backend", "penstock")}
    results["lone streams"] = {"p50": 0.001, "p90": 0.002, "largest": 0.003}
    results |= {f"cpu_ms_per_request, {who}": {"gateway": 1.0} for who in ("bare backend", "penstock")}
    verdict = show({**results, "requests_per_s": {"penstock": [1.0]}, "ratio": ratio}, SMALL, Console(quiet=True))
    assert verdict is good


def test_an_interpreter_without_litellm_is_refused_before_anything_starts() -> None:
    with pytest.raises(ConfigError, match="cannot import litellm"):
        main(OverheadBenchSettings(litellm="false"), None, Console(quiet=True))
