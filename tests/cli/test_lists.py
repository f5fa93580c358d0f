"""Lists: whole ids, columns that give way on a narrow terminal, and the same rows for programs."""

from __future__ import annotations

import csv
import io
import json
from typing import Any

import pytest
from rich.console import Console

from penstock.cli import terminal
from penstock.cli.lists import Column, fitting, plain, show

Row = dict[str, Any]
ID = "req_0123456789abcdef0123456789abcdef"
COLUMNS: list[Column[Row]] = [
    Column("request", lambda row: row["id"], rank=0),
    Column("user name", lambda row: row["user"], rank=3),
    Column("tokens", lambda row: row["tokens"], rank=1),
    Column("note", lambda row: row["note"], rank=2, fold=True),
]
ROWS: list[Row] = [
    {"id": ID, "user": "ann", "tokens": 12345, "note": "a note that is longer than others " * 2},
    {"id": ID[:-1] + "0", "user": None, "tokens": None, "note": ""},
]


def on_a_terminal(width: int, monkeypatch: pytest.MonkeyPatch) -> tuple[str, str]:
    out, err = io.StringIO(), io.StringIO()
    screen = Console(file=out, force_terminal=True, width=width, color_system=None)
    monkeypatch.setattr(terminal, "stdout", lambda: screen)
    monkeypatch.setattr(terminal, "stderr", lambda: Console(file=err, width=200))
    show(COLUMNS, ROWS, "table")
    return out.getvalue(), err.getvalue()


def test_columns_give_way_by_rank() -> None:
    assert fitting([10, 10, 10], [0, 2, 1], 34) == [0, 1, 2]
    assert fitting([10, 10, 10], [0, 2, 1], 33) == [0, 2]
    assert fitting([10, 10, 10], [0, 1, 1], 25) == [0, 1], "of equal ones the last"
    assert fitting([10, 10], [0, 0], 5) == [0, 1], "what must stay stays"


def test_a_wide_terminal_shows_everything(monkeypatch: pytest.MonkeyPatch) -> None:
    said, hint = on_a_terminal(150, monkeypatch)
    assert all(word in said for word in ("request", "user name", "tokens", "note", ID, "12,345")) and not hint


def test_a_narrow_terminal_keeps_ids_whole_and_says_what_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    said, hint = on_a_terminal(48, monkeypatch)
    assert ID in said and "12,345" in said and "user name" not in said
    assert "not shown here: user name, note" in hint and "-o json" in hint
    said, hint = on_a_terminal(20, monkeypatch)
    assert ID in said.replace("\n", "") and "tokens" in hint


def test_a_pipe_gets_every_column_on_one_line_per_row(capsys: pytest.CaptureFixture[str]) -> None:
    show(COLUMNS, ROWS, "table")
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 3
    assert lines[1].startswith(ID) and "12,345" in lines[1] and "longer than others" in lines[1]


def test_json_and_csv_carry_the_values(capsys: pytest.CaptureFixture[str]) -> None:
    show(COLUMNS, ROWS, "json")
    first, second = json.loads(capsys.readouterr().out)
    assert first == {"request": ID, "user_name": "ann", "tokens": 12345, "note": ROWS[0]["note"]}
    assert second["tokens"] is None
    show(COLUMNS, ROWS, "csv")
    rows = list(csv.DictReader(io.StringIO(capsys.readouterr().out)))
    assert rows[0]["tokens"] == "12345" and rows[1]["tokens"] == "" and rows[0]["user_name"] == "ann"


def test_nothing_of_a_client_runs_in_a_terminal_or_a_spreadsheet(capsys: pytest.CaptureFixture[str]) -> None:
    evil: list[Row] = [{"id": "=1+1", "user": "\x1b[2J", "tokens": -1, "note": ["a", "b"]}]
    for output in ("table", "json", "csv"):
        show(COLUMNS, evil, output)
    said = capsys.readouterr().out
    assert "\x1b" not in said and "'=1+1" in said and ",-1," in said and "a b" in said


def test_an_empty_list_says_so_to_people_only(capsys: pytest.CaptureFixture[str]) -> None:
    show(COLUMNS, [], "table", empty="No requests yet.")
    assert capsys.readouterr().out == "No requests yet.\n"
    show(COLUMNS, [], "json", empty="No requests yet.")
    assert json.loads(capsys.readouterr().out) == []
    show(COLUMNS, [], "csv", empty="No requests yet.")
    assert capsys.readouterr().out == "request,user_name,tokens,note\n"


def test_values_as_people_read_them() -> None:
    assert [plain(value) for value in (True, False, 1234, None, "", [], ["a", "b"], "x")] == [
        "yes", "no", "1,234", "-", "-", "-", "a, b", "x",
    ]  # fmt: skip


def test_every_listing_has_the_same_three_forms() -> None:
    import typer

    from penstock.cli.app import app

    tree: Any = typer.main.get_command(app)
    lists = [("keys", "list"), ("tenants", "list"), ("models", "list"), ("adapters", "list"), ("batch", "list")]
    for path in [*lists, ("replicas",), ("autoscale",), ("requests",), ("usage",), ("trace",), ("pull",)]:
        command = tree
        for name in path:
            command = command.commands[name]
        (option,) = [parameter for parameter in command.params if parameter.name == "output"]
        assert "-o" in option.opts and all(form in option.help for form in ("table", "json", "csv")), path


def test_a_chart_of_usage_shows_small_amounts_too(capsys: pytest.CaptureFixture[str]) -> None:
    from penstock.cli.usage import _chart

    sums = {"requests": "1", "prompt_tokens": "3", "completion_tokens": "4"}
    _chart([{"tenant": "a", "cost": "0.0000071", **sums}, {"tenant": "b", "cost": "1234.5", **sums}])
    small, large = capsys.readouterr().out.splitlines()
    assert small.split()[-1] == "$0.0000071" and large.split()[-1] == "$1,234.5000"
