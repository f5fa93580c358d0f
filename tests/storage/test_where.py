"""The condition of a query, part by part."""

from __future__ import annotations

import sqlite3

import pytest

from penstock.storage import Where

ROWS = [(1.0, "a", "x"), (2.0, "b", "x"), (2.0, "c", "y"), (2.0, "d", "x"), (3.0, "e", "x")]


def ids(where: Where, order: str = "ASC") -> str:
    database = sqlite3.connect(":memory:")
    database.execute("CREATE TABLE things (created_at REAL, id TEXT, owner TEXT)")
    database.executemany("INSERT INTO things VALUES (?, ?, ?)", ROWS)
    found = database.execute(
        f"SELECT id FROM things WHERE {where} ORDER BY created_at {order}, id {order}", where.values
    )
    return "".join(id for (id,) in found)


def test_what_was_not_asked_for_is_left_out() -> None:
    assert ids(Where()) == ids(Where(("owner = ?", None))) == "abcde"
    assert ids(Where(("owner = ?", "x"), ("id = ?", None), ("created_at < ?", 3.0))) == "abd"
    assert ids(Where(("owner = ?", ""))) == "", "an empty value is a value"


def test_one_of_several_values() -> None:
    where = Where(("owner = ?", "x"))
    where.one_of("id", ("c", "d", "e"))
    assert ids(where) == "de"
    where.one_of("id", ())
    assert ids(where) == "" and "IN ()" not in str(where), "which PostgreSQL does not understand"


@pytest.mark.parametrize(("order", "rest"), [("ASC", "de"), ("DESC", "ba")])
def test_rows_beyond_one_that_others_were_created_together_with(order: str, rest: str) -> None:
    where = Where()
    where.beyond(2.0, "c", order)  # type: ignore[arg-type]
    assert ids(where, order) == rest
