"""What a scenario makes of its fleet."""

from __future__ import annotations

import pytest

from penstock.simulation.scenario import load
from penstock.simulation.setup import prepare, run

CHATS = {
    "model": "llama-3-8b", "hardware": "h100", "duration_s": "20", "engine.kv_blocks": "600",
    "engine.max_model_len": "4096", "workload.rate": "1", "workload.turns": "4", "workload.input_tokens": "400",
    "workload.output_tokens": "40",
}  # fmt: skip


def test_a_host_tier_finds_what_the_cache_had_no_room_for() -> None:
    without, behind = prepare(load(None, CHATS)), prepare(load(None, CHATS | {"engine.host_memory": "8GiB"}))
    assert without.replica.host_blocks == 0
    assert "host tier" not in without.assumptions
    assert behind.replica.host_blocks == 4096, "2 MiB each"
    assert behind.replica.host_block_s == pytest.approx(2 * 2**20 / 54e9)
    hits = [record.totals.engine_cached_tokens for record in (run(without), run(behind))]
    assert hits[1] > 1.3 * hits[0]


def test_a_model_that_sleeps_while_idle_holds_its_requests() -> None:
    flags = {
        "autoscale.min": "0", "autoscale.idle_s": "5", "autoscale.scale_down_cooldown_s": "1", "cold_start_s": "14",
        "workload.arrivals": "constant", "workload.rate": "0.03", "workload.turns": "1", "duration_s": "150",
    }  # fmt: skip
    record = run(prepare(load(None, CHATS | flags)))
    assert record.totals.served == record.totals.arrived >= 3
    assert max(row.ttft_s or 0.0 for row in record.requests) > 14.0
    assert min(sample.ready for sample in record.samples) == 0


def test_replicas_hold_the_gap_that_engines_hold_by_default() -> None:
    replica = prepare(load(None, CHATS)).replica
    assert (replica.target_gap_s, replica.gap_is_default, replica.gap_yields_s, replica.prompt_tile) == (
        0.03,
        True,
        0.25,
        128,
    )
    asked = prepare(load(None, CHATS | {"engine.target_gap_ms": "40"})).replica
    assert (asked.target_gap_s, asked.gap_is_default, asked.gap_yields_s) == (0.04, False, None)
