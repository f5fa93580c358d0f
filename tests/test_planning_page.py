"""The commands of docs/planning.md run, and its figures that no price or calibration changes are theirs."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from pathlib import Path

import pytest
from typer.testing import CliRunner

from penstock.cli.app import app

pytestmark = pytest.mark.slow
PAGE = (Path(__file__).resolve().parent.parent / "docs" / "planning.md").read_text()
FENCES = re.findall(r"^```sh\n(.*?)^```", PAGE, flags=re.S | re.M)
COMMANDS = [shlex.split(line, comments=True) for block in FENCES for line in block.splitlines() if line.strip()]


@pytest.fixture(scope="module")
def outputs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Path, dict[str, str]]]:
    """What each command printed, run one after another in a new folder."""
    folder = tmp_path_factory.mktemp("reader")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        yield folder, {shlex.join(command): run(command) for command in COMMANDS}


def run(command: list[str]) -> str:
    assert command[0] == "penstock"
    result = CliRunner().invoke(app, command[1:], env={"COLUMNS": "100"})
    assert result.exit_code == 0, f"{command}: {result.output} {result.exception!r}"
    return result.output


def test_commands_of_the_page_run(outputs: tuple[Path, dict[str, str]]) -> None:
    assert len(outputs[1]) == len(COMMANDS) > 5 and all(outputs[1].values())


def test_the_load_on_the_page_is_the_commands(outputs: tuple[Path, dict[str, str]]) -> None:
    shown = outputs[1][shlex.join(COMMANDS[0])]
    table = PAGE[PAGE.index("per second  requests") :].partition("```")[0]
    for line in table.strip().splitlines():
        assert line.split() in [printed.split() for printed in shown.splitlines()]
    assert "320 KiB per token" in shown and "320 KiB per token" in PAGE


def test_the_charts_on_the_page_are_those_that_its_command_writes(outputs: tuple[Path, dict[str, str]]) -> None:
    shown = set(re.findall(r"images/(plan-[\w-]+\.svg)", PAGE))
    assert shown == {path.name for path in (outputs[0] / "images").glob("plan-*")}
