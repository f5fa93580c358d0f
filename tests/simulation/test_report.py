"""Reports: what users saw and what the fleet did, from small simulations."""

from __future__ import annotations

import dataclasses
import io
import json
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from penstock.simulation import compare, page, report
from penstock.simulation.report import Report
from penstock.simulation.scenario import Scenario, load
from penstock.simulation.setup import prepare, run

EXAMPLES = Path(__file__).resolve().parents[2] / "examples" / "simulate"
BASE = {
    "model": "llama-3-8b",
    "hardware": "l40s",
    "replicas": "2",
    "duration_s": "8",
    "engine.max_running": "8",
    "workload.rate": "10",
    "workload.input_tokens": "200",
    "workload.output_tokens": "20",
}


@cache
def _made(flags: tuple[tuple[str, str], ...]) -> Report:
    setup = prepare(load(None, BASE | dict(flags)))
    return report.make(setup, run(setup))


def made(**flags: str) -> Report:
    return _made(tuple((key.replace("__", "."), value) for key, value in flags.items()))


def shown(of: Report) -> str:
    console = Console(file=io.StringIO(), width=140)
    report.show(console, of)
    file = console.file
    assert isinstance(file, io.StringIO)
    return file.getvalue()


def test_requests_add_up() -> None:
    one = made()
    everyone = one.everyone
    assert everyone.requests == everyone.served > 50 and everyone.retries == everyone.refused == everyone.given_up == 0
    assert everyone.output_tokens == pytest.approx(20 * everyone.served, rel=0.1)
    assert one.output_tps == pytest.approx(everyone.output_tokens / one.seconds) and one.seconds >= 8
    for spread in (everyone.ttft_s, everyone.gap_s, everyone.latency_s):
        assert spread is not None and 0 < spread["p50"] <= spread["p95"] <= spread["p99"]
    assert everyone.latency_s is not None and everyone.ttft_s is not None
    assert everyone.latency_s["p50"] > everyone.ttft_s["p50"]


def test_without_objectives_every_answer_is_good() -> None:
    assert made().everyone.good == made().everyone.served
    strict = made(objectives__ttft_s="0.000001")
    assert strict.everyone.good == 0 and "0.0% of all requests within TTFT 0 ms" in shown(strict)
    fair = made(objectives__ttft_s="5", objectives__per_token_s="1", objectives__latency_s="60")
    assert fair.everyone.good_share == 1.0


def test_money_is_devices_times_hours_times_price() -> None:
    one = made()
    price = prepare(load(None, BASE)).price
    assert price is not None and one.cost == pytest.approx(one.gpu_hours * price)
    assert one.gpu_hours == pytest.approx(2 * one.seconds / 3600, rel=0.1)
    assert one.cost_per_million == pytest.approx(1e6 * one.cost / one.everyone.output_tokens)
    half = made(spot__share="0.5")
    assert half.spot_gpu_hours == pytest.approx(half.gpu_hours / 2) and half.cost is not None and half.cost < one.cost


OVERLOAD = {
    "workload__rate": "120", "admission__wait_s": "1", "admission__queue": "8", "workload__retries.attempts": "1",
    "workload__output_tokens": "60",
    "workload__tenants": "[{name: bank, tier: enterprise, share: 0.1}, {name: anon, tier: free, share: 0.9}]",
}  # fmt: skip


def test_an_overloaded_fleet_refuses_and_clients_come_back() -> None:
    one = made(**OVERLOAD)
    everyone = one.everyone
    assert everyone.refused > 100 and everyone.retries > 50 and sum(everyone.reasons.values()) == everyone.refused
    assert everyone.requests == everyone.served + everyone.unfinished + everyone.given_up
    assert list(one.tenants) == ["bank", "anon"] and one.tiers == {"bank": "enterprise", "anon": "free"}
    bank, anon = one.tenants["bank"], one.tenants["anon"]
    assert bank.requests + anon.requests == everyone.requests
    assert bank.good_share > anon.good_share, "the higher class is served first"
    assert "bank (enterprise)" in shown(one) and "refused (" in shown(one)


def test_series_cover_the_time_in_a_readable_unit() -> None:
    one = made(**OVERLOAD)
    assert one.unit == "s"
    for panel, series in one.series.items():
        for name, points in series.items():
            assert all(0 <= x <= 8.1 and y >= 0 for x, y in points), (panel, name)
    rate = one.series["requests per second, by when they were sent"]
    assert max(y for _, y in rate["refused"]) > 0
    assert "time to first token of tenants, p95 in s" in one.series


def test_conversations_hit_the_cache() -> None:
    one = made(workload__turns="4", workload__system_tokens="320", workload__think_s="0.2", workload__rate="3")
    assert one.everyone.hit_rate > 0.4


def test_a_failed_replica_and_spot_notices_are_told() -> None:
    one = made(failures="[{at_s: 2, replica: 0, back_after_s: 1}]", cold_start_s="1")
    assert one.failures == 1 and "1 failed" in shown(one) and one.replicas[0] == 1
    assert any("replica 0 dies" in note for _, note in one.notes)
    assert one.everyone.given_up == 0, "streams continue on the other replica"


def test_as_json_is_plain_data() -> None:
    document = json.loads(json.dumps(made().as_json()))
    assert document["everyone"]["served"] == made().everyone.served
    assert {"speed", "good_share", "hit_rate", "cost_per_million_output_tokens"} <= set(document)


def test_the_page_stands_alone_and_escapes() -> None:
    text = page.render(dataclasses.replace(made(**OVERLOAD), title="<b>day</b>"))
    assert text.count("<svg") >= 5 and "&lt;b&gt;day&lt;/b&gt;" in text and "<b>day" not in text
    assert "http://" not in text.replace("http://www.w3.org/2000/svg", "") and "https://" not in text


def conversation(**flags: str) -> Scenario:
    asked = {
        "replicas": "3", "duration_s": "6", "engine.max_running": "16", "engine.kv_blocks": "1024",
        "engine.token_budget": "512", "workload.rate": "9", "workload.turns": "4", "workload.think_s": "0.5",
        "workload.system_tokens": "800", "workload.tenant_count": "8", "workload.input_tokens": "60",
        "workload.output_tokens": "30",
    }  # fmt: skip
    return load(None, BASE | asked | flags)


def _ignored(name: str) -> Any:
    return lambda now: None


def test_our_policy_beats_round_robin_and_random_where_prompts_repeat() -> None:
    reports = compare.policies(prepare(conversation()), _ignored)
    assert set(reports) >= {"predicted", "round_robin", "random", "power_of_two"}
    ours = reports["predicted"].everyone
    for name in ("round_robin", "random"):
        theirs = reports[name].everyone
        assert ours.hit_rate > theirs.hit_rate + 0.05
        assert ours.ttft_s is not None and theirs.ttft_s is not None
        assert all(ours.ttft_s[part] < theirs.ttft_s[part] for part in ("p50", "p95")), name
    assert "<svg" in compare.policies_chart(reports)


@pytest.mark.slow
@pytest.mark.parametrize("seed", [1, 2])
def test_our_policy_beats_them_at_length(seed: int) -> None:
    setup = prepare(load(EXAMPLES / "conversation.yaml", {"seed": str(seed)}))
    assert compare.worse_policies(setup, compare.policies(setup, _ignored)) == []


def test_nothing_is_claimed_where_nothing_repeats() -> None:
    setup = prepare(load(None, BASE))
    assert compare.worse_policies(setup, {"predicted": made(), "random": made()}) == []


def test_autoscalers_on_the_same_spike() -> None:
    asked = {
        "duration_s": "150", "replicas": "1", "cold_start_s": "10", "engine.max_running": "4", "workload.rate": "0.5",
        "workload.output_tokens": "60", "workload.spikes": "[{at_s: 40, seconds: 50, factor: 12}]",
        "autoscale": "{min: 1, max: 8, scale_up_cooldown_s: 5}", "objectives.ttft_s": "2",
    }  # fmt: skip
    reports = compare.autoscale(prepare(load(None, BASE | asked)), _ignored)
    peak, mean, hpa, ours = reports.values()
    assert len({made.everyone.requests for made in reports.values()}) == 1, "the same traffic"
    assert peak.replicas[0] == peak.replicas[2] > mean.replicas[2]
    assert ours.replicas[2] > ours.replicas[0] == 1
    assert ours.everyone.good_share > mean.everyone.good_share
    assert hpa.gpu_hours > mean.gpu_hours
    chart = page.overlay("day", reports, {"replicas ready": "replicas/ready"})
    assert "HPA on queue depth" in chart
