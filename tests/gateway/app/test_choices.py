"""The values that a field may have, for the message that refuses another one."""

from __future__ import annotations

from typing import Literal

import msgspec
import pytest
from msgspec import inspect

from penstock.gateway.app.choices import MOST, choices


class Inner(msgspec.Struct, tag="inner", tag_field="kind"):
    colour: Literal["red", "blue"] | None = None


class Other(msgspec.Struct, tag="other", tag_field="kind"):
    colour: Literal["green"] = "green"


class Outer(msgspec.Struct):
    parts: list[Inner | Other]
    named: dict[str, Inner] = {}
    size: Literal[1, 2] = 1
    name: str = ""


@pytest.mark.parametrize(
    ("path", "found"),
    [
        ("parts[0].colour", ["blue", "green", "red"]),
        ("parts[0].kind", ["inner", "other"]),
        ("named[...].colour", ["blue", "red"]),
        ("size", []),
        ("name", []),
        ("nothing[0].of.this", []),
        ("", []),
    ],
)
def test_the_strings_that_may_stand_at_a_place(path: str, found: list[str]) -> None:
    assert choices(Outer, path) == found and len(found) <= MOST


def test_a_type_is_described_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Large ones take milliseconds, in which nobody else is served."""

    class Body(msgspec.Struct):
        role: Literal["user"]

    described: list[object] = []
    type_info = inspect.type_info
    monkeypatch.setattr(inspect, "type_info", lambda kind: described.append(kind) or type_info(kind))
    for _ in range(3):
        assert choices(Body, "role") == ["user"]
    assert described == [Body]
