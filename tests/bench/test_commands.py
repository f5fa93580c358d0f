"""The command tree of `penstock bench`."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from penstock.bench.commands.app import app
from penstock.bench.options import assignments

ROOT = Path(__file__).resolve().parents[2]
COMMANDS = sorted(
    path.stem for path in (ROOT / "penstock/bench/commands").glob("*.py") if path.stem not in ("__init__", "app")
)


@pytest.mark.parametrize("command", COMMANDS)
def test_every_module_is_a_command_with_help_and_an_example(command: str) -> None:
    name = command.replace("_", "-")
    shown = CliRunner().invoke(app, [name, "--help"], env={"COLUMNS": "200"})
    assert shown.exit_code == 0
    assert f"penstock bench {name}" in shown.output


@pytest.mark.parametrize("script", ["overhead", "streams"])
def test_scripts_run_the_command_of_their_name(script: str) -> None:
    shown = subprocess.run(
        [sys.executable, f"bench/{script}.py", "--help"], capture_output=True, text=True, check=True, cwd=ROOT
    )
    assert f"penstock bench {script}" in shown.stdout


@pytest.mark.parametrize("rate", ["0", "-1", "nan", "inf"])
@pytest.mark.parametrize("command", ["http", "serve", "servers", "goodput"])
def test_what_is_no_rate_is_refused_before_anything_starts(command: str, rate: str) -> None:
    given = ["--server", "a=http://127.0.0.1:9"] if command == "servers" else []
    option = "--low" if command == "goodput" else "--rate"
    refused = CliRunner().invoke(app, [command, *given, option, rate], env={"COLUMNS": "200"})
    assert refused.exit_code == 2, refused.output
    assert f"Invalid value for '{option}'" in refused.output


def test_values_given_by_name() -> None:
    assert assignments("--python", ["a=x=y"], ("a", "b")) == {"a": "x=y"}
    assert assignments("--python", None, ("a",)) == {}
    with pytest.raises(Exception, match="write it as NAME=PATH, with a name of a"):
        assignments("--python", ["b=x"], ("a",))
