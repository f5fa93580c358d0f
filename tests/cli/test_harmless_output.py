"""What tenants named or wrote cannot steer the terminal of whoever administers the server."""

from __future__ import annotations

import io
import sys
from pathlib import Path

import pytest
from rich.console import Console
from rich.table import Table
from rich.text import Text

from penstock.cli.conversation import _write
from penstock.cli.terminal import harmless, show_error, stdout
from tests.cli.test_keys import run

HOSTILE = "\x1b[2J\x1b]8;;http://evil.example\x07[red]x[/red]\x9b31m\u202e"


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def shown(capsys: pytest.CaptureFixture[str]) -> str:
    said = "".join(capsys.readouterr())
    assert not set("\x07\x9b\u202e") & set(said) and "\x1b[2J" not in said and "\x1b]8" not in said
    return said


def test_tables_show_names_as_they_are(capsys: pytest.CaptureFixture[str]) -> None:
    table = Table("key", "name", box=None)
    table.add_row("psk_1", HOSTILE)
    table.add_row("psk_2", Text(HOSTILE))
    stdout().print(table)
    said = shown(capsys)
    assert said.count("[red]x[/red]") == 2 and said.count("\\x1b[2J") == 2


def test_keys_and_tenants_are_listed_harmlessly(tmp_path: Path) -> None:
    store = tmp_path / "store.db"
    run(store, "tenants", "create", "acme", "--name", HOSTILE)
    run(store, "keys", "create", "--tenant", "acme", "--name", HOSTILE)
    for listed in (run(store, "tenants", "list"), run(store, "keys", "list")):
        assert "acme" in listed and "\\x1b[2J" in listed and "\x1b" not in listed


def test_styles_of_our_own_stay() -> None:
    stream = io.StringIO()
    Console(file=stream, force_terminal=True, color_system="standard").print(harmless(Text(HOSTILE, style="bold")))
    assert stream.getvalue().startswith("\x1b[1m\\x1b[2J")


def test_errors_that_a_server_sent(capsys: pytest.CaptureFixture[str]) -> None:
    show_error(f"the server said {HOSTILE}")
    assert "\\x1b[2J" in shown(capsys)


def test_what_a_model_says_on_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    for stream, expected in ((Terminal(), "one\n\\x1b[2Jtwo\n"), (io.StringIO(), "one\n\x1b[2Jtwo\n")):
        monkeypatch.setattr(sys, "stdout", stream)
        _write(iter(["one\n\x1b[2Jtwo"]))
        assert stream.getvalue() == expected
