"""Where ranks run: what an operator writes, and what is refused."""

from __future__ import annotations

import pytest

from penstock.config.placement import PlacementConfig

KEYS = {"curve_key": "head.key", "curve_clients": "machines.txt"}


def test_machines_are_given_per_stage_or_per_rank() -> None:
    stages = PlacementConfig(("local", "b"), "tcp://0.0.0.0:7001", **KEYS)
    assert stages.ranks(2, 2) == ("local", "local", "b", "b")
    assert stages.endpoint(0) == "tcp://0.0.0.0:7001" and stages.endpoint(2) == "tcp://0.0.0.0:7003"
    ranks = PlacementConfig(("local", "b"), "tcp://127.0.0.1:7001")
    assert ranks.ranks(2, 1) == ("local", "b")
    assert not stages.problems(2, 2) and not ranks.problems(2, 1)


@pytest.mark.parametrize(
    ("placement", "problem"),
    [
        (PlacementConfig(("local",), "tcp://127.0.0.1:1"), "1 are named; name 2, one per pipeline stage, or 4"),
        (PlacementConfig(("b", "local"), "tcp://127.0.0.1:1"), "the first is this one: local"),
        (PlacementConfig(("local", ""), "tcp://127.0.0.1:1"), "a name is empty"),
        (PlacementConfig(("local", "b")), "listen: tcp://HOST:PORT is needed"),
        (PlacementConfig(("local", "b"), "tcp://host:x"), "listen: tcp://HOST:PORT is needed"),
        (PlacementConfig(("local", "b"), "tcp://0.0.0.0:1"), "needed where other machines can join"),
        (PlacementConfig(("local", "b"), "tcp://0.0.0.0:1", curve_key="k"), "must be given together"),
    ],
)
def test_mistakes_are_named(placement: PlacementConfig, problem: str) -> None:
    assert any(problem in found for found in placement.problems(2, 2))
