"""The admission-cost benchmark on real processes, in small."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from penstock.bench.gateway.admission_cost import AdmissionCostBenchSettings, main


@pytest.mark.slow
def test_the_queue_is_compared_with_none() -> None:
    console = Console(file=io.StringIO(), width=200)
    main(AdmissionCostBenchSettings(streams=4, prompt=16, requests=60, rounds=1), None, console)
    assert isinstance(console.file, io.StringIO)
    assert "us with the queue" in console.file.getvalue()
