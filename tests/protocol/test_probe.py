"""A probe knows an engine that serves from one that does not, and leaves no trace there."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from penstock.protocol.fleet_secret import FleetSecret, generate
from penstock.protocol.probe import answers
from tests.cli.command import penstock
from tests.engine_host.client import serving
from tests.engine_host.scripted import ScriptedEngine


def test_an_engine_that_serves_answers_whoever_has_the_key(tmp_path: Path) -> None:
    secret, other = FleetSecret((generate(),)), FleetSecret((generate(),))
    with serving(ScriptedEngine(), curve=secret.engine()) as running:
        assert answers(running.endpoint, secret.gateway(), within_s=30)
        assert not answers(running.endpoint, other.gateway(), within_s=0.2)
        assert not running.server._peers._peers, "a probe is no gateway"
        (tmp_path / "secret").write_text(secret.secrets[0])
        setting = ("--set", f"fleet.secret_file={tmp_path / 'secret'}")
        asked = penstock("engine", "--check", "-e", running.endpoint, *setting, cwd=tmp_path)
        assert asked.returncode == 0 and "an engine answers" in asked.stdout


def test_where_nothing_serves_the_command_says_so() -> None:
    assert not answers("tcp://127.0.0.1:1", within_s=0.1)


def test_a_probe_is_cheap() -> None:
    code = "import sys, penstock.protocol.probe, penstock.cli.engine; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
