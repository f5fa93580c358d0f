"""Pools in the simulator: long prompts in a pool of their own do not stall the tokens of chats."""

from __future__ import annotations

from pathlib import Path

import pytest

from penstock.errors import ConfigError
from penstock.simulation import compare
from penstock.simulation.scenario import load
from penstock.simulation.setup import prepare

FILE = Path(__file__).resolve().parents[2] / "examples" / "simulate" / "long-prompts.yaml"


def test_long_prompts_in_their_own_pool_keep_interactive_tokens_coming() -> None:
    setup = prepare(load(FILE, {"duration_s": "30"}))
    reports = compare.pools(setup, lambda name: lambda now: None)
    chats = {name: made.tenants["chats"] for name, made in reports.items()}
    gaps = {name: (found.gap_s or {})["p99"] for name, found in chats.items()}
    assert gaps["with pools"] * 1.3 < gaps["without pools"], "though engines hold a gap by default"
    assert chats["with pools"].served == chats["without pools"].served > 100


def test_what_pools_of_a_scenario_cannot_be() -> None:
    with pytest.raises(ConfigError, match=r"simulated without pools only"):
        load(FILE, {"spot.share": "0.5"})
    with pytest.raises(ConfigError, match=r'there is no pool "wide"'):
        load(FILE, {"pool_rules.0.pool": "wide"})
