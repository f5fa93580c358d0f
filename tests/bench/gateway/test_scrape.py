"""The scrape benchmark on real processes, in small."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from rich.console import Console

from penstock.bench.gateway.scrape import ScrapeBenchSettings, main


@pytest.mark.slow
def test_streams_run_with_and_without_a_scraper(tmp_path: Path) -> None:
    file = tmp_path / "scrape.json"
    main(ScrapeBenchSettings(streams=8, tokens=16, requests=64, features=3, rounds=1), file, Console(quiet=True))
    results = json.loads(file.read_text())["results"]
    assert results["tokens_per_s_without"] > 0 and results["tokens_per_s_with"] > 0
    assert results["bytes"] > 1000 and results["gateway_cpu_ms_per_scrape"] >= 0
