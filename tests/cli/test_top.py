"""`penstock top` against a live gateway, and one frame of it from figures."""

from __future__ import annotations

import asyncio
import io

import pytest
from rich.console import Console
from typer.testing import CliRunner

from penstock.cli.app import app
from penstock.cli.top_screen import Screen, duration, sparkline
from penstock.engine.request import DeviceLoad, EngineLoad
from penstock.protocol.control import ModelScaling
from penstock.protocol.fleet_state import FleetGateway, FleetState, MachineState
from penstock.telemetry.autoscale_metrics import add_autoscale_metrics
from penstock.telemetry.fleet_metrics import add_fleet_metrics
from penstock.telemetry.metrics import EngineView, Metrics
from penstock.telemetry.scrapes import Interval, Scrape
from penstock.text import TextModel
from tests.gateway.conftest import Serving, eventually, serving, text
from tests.scripted import ScriptedEngine

__all__ = ["serving", "text"]


def shown(screen: Screen, interval: Interval) -> str:
    out = io.StringIO()
    Console(file=out, width=140).print(screen.frame(interval))
    return out.getvalue()


def test_a_frame_says_how_each_replica_is() -> None:
    loads = [
        EngineLoad(running=3, waiting=7, used_blocks=30, total_blocks=40, devices=[DeviceLoad(0, 20, 80, 0.5)]),
        EngineLoad(),
    ]
    views = [EngineView("m", "0", True, None, loads[0], cost_per_hour=2.5), EngineView("m", "1", False, None, loads[1])]
    metrics = Metrics(lambda: views)
    before = Scrape(metrics.render().decode(), 0.0)
    loads[0].generation_tokens = 500
    metrics.request("m", "0").ttft.observe(0.05, 10)
    metrics.rejected("rate_limit")
    metrics.failed("/v1/chat/completions", 503, "overloaded")
    interval = Interval(before, Scrape(metrics.render().decode(), 2.0))
    frame = shown(Screen("http://there"), interval)
    for part in ("250 tok/s", "running 3", "waiting 7", "KV cache 75%", "errors 0.5/s", "$2.50/h", "rate_limit 0.5/s"):
        assert part in frame
    first, second = (line for line in frame.splitlines() if " m " in line)
    assert all(word in first for word in ("up", "75%", "250", "50%", "25%", "ms"))
    assert "down" in second


def test_a_frame_shows_the_machines_of_a_fleet() -> None:
    views = [
        EngineView("m", "a.0", True, None, EngineLoad(running=3, waiting=7)),
        EngineView("m", "b.0", True, None, EngineLoad(running=2, expert_imbalance=1.25)),
    ]
    metrics = Metrics(lambda: views)
    machines = [
        MachineState(name="a", state="ready", controller=True, engines=1, room=4),
        MachineState(name="b", state="leaving", zone="eu-1", engines=1, room=2),
    ]
    gateways = [FleetGateway(url="http://a:8000", machine="a", state="ready")]
    state = FleetState(name="f", machines=machines, gateways=gateways)
    add_fleet_metrics(metrics.registry, lambda: state)
    scrape = Scrape(metrics.render().decode(), 0.0)
    frame = shown(Screen("http://there"), Interval(scrape, Scrape(metrics.render().decode(), 2.0)))
    first, second = (line.split() for line in frame.splitlines() if "ready, controller" in line or "eu-1" in line)
    assert first[1:9] == ["a", "-", "ready,", "controller", "1", "4", "3", "7"]
    assert second[1:6] == ["b", "eu-1", "leaving", "1", "2"] and "1.25x" in frame


def test_a_frame_says_where_automatic_scaling_stands() -> None:
    metrics = Metrics(list)
    scaling = {"m": ModelScaling(0, 4, desired=3, ready=1, starting=2), "quiet": ModelScaling(0, 1, 0, 0, 0)}
    add_autoscale_metrics(metrics.registry, lambda: scaling)
    scrape = Scrape(metrics.render().decode(), 0.0)
    lines = shown(Screen("http://there"), Interval(scrape, Scrape(metrics.render().decode(), 2.0))).splitlines()
    assert any("m " in line and "1 of 3, 2 starting" in line for line in lines)
    assert any("quiet" in line and "asleep" in line for line in lines)


def test_the_little_chart_and_durations() -> None:
    assert sparkline([0, 1, 2, 4]) == " ▂▄█"
    assert sparkline([0, 0]) == "  "
    assert [duration(s) for s in (None, 0.0012, 0.25, 3.0)] == ["-", "1.2 ms", "250 ms", "3.00 s"]


async def test_one_frame_of_a_running_server(serving: Serving, text: TextModel) -> None:
    engine = ScriptedEngine(text, "word " * 20_000, step_s=0.002, max_model_len=10**6)
    async with serving(engine) as gateway:
        running = asyncio.create_task(gateway.chat(stream=True))
        await eventually(lambda: engine.load_snapshot().generation_tokens > 0)
        words = ["top", "--once", "--interval", "0.2", "--url", f"http://127.0.0.1:{gateway.port}"]
        for _ in range(20):  # nothing may have been generated just then
            result = await asyncio.to_thread(CliRunner(env={"COLUMNS": "140"}).invoke, app, words)
            assert result.exit_code == 0, result.output
            assert "tiny" in result.output and "tok/s" in result.output
            if generated := int(result.output.split("generated ")[1].split()[0].replace(",", "")):
                break
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
    assert generated > 0


def test_no_server_is_a_clear_error() -> None:
    result = CliRunner().invoke(app, ["top", "--once", "--url", "http://127.0.0.1:9"])
    assert result.exit_code != 0
    assert "cannot be reached" in str(result.exception)


@pytest.mark.parametrize("interval", ["0", "x"])
def test_intervals_are_checked(interval: str) -> None:
    assert CliRunner().invoke(app, ["top", "--interval", interval]).exit_code == 2
