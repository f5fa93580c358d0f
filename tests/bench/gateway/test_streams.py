"""The streams benchmark on real processes, in small."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from rich.console import Console

from penstock.bench.gateway.streams import StreamsBenchSettings, main


@pytest.mark.slow
def test_every_stream_arrives_whole_also_those_that_stop_reading(tmp_path: Path) -> None:
    file = tmp_path / "streams.json"
    settings = StreamsBenchSettings(streams=30, interval=0.2, seconds=2.0, ramp=100.0, slow=2)
    assert main(settings, file, Console(quiet=True))
    results = json.loads(file.read_text())["results"]
    assert (results["complete"], results["broken"], results["out_of_order"]) == (30, 0, 0)
    assert results["in_flight"] == 30
    assert results["gap_s"]["p50"] > 0 and results["memory_busy"] >= results["memory_idle"] > 0
