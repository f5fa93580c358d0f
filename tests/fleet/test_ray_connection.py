"""Joining a Ray cluster; Ray itself is a stand-in here."""

from __future__ import annotations

from typing import Any

import pytest

from penstock.errors import ConfigError
from penstock.fleet.ray import cluster

ADDRESS = "ray://127.0.0.1:10001"
UNLUCKY = "RuntimeError: Starting Ray client server failed. See ray_client_server_23000.err for detailed logs."


class FakeRay:
    def __init__(self, *problems: str) -> None:
        self.problems = list(problems)
        self.calls = 0

    def init(self, **settings: Any) -> None:
        self.calls += 1
        if self.problems:
            raise ConnectionAbortedError(self.problems.pop(0))


@pytest.mark.parametrize(
    ("problems", "calls", "joined"),
    [
        ((), 1, True),
        ((UNLUCKY, UNLUCKY), 3, True),
        ((UNLUCKY,) * 3, 3, False),
        (("no such cluster",), 1, False),
    ],
)
def test_what_ray_fails_to_start_is_tried_again(
    problems: tuple[str, ...], calls: int, joined: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    ray = FakeRay(*problems)
    monkeypatch.setattr(cluster, "library", lambda: ray)
    if joined:
        cluster.connect(ADDRESS)
    else:
        with pytest.raises(ConfigError, match="cannot join the Ray cluster"):
            cluster.connect(ADDRESS)
    assert ray.calls == calls
