"""Ranks of an engine that spans machines, started again alone: there or here, the others go on (R-ENG-10)."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest

from penstock.engine.parallel import launch
from penstock.engine_host.rank_host import Offer, RankHost
from penstock.errors import ReplicaLost
from penstock.protocol.transport import CurveClient
from tests.engine.harness import assert_idle, collect, drain, generate, greedy, make_engine
from tests.engine.parallel.lost_rank import lose, run_losing
from tests.engine.parallel.threads import _spawn
from tests.engine.tiny import write_checkpoint
from tests.engine_host.client import eventually
from tests.engine_host.test_rank_hub import HEAD, MACHINE, engine_of, host, hub, over, running

pytestmark = pytest.mark.slow
BATCH = [greedy(f"r{i}", [(i * 17 + j * 5) % 190 for j in range(3 + 9 * i)], 16) for i in range(4)]
SETTINGS: dict[str, Any] = {"token_budget": 32, "rank_restarts": 3, "kv_dtype": "full", "watchdog_s": 120}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint("llama-gqa", tmp_path_factory.mktemp("machines") / "model")


@pytest.fixture(scope="module")
def expected(folder: Path) -> dict[str, list[int]]:
    return generate(make_engine(folder, token_budget=32, kv_dtype="full"), *BATCH)


@pytest.mark.parametrize(
    ("tensor", "places", "ranks"),
    [
        (1, ["local", "b"], [1, 1]),
        (1, ["local", "b", "c"], [1, 2]),
        (2, ["local", "local", "b", "b"], [1, 3, 2]),  # here, and one of two there
        (2, ["local", "b", "b", "c"], [2, 3, 1]),  # shards of one stage on several machines
    ],
)
def test_a_lost_rank_is_started_again_where_it_was(
    folder: Path, expected: dict[str, list[int]], tensor: int, places: list[str], ranks: list[int]
) -> None:
    machines = hub()
    hosts = [host(machines.endpoint, folder, name=name) for name in sorted(set(places) - {"local"})]
    settings = {**SETTINGS, "tensor": tensor}
    with running(*hosts), engine_of(over(folder, *places, **settings), machines) as engine:
        assert engine.ranks is not None
        noticed: list[str] = []
        engine.ranks.watch(noticed.append, exit_after_s=None)
        with patch.object(launch, "_spawn", _spawn):
            for rank in ranks:
                before = list(engine.ranks._ranks)
                assert collect(run_losing(engine, BATCH, rank)) == expected
                changed = [old.place.rank for old, new in zip(before, engine.ranks._ranks, strict=True) if old != new]
                assert changed == [rank], "the others were not started again"
        assert engine.ranks.generation == len(ranks) and not noticed
        assert engine.load_snapshot().preemptions > 0
        assert generate(engine, *BATCH) == expected
        assert_idle(engine)


def test_a_machine_that_leaves_ends_the_engine_all_the_same(folder: Path) -> None:
    machines = hub()
    leaving = host(machines.endpoint, folder)
    noticed: list[str] = []
    with running(leaving), engine_of(over(folder, "local", "b", **SETTINGS), machines) as engine:
        assert engine.ranks is not None
        engine.ranks.watch(noticed.append, exit_after_s=None)
        engine.submit(greedy("a", [5, 3, 77], 100))
        engine.step()
        leaving.stop()
        with pytest.raises(ReplicaLost, match="b was told to stop"):
            while True:
                engine.step()
        assert eventually(lambda: bool(noticed))


def test_an_idle_engine_notices(folder: Path, expected: dict[str, list[int]]) -> None:
    machines = hub()
    with (
        running(host(machines.endpoint, folder)),
        engine_of(over(folder, "local", "b", **SETTINGS), machines) as engine,
    ):
        assert engine.ranks is not None
        engine.ranks.watch(lambda why: None, exit_after_s=None)
        lose(engine, 1)
        assert eventually(lambda: engine.has_work), "to replace it"
        assert generate(engine, *BATCH) == expected and engine.ranks.generation == 1


def test_a_process_that_is_killed_there_is_replaced_so_often_and_no_oftener(
    folder: Path, expected: dict[str, list[int]]
) -> None:
    machines = hub()
    there = RankHost(machines.endpoint, Offer("b", folder, threads=1), CurveClient(HEAD[0], MACHINE[1]))
    config = over(folder, "local", "b", **{**SETTINGS, "rank_restarts": 1})
    with running(there), engine_of(config, machines) as engine:
        assert engine.ranks is not None
        lost: list[str] = []
        engine.ranks.watch(lost.append, exit_after_s=None)
        for request in BATCH:
            engine.submit(request)
        output = engine.step()
        deltas = output.deltas if output is not None else []
        assert there._session is not None
        pid = there._session._ranks[1].process.pid
        os.kill(pid, signal.SIGKILL)
        deltas += drain(engine)
        assert collect(deltas) == expected
        assert generate(engine, *BATCH) == expected and not lost
        again = there._session._ranks[1].process.pid
        assert again != pid
        engine.submit(BATCH[0])
        engine.step()
        os.kill(again, signal.SIGKILL)
        with pytest.raises(ReplicaLost, match="killed by SIGKILL"):
            drain(engine)
