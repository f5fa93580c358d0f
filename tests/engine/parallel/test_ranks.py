"""Ranks as real processes: they start, work, leave together, and none is left behind (R-ENG-10, R-OPS-2)."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from penstock.engine.core import Engine
from penstock.errors import ConfigError, ReplicaLost
from tests.engine.harness import generate, greedy, make_engine
from tests.engine.tiny import write_checkpoint
from tests.engine_host.client import eventually
from tests.supervisor.test_supervisor import alive

PROMPT = [5, 3, 77, 12, 9, 41]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint("llama-gqa", tmp_path_factory.mktemp("ranks") / "model")


@pytest.mark.slow
def test_four_processes_answer_like_one_and_leave_when_the_engine_is_closed(folder: Path) -> None:
    expected = generate(make_engine(folder), greedy("a", PROMPT, 12))
    engine = make_engine(folder, threads=1, tensor_parallel=2, pipeline_parallel=2)
    try:
        assert engine.ranks is not None
        pids = engine.ranks.pids
        assert len(pids) == 3 and all(alive(pid) for pid in pids)
        assert generate(engine, greedy("a", PROMPT, 12)) == expected
    finally:
        engine.close()
    assert not any(alive(pid) for pid in pids)


def killed(engine: Engine) -> str:
    """Kill the only worker rank, and say how it is described."""
    assert engine.ranks is not None
    (pid,) = engine.ranks.pids
    os.kill(pid, signal.SIGKILL)
    return r"rank 1 \(shard 1 of 2, stage 0 of 1\) is gone \(killed by SIGKILL\)"


def test_a_dead_rank_is_an_error_for_the_engine_and_no_fault_of_a_request(folder: Path) -> None:
    expected = generate(make_engine(folder), greedy("a", PROMPT, 12))
    engine = make_engine(folder, threads=1, tensor_parallel=2)
    noticed: list[str] = []
    heard = threading.Event()
    assert engine.ranks is not None
    engine.ranks.watch(lambda why: (noticed.append(why), heard.set()), exit_after_s=None)
    try:
        assert generate(engine, greedy("a", PROMPT, 12)) == expected
        engine.submit(greedy("a", PROMPT, 500))
        engine.step()
        description = killed(engine)
        with pytest.raises(ReplicaLost, match=description):
            while True:
                engine.step()
        assert heard.wait(120) and "killed by SIGKILL" in noticed[0], "an idle engine must notice too"
    finally:
        engine.close()


def test_a_grid_that_does_not_fit_the_model_is_refused_at_once(folder: Path) -> None:
    with pytest.raises(ConfigError, match=r"tensor_parallel: 3 cannot split 4 heads"):
        make_engine(folder, threads=1, tensor_parallel=3)


RANK_0 = """
import sys
from tests.engine.harness import make_engine
from pathlib import Path
engine = make_engine(Path(sys.argv[1]), threads=1, tensor_parallel=2)
print(*engine.ranks.pids, flush=True)
sys.stdin.read()
"""


@pytest.mark.slow
def test_no_rank_outlives_a_rank_0_that_is_killed(folder: Path) -> None:
    lead = subprocess.Popen(
        [sys.executable, "-c", RANK_0, str(folder)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    try:
        assert lead.stdout is not None
        (pid,) = map(int, lead.stdout.readline().split())
        assert alive(pid)
        lead.kill()
        assert eventually(lambda: not alive(pid))
    finally:
        lead.kill()
        lead.communicate()
