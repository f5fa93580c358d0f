"""What benchmarks print."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from penstock.bench import report


@pytest.mark.parametrize(("width", "shown"), [(120, "abcd"), (40, "abd"), (30, "ab")])
def test_columns_are_left_out_where_there_is_no_room(width: int, shown: str) -> None:
    file = io.StringIO()
    rows = [("x" * 10, "y" * 10, "z" * 12, "w" * 10)]
    report.print_fitting(Console(file=file, width=width), "", "abcd", rows, expendable=("c", "d"))
    printed = file.getvalue()
    assert [name in printed for name in ("y" * 10, "z" * 12, "w" * 10)] == [name in shown for name in "bcd"]
    assert ("Left out" in printed) == (shown != "abcd") and "…" not in printed
