"""Messages between rank 0 and the others: steps survive the wire, calls are answered in order and refused politely."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from concurrent.futures import Future
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from penstock.engine.parallel.channel import DRAFT, Forward, Head, receive
from penstock.engine.parallel.launch import Ranks
from penstock.engine.parallel.rank import RankServer
from penstock.errors import ConfigError, ReplicaLost
from tests.engine.parallel.threads import threaded_engine
from tests.engine.tiny import write_checkpoint


@pytest.fixture
def wire() -> Iterator[tuple[Connection, Connection]]:
    ours, theirs = (Connection(end.detach()) for end in socket.socketpair())
    with ours, theirs:
        yield ours, theirs


@pytest.mark.parametrize("slots", [None, [-1, 0, 3]])
def test_a_step_arrives_as_it_was_sent(wire: tuple[Connection, Connection], slots: list[int] | None) -> None:
    ours, theirs = wire
    three, two = np.arange(3), np.arange(2)
    adapters = None if slots is None else np.array(slots)
    sent = Forward(
        three, three + 1, three + 2, np.array([0, 1, 3]), two + 5, two, np.ones((3, 4), np.int64), 1, 2, 9,
        model=DRAFT, adapter_slots=adapters, narrow=True,
    )  # fmt: skip
    ours.send_bytes(sent.encode())
    got = receive(theirs)
    assert isinstance(got, Forward)
    assert got.token_ids.tolist() == [0, 1, 2] and got.context_lens.tolist() == [5, 6] and got.cells.shape == (3, 4)
    assert (got.num_decodes, got.max_query, got.max_context, got.model) == (1, 2, 9, DRAFT)
    assert (None if got.adapter_slots is None else got.adapter_slots.tolist()) == slots
    assert got.narrow is (slots is not None)
    ours.send_bytes(Head(7, DRAFT).encode())
    assert receive(theirs) == Head(7, DRAFT)


@pytest.fixture
def ranks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Ranks]:
    """Of an engine whose ranks know a few calls that tests need."""
    later: Future[str] = Future()

    def refuse() -> None:
        raise ConfigError("it does not fit")

    def finish() -> None:
        later.set_result("late")

    serve = RankServer.serve

    def with_handlers(server: RankServer) -> None:
        known: dict[str, Any] = {"double": lambda x: 2 * x, "refuse": refuse, "later": lambda: later, "finish": finish}
        server.handlers |= {**known, "die": lambda: [][0]}
        serve(server)

    monkeypatch.setattr(RankServer, "serve", with_handlers)
    with threaded_engine(write_checkpoint("llama-gqa", tmp_path / "model"), 2, 1) as engine:
        assert engine.ranks is not None
        yield engine.ranks


def test_calls_are_answered_when_they_are_done_and_refusals_hurt_nobody(ranks: Ranks) -> None:
    (late,) = ranks.call("later")
    (refused,) = ranks.call("refuse")
    with pytest.raises(ConfigError, match=r"rank 1 .*it does not fit"):
        refused.result(100)
    assert [answer.result(100) for answer in ranks.call("double", 21)] == [42]
    assert not late.done()
    ranks.call("finish")
    assert late.result(100) == "late"


def test_a_rank_that_fails_in_a_call_is_lost(ranks: Ranks) -> None:
    (answer,) = ranks.call("die")
    with pytest.raises(ReplicaLost):
        answer.result(100)
    assert "IndexError" in (ranks.why_lost() or "")
