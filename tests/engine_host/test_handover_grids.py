"""Prompts computed by an engine of one grid and continued by one of another; ranks that die in the midst (R-ENG-11)."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.engine.harness import assert_idle, generate, greedy, make_engine
from tests.engine.parallel.threads import threaded_engine
from tests.engine.tiny import write_checkpoint
from tests.engine_host.client import connected, eventually, serving
from tests.engine_host.handover import World, source, text

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint("llama-gqa", tmp_path_factory.mktemp("grids"), spread=0.5)


def ranks_of(engine: int) -> list[int]:
    pids = Path(f"/proc/{engine}/task/{engine}/children").read_text().split()
    return [int(pid) for pid in pids if "penstock.engine.parallel.rank" in Path(f"/proc/{pid}/cmdline").read_text()]


def test_two_shards_compute_for_two_stages_until_one_of_them_dies(folder: Path, tmp_path: Path) -> None:
    alone = make_engine(folder)
    endpoint, config = f"ipc://{tmp_path}/prefill", tmp_path / "penstock.yaml"
    settings = "dtype: float32, threads: 1, token_budget: 16, tensor_parallel: 2"
    config.write_text(f"models: [{{name: tiny, source: {folder}, {settings}}}]\n")
    command = ["engine", "tiny", "-c", str(config), "--endpoint", endpoint, "--role", "prefill"]
    process = subprocess.Popen([sys.executable, "-m", "penstock", *command])
    try:
        with connected(endpoint) as client:
            client.hello(120)
        with threaded_engine(folder, 1, 2, role="decode") as engine:
            with serving(engine) as running, connected(running.endpoint) as client:
                client.hello()
                world = World(engine, running.endpoint, client, source(endpoint))
                for number in (1, 2):
                    request = greedy(f"r{number}", text(number), 12)
                    assert world.answer(request)[0] == generate(alone, request)[request.request_id]
                assert (world.counts.handovers, world.counts.fallbacks, world.counts.blocks_in) == (2, 0, 2 * 43)

                world.ask(greedy("killed", text(3), 12))
                assert eventually(lambda: world.counts.blocks_in > 2 * 43)
                (rank,) = ranks_of(process.pid)
                os.kill(rank, signal.SIGKILL)
                tokens, last = world.client.finish("killed", 60)
                assert last.error is None and tokens == generate(alone, greedy("killed", text(3), 12))["killed"]
                assert 2 * 43 < world.counts.blocks_in < 3 * 43 and world.counts.fallbacks == 1
                assert process.wait(60) != 0, "an engine without one of its ranks is lost"
            assert_idle(engine)
            assert engine.exchange is not None and len(engine.exchange.slots) == engine.exchange.num_slots
    finally:
        process.kill()
        process.wait()
