"""systemd units: those of an empty configuration are in deploy/systemd, `systemd-analyze` accepts them, and they follow
the configuration."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest
from typer.testing import CliRunner

from penstock.cli.app import app
from penstock.config import load
from penstock.fleet.systemd import units

ROOT = Path(__file__).parents[2]
FLEET = {"fleet.url": "redis://redis.lan:6379", "fleet.secret_file": "/etc/penstock/fleet.secret"}


def made(program: str = "/opt/penstock/bin/penstock", **flags: str) -> dict[str, str]:
    return units(
        load(environ={}, flags={key.replace("__", "."): value for key, value in flags.items()}), program=program
    )


def test_the_committed_units_are_those_of_a_fleet() -> None:
    committed = {path.name: path.read_text() for path in (ROOT / "deploy" / "systemd").glob("*.service")}
    assert committed == units(load(environ={}, flags=FLEET)), "run: penstock deploy systemd, with fleet.url set"


def test_they_follow_the_configuration() -> None:
    (unit,) = made().values()
    assert "Type=notify\n" in unit and "TimeoutStopSec=60\n" in unit and "CapabilityBoundingSet=\n" in unit
    assert "LoadCredential" not in unit
    (unit,) = made(server__port="443", server__drain_s="300").values()
    assert "TimeoutStopSec=330\n" in unit and "AmbientCapabilities=CAP_NET_BIND_SERVICE\n" in unit


def test_the_command_writes_them(tmp_path: Path) -> None:
    (tmp_path / "penstock.yaml").write_text("server: {drain_s: 100}\n")
    words = ["deploy", "systemd", "-c", str(tmp_path / "penstock.yaml"), "--program", "/usr/bin/penstock"]
    done = CliRunner().invoke(app, [*words, "--output", str(tmp_path)])
    assert done.exit_code == 0, done.output
    unit = (tmp_path / "penstock.service").read_text()
    assert f"ExecStart=/usr/bin/penstock serve --config {tmp_path}/penstock.yaml\n" in unit and "Sec=130\n" in unit


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="needs systemd-analyze")
def test_systemd_accepts_them_and_finds_little_exposed(tmp_path: Path) -> None:
    for name, unit in units(load(environ={}, flags=FLEET), program="/bin/true").items():
        (tmp_path / name).write_text(unit)
    files = [str(path) for path in tmp_path.iterdir()]
    verified = subprocess.run(["systemd-analyze", "verify", *files], capture_output=True, text=True)
    assert (verified.returncode, verified.stdout + verified.stderr) == (0, "")
    judged = subprocess.run(["systemd-analyze", "security", "--offline=true", *files], capture_output=True, text=True)
    levels = [float(level) for level in re.findall(r"Overall exposure level for \S+: (\S+)", judged.stdout)]
    assert len(levels) == 3 and max(levels) < 3, judged.stdout[-500:]
