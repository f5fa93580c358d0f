"""Losing a rank of an engine whose ranks are threads."""

from __future__ import annotations

from collections.abc import Sequence

from penstock.engine.core import Engine
from penstock.engine.parallel.channel import Call
from penstock.engine.request import Delta, Request


def lose(engine: Engine, rank: int) -> None:
    """Have a rank fail as by a bug: it is told to do what nobody knows."""
    assert engine.ranks is not None
    with engine.ranks._sends:
        engine.ranks._ranks[rank - 1].connection.send_bytes(Call(10**6, "nonsense", ()).encode())


def run_losing(engine: Engine, requests: Sequence[Request], rank: int, at: int = 6) -> list[Delta]:
    """Run requests, and lose a rank before a step."""
    for request in requests:
        engine.submit(request)
    deltas: list[Delta] = []
    for step in range(100_000):
        if not engine.has_work:
            break
        if step == at:
            lose(engine, rank)
        output = engine.step()
        deltas += output.deltas if output is not None else []
    return deltas
