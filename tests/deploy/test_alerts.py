"""R-OBS-3: the shipped alerts, by promtool's unit tests, and on a live gateway under load, in fast motion."""

from __future__ import annotations

import asyncio
import re
import subprocess
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import yaml

from penstock.config.schema import RequestLogConfig
from penstock.engine.request import Delta, DeviceLoad, EngineLoad, Request
from penstock.metering.log_entries import Entry
from penstock.metering.request_log import RequestLog, Sink, SinkError
from penstock.protocol.errors import EngineLost
from penstock.text import TextModel
from tests.deploy.prometheus import (
    ROOT,
    RULES,
    Prometheus,
    alerting,
    in_fast_motion,
    need_alertmanager,
    need_prometheus,
    scraping,
)
from tests.gateway.conftest import Running, Serving
from tests.scripted import ScriptedEngine

OUTSIDE = {
    *("PenstockGatewayGone", "PenstockRemoteDown", "PenstockBreakerOpen"),
    *("PenstockLogPipelineBehind", "PenstockLogPipelineSinkDown", "PenstockLogPipelineDeadLetters"),
}
"""Alerts about more than one gateway and its engine; promtool alone makes them fire."""
TESTS = ROOT / "deploy/prometheus/rules_test.yml"
ALERTS = {
    rule["alert"]: rule
    for group in yaml.safe_load(RULES.read_text())["groups"]
    for rule in group["rules"]
    if "alert" in rule
}


def promtool(*words: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run(["promtool", *map(str, words)], capture_output=True, text=True, check=False)


def test_every_alert_says_what_to_do() -> None:
    page = (ROOT / "docs/operations.md").read_text()
    headings = {re.sub(r"\W", "", line.lower()) for line in page.splitlines() if line.startswith("###")}
    for name, rule in ALERTS.items():
        assert name in page
        assert rule["annotations"]["runbook"].partition("#")[2] in headings
        assert rule["labels"]["severity"] in ("info", "warning", "page")


@need_prometheus
def test_the_rules_and_the_scrape_configuration_are_valid() -> None:
    assert promtool("check", "config", RULES.parent / "prometheus.yml").returncode == 0
    result = promtool("test", "rules", TESTS)
    assert result.returncode == 0, result.stdout + result.stderr


@need_prometheus
@pytest.mark.slow
@pytest.mark.parametrize(
    ("threshold", "changed"),
    [
        ("[5m]))) > 1", "[5m]))) > 2"),
        ("[5m]))) > 3", "[5m]))) > 8"),
        ("> 0.9", "> 0.89"),
        ("> 1000", "> 1001"),
        ("> 0.5 * sum", "> 0.51 * sum"),
        ("< 0.8 * avg", "< 0.4 * avg"),
        ("[15m]) < 0.5", "[15m]) < 0.2"),
        ("ratio5m > 0.01", "ratio5m > 0.03"),
    ],
)
def test_the_tests_of_the_rules_know_each_threshold(threshold: str, changed: str, tmp_path: Path) -> None:
    rules = RULES.read_text()
    assert rules.count(threshold) == 1
    (tmp_path / "rules.yml").write_text(rules.replace(threshold, changed))
    (tmp_path / "rules_test.yml").write_text(TESTS.read_text())
    assert promtool("test", "rules", tmp_path / "rules_test.yml").returncode != 0


class Moody(ScriptedEngine):
    """An engine that can be made to look, and to be, in trouble."""

    troubled = False
    _count = 0

    def submit(self, request: Request) -> None:
        self._count += 1
        if self.troubled and self._count % 5 == 0:
            self._deltas.append(Delta(request.request_id, finish_reason="error", error="made to fail"))
        else:
            super().submit(request)

    def load_snapshot(self) -> EngineLoad:
        load = super().load_snapshot()
        load.used_blocks = 62 if self.troubled else 6
        load.waiting = 1500 if self.troubled else 0
        load.devices = [DeviceLoad(0, 1, 2, 0.2 if self.troubled else 0.9)]
        return load


class Flaky(Sink):
    """The sink of the request log, away while the engine is in trouble."""

    def __init__(self, sink: Sink, engine: Moody) -> None:
        self._sink = sink
        self._engine = engine

    async def write(self, entries: Sequence[Entry]) -> None:
        if self._engine.troubled:
            raise SinkError("away")
        await self._sink.write(entries)

    async def close(self) -> None:
        await self._sink.close()


@need_prometheus
@need_alertmanager
@pytest.mark.slow
async def test_each_alert_fires_under_a_load_that_deserves_it_and_clears_afterwards(
    serving: Serving, text: TextModel, tmp_path: Path
) -> None:
    engine = Moody(text, "word " * 8, step_s=0.002)
    no_spool = RequestLogConfig(spool=str(tmp_path / "spool"), spool_limit=0, flush_s=0.05)
    async with serving(engine, store_url=f"sqlite:///{tmp_path / 'l.db'}", request_log=no_spool) as gateway:
        assert isinstance(gateway.parts.request_log, RequestLog)
        sink = Flaky(gateway.parts.request_log.sink, engine)
        gateway.parts.request_log.sink = sink
        loads = [asyncio.create_task(_ask_for_ever(gateway)) for _ in range(8)]
        try:
            rules = in_fast_motion(RULES.read_text())
            with alerting(tmp_path) as (port, heard):
                async with scraping(gateway.port, tmp_path, rules, port) as prometheus:
                    await prometheus.until("penstock:generation_tokens:rate5m > 0")
                    await asyncio.sleep(12)  # an hour, as these rules see it
                    assert not await prometheus.firing(), "all is well"

                    engine.troubled = True
                    trouble = asyncio.create_task(_stutter(gateway, engine))
                    await _until(prometheus, lambda seen, now: seen == set(ALERTS) - OUTSIDE, within=90)
                    engine.troubled = False
                    await trouble
                    await _until(prometheus, lambda seen, now: not now, within=60)
                for severity, receiver in (("page", "page"), ("warning", "chat")):
                    expected = {
                        name for name, rule in ALERTS.items() if rule["labels"]["severity"] == severity
                    } - OUTSIDE
                    # What is inhibited by something worse may have been heard before that fired, or not at all.
                    assert expected - {"PenstockFirstTokenSlow"} <= heard[receiver] <= expected
        finally:
            for load in loads:
                load.cancel()
            await asyncio.gather(*loads, return_exceptions=True)


async def _ask_for_ever(gateway: Running) -> None:
    while True:
        await gateway.chat(stream=True)
        await asyncio.sleep(0.02)


async def _stutter(gateway: Running, engine: Moody) -> None:
    """First tokens take more than three seconds, again and again; once the engine is gone for a while."""
    backend = gateway.parts.registry.route("tiny").model.backend.replicas[0]
    info = backend.info
    backend._went_down(EngineLost())  # type: ignore[attr-defined]
    await asyncio.sleep(3)
    backend._came_up(info)  # type: ignore[attr-defined]
    while engine.troubled:
        engine.hold = True
        await asyncio.sleep(4)
        engine.hold = False
        await asyncio.sleep(0.5)


async def _until(prometheus: Prometheus, done: Callable[[set[str], set[str]], bool], within: float) -> None:
    seen: set[str] = set()
    deadline = asyncio.get_running_loop().time() + within
    while True:
        now = await prometheus.firing()
        seen |= now
        if done(seen, now):
            return
        assert asyncio.get_running_loop().time() < deadline, f"seen {sorted(seen)}, firing {sorted(now)}"
        await asyncio.sleep(0.2)
