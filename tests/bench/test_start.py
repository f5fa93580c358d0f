"""`penstock bench start`: the first start on its own, medians of the others, and the engine's phases."""

from __future__ import annotations

import io
import json
import os
import signal
import sys
import time
from pathlib import Path

import pytest
from rich.console import Console

from penstock import cli
from penstock.bench import start
from penstock.bench.served import Running, _moments, _process
from penstock.cli import app as cli_app
from penstock.engine.process import age_s


def test_the_first_start_is_shown_on_its_own() -> None:
    runs = [Running("", 0, 30.0 + at, 31.0 + at, {"import": 2.0, "graphs": 5.0 - at}) for at in (0.0, -20.0, -18.0)]
    screen = io.StringIO()
    Console(file=screen, width=120).print(start._table(runs))
    rows = [[cell.strip() for cell in line.strip("│ ").split("│")] for line in screen.getvalue().splitlines()]
    assert ["ready", "30.00", "11.00"] in rows and ["first answer", "31.00", "12.00"] in rows
    assert ["engine, phase graphs", "5.00", "24.00"] in rows


def test_moments_are_those_that_the_supervisor_logs(tmp_path: Path) -> None:
    children = {
        name: {"spawned_s": 1.0, "ready_s": at, "phases": {}} for name, at in (("gateway", 2.0), ("engine m", 4.0))
    }
    event = {"message": "start", "prepared_s": 0.9, "ready_s": 4.1, "children": children}
    log = tmp_path / "log"
    log.write_text(f"noise\n{json.dumps(event)}\n")
    assert _moments(log) == {
        "supervisor: configuration read, models found": 0.9,
        "gateway: process started": 1.0,
        "gateway: ready": 2.0,
        "engine: process started": 1.0,
        "engine: ready": 4.0,
    }
    log.write_text("not yet\n")
    assert _moments(log) == {}


def test_a_process_knows_its_age() -> None:
    first = age_s()
    assert 0.0 < first <= age_s() < 24 * 3600


def test_a_server_of_our_own_is_stopped_when_sigterm_ends_the_benchmark(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    started = []

    def bench() -> None:
        with _process(["sleep", "60"], tmp_path, tmp_path / "log") as (process, _):
            started.append(process)
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(5)

    monkeypatch.setattr(sys, "argv", ["penstock", "bench", "agents"])
    monkeypatch.setattr(cli_app, "narrowed", lambda command: bench)
    before = signal.getsignal(signal.SIGTERM)
    try:
        with pytest.raises(SystemExit) as ended:
            cli.main()
    finally:
        signal.signal(signal.SIGTERM, before)
    assert ended.value.code == 128 + signal.SIGTERM and started[0].poll() == -signal.SIGTERM
