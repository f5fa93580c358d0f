"""JSON that would take long to decode is recognised without decoding it."""

from __future__ import annotations

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.protocol import json_limits
from penstock.protocol.json_limits import excess

SIZE = 1 << 20


@pytest.mark.parametrize(
    ("piece", "what"), [(b"{},", "objects"), (b"[],", "objects"), (b'"",', "strings"), (b"1 ,", "values")]
)
def test_structure_is_counted(piece: bytes, what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(json_limits, "MOST_VALUES", 1 << 18)
    body = b'{"a": [' + piece * (SIZE // len(piece)) + b"1]}"
    if what == "objects":
        monkeypatch.setattr(json_limits, "MOST_VALUES", 1 << 20)
    assert what in (excess(body) or "")
    assert excess(body[:1000]) is None, "a small body may have what it likes"
    # The same inside a string is text.
    assert excess(json.dumps({"a": body.decode()}).encode()) is None
    # A string that seems to end in an escaped quote does not hide what follows.
    for run in (1, 2, 63, 64, 65, 255, 256):
        hidden = b'{"a": "' + b"\\\\" * run + b'", "b": [' + piece * (SIZE // len(piece)) + b"1]}"
        assert what in (excess(hidden) or ""), run
        open_string = b'{"a": "' + b"\\\\" * run + b'\\"' + b"{}," * 200_000 + b'"}'
        assert excess(open_string) is None, run


@settings(max_examples=60, deadline=None)
@given(
    strings=st.lists(st.text(alphabet='\\"{[,a', max_size=12), max_size=60),
    numbers=st.integers(0, 40),
    containers=st.integers(0, 20),
)
def test_counts_are_those_of_the_decoded_value(strings: list[str], numbers: int, containers: int) -> None:
    body = json.dumps([*strings, *range(numbers), *([{}] * containers)], ensure_ascii=False).encode()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(json_limits, "FREE_BYTES", 0)
        for name, has in (
            ("MOST_STRINGS", len(strings)),
            ("MOST_CONTAINERS", containers + 1),
            ("MOST_VALUES", max(0, len(strings) + numbers + containers - 1)),
        ):
            patch.setattr(json_limits, name, has)
        assert excess(body) is None
        patch.setattr(json_limits, "MOST_CONTAINERS", containers)
        assert excess(body) is not None
