"""A key is honoured, inert, or refused with its name, its value and what would be honoured."""

from __future__ import annotations

from typing import Any

import pytest

from penstock.engine.loading import keys
from penstock.engine.loading.keys import KeyRules
from penstock.errors import CheckpointError

RULES = KeyRules(
    reader="tiny models",
    reference={"size": 4, "act": "silu", "scale": 1.0, "causal": True, "dropout": 0.0, "shape": None},
    read={"size"},
    limited={"act": ("silu", "swish")},
    inert={"dropout"},
)


@pytest.mark.parametrize(
    "given",
    [
        {},
        {"size": 7},
        {"act": "swish"},
        {"dropout": 0.5},
        {"scale": 1},
        {"causal": True, "shape": None},
    ],
)
def test_honoured(given: dict[str, Any], caplog: pytest.LogCaptureFixture) -> None:
    RULES.check(given)
    assert not caplog.records


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"act": "relu"}, "config.json: act is 'relu', which tiny models do not support; supported: 'silu', 'swish'"),
        ({"size": 9, "scale": 2.0}, "config.json: scale is 2.0, which tiny models do not support; supported: 1.0"),
        ({"causal": False}, "causal is False"),
        ({"causal": 1}, "causal is 1, which tiny models do not support; supported: True"),
        ({"causal": None}, "causal is null"),
        ({"shape": [1]}, r"shape is \[1\], .*; supported: null"),
        ({"shape": "x" * 5000}, r"shape is 'x{99}\.\.\., which"),
    ],
)
def test_refused(given: dict[str, Any], message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        RULES.check(given)


def test_what_the_reference_does_not_know_either_is_reported_once(monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    monkeypatch.setattr(keys.log, "warning", lambda text, *values: said.append(text % values))
    for _ in range(2):
        RULES.check({"sise": 3, "flavour": "x"}, "there.json")
    assert said == ["there.json: keys that tiny models and their reference do not know are ignored: flavour, sise"]
    said.clear()
    RULES.check({f"other{n:02}" + "x" * 5000: n for n in range(25)}, "there.json")
    assert said[0].endswith("x, other19" + "x" * 73 + " and 5 more"), "a line that can be read"
