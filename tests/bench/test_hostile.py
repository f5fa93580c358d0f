"""`penstock bench hostile`: the verdict, and one short attack on a real server."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from penstock.bench.commands.app import app
from penstock.bench.hostile.attacks import ATTACKS
from penstock.bench.hostile.run import _row
from penstock.bench.hostile.victim import MEASURES, Victim
from penstock.bench.stats import percentiles
from penstock.bench.wire import Target


def test_a_row_compares_each_measure_with_its_own_quiet_p99() -> None:
    victim = Victim(Target.parse("http://127.0.0.1:1"), "m")
    victim.latencies["token gap"].extend([0.03] * 10)
    victim.latencies["upload"].extend([0.5] * 10)
    base = dict.fromkeys(MEASURES, percentiles([0.02])) | {"upload": percentiles([0.1])}
    row = _row("x", victim, 1.0, {}, base)
    assert row.ratios["token gap"] == pytest.approx(1.5) and row.ratios["upload"] == pytest.approx(5.0)
    assert row.ratios["short chat"] is None, "nothing was measured"
    assert row.worst == pytest.approx(5.0)


def test_an_unknown_attack_is_named_with_those_that_exist() -> None:
    ended = CliRunner().invoke(app, ["hostile", "-a", "no-such"])
    assert ended.exit_code
    assert "no-such" in str(ended.exception) + ended.output and "long-chat" in str(ended.exception) + ended.output
    assert all(attack.__doc__ for attack in ATTACKS.values())


@pytest.mark.slow
def test_one_attack_on_a_real_server(tmp_path: Path) -> None:
    found = tmp_path / "hostile.json"
    # The figures of a shared test machine mean nothing: the bar is out of reach, failures of the tenant still count.
    command = ["hostile", "-a", "wrong-keys", "--seconds", "3", "--bar", "1000", "--json", str(found)]
    ended = CliRunner().invoke(app, command)
    assert ended.exit_code == 0, ended.output
    (row,) = json.loads(found.read_text())["results"]["rows"]
    assert row["answers"]["401"] > 50 and not row["failures"]
    assert all(ratio for ratio in row["ratios"].values())
