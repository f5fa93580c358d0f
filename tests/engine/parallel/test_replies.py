"""Replies of ranks are read by a thread until their connection is closed."""

from __future__ import annotations

import os
import threading
import time
from multiprocessing.connection import Connection
from types import SimpleNamespace
from typing import Any

import pytest

from penstock.engine.parallel import launch, plain
from penstock.engine.parallel.channel import Report
from penstock.engine.parallel.child import connection_pair
from penstock.engine.parallel.handle import RankHandle
from penstock.engine.parallel.layout import Place


def test_a_connection_is_closed_when_nobody_reads_it_any_more(monkeypatch: pytest.MonkeyPatch) -> None:
    ours, theirs = connection_pair()
    reading, failed = threading.Event(), list[Any]()

    def receive(connection: Connection) -> None:
        reading.set()
        time.sleep(0.05)  # between looking whether it is open and reading
        if not os.read(connection._handle, 1):  # type: ignore[attr-defined]
            raise EOFError

    monkeypatch.setattr(plain, "receive", receive)
    monkeypatch.setattr(threading, "excepthook", failed.append)
    rank = RankHandle(Place(1, 2, 1), None, ours)  # type: ignore[arg-type]
    ranks: Any = SimpleNamespace(_sends=threading.Lock())
    rank.reader = threading.Thread(target=launch.Ranks._read, args=(ranks, rank))
    rank.reader.start()
    reading.wait()
    rank.hang_up()
    rank.reader.join()
    theirs.close()
    assert not failed and ours.closed


def test_what_a_rank_has_reported_is_told_as_often_as_somebody_asks() -> None:
    ours, theirs = connection_pair()
    with ours, theirs:
        rank = RankHandle(Place(1, 2, 1), None, ours)  # type: ignore[arg-type]
        plain.send(theirs, Report(problem="no room"))
        plain.send(theirs, Report())
        report = rank.next_report()
        assert report is not None and report.problem == "no room"
        assert rank.last_report() == rank.last_report() == ": no room"
