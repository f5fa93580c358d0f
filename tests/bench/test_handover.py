"""The benchmark of prompts handed over: real engine processes, whole servers."""

from __future__ import annotations

import io
import json
from pathlib import Path

import pytest
from rich.console import Console

from penstock.bench import handover, transfer
from tests.engine.tiny import write_checkpoint


@pytest.mark.slow
def test_blocks_cross_between_processes_and_the_way_alone_is_timed(tmp_path: Path) -> None:
    found = transfer.measure(str(write_checkpoint("llama-gqa", tmp_path)), 512)
    assert found.blocks == 31 and found.bytes == 31 * 12288
    assert found.seconds > 0 and found.bytes_per_s > 0


@pytest.mark.slow
def test_both_servers_are_measured_and_only_one_hands_prompts_over(default_model: Path, tmp_path: Path) -> None:
    settings = handover.HandoverBenchSettings(
        model=str(default_model), streams=2, output_len=24, tokens=128, every_s=0.5, prompts=2, rounds=1, threads=1
    )
    console = Console(file=io.StringIO(), width=120)
    handover.main(settings, tmp_path / "results.json", console)
    results = json.loads((tmp_path / "results.json").read_text())["results"]
    plain, roles = (results[name] for name in handover.SETUPS)
    assert plain["handovers"] == 0 and roles["handovers"] >= 1 and roles["received_bytes"] > 0
    assert plain["itl_s"]["p99"] > 0 and roles["itl_s"]["p99"] > 0 and roles["long_ttft_s"]["p50"] > 0
    assert results["transfer"]["bytes"] > 0
    assert "99th percentile of ITL, without roles over with" in console.file.getvalue()  # type: ignore[attr-defined]
