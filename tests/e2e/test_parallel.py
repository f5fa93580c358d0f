"""`penstock serve` with a model on three ranks: same answer, and a killed rank heals (R-ENG-10, R-OPS-2)."""

from __future__ import annotations

import os
import signal
import threading
import time
from pathlib import Path

import httpx
import pytest

from tests.e2e.test_supervisor import Server
from tests.engine_host.client import eventually
from tests.supervisor.test_supervisor import alive


def ranks(engine: int) -> list[int]:
    pids = Path(f"/proc/{engine}/task/{engine}/children").read_text().split()
    return [int(pid) for pid in pids if "penstock.engine.parallel.rank" in Path(f"/proc/{pid}/cmdline").read_text()]


@pytest.mark.slow
def test_three_ranks_answer_and_a_killed_one_is_replaced_with_its_engine() -> None:
    patient = ("resilience.resume_s=120", "generation.time_limit_s=300")
    server = Server("--tensor-parallel", "3", *(word for setting in patient for word in ("--set", setting)))
    try:
        server.wait_for("curl http")
        assert "Paris" in server.ask().json()["choices"][0]["message"]["content"]
        engine = server.children()["engine"]
        before = ranks(engine)
        assert len(before) == 2

        replies: list[httpx.Response] = []
        running = threading.Thread(
            target=lambda: replies.append(server.ask(timeout_s=180, max_tokens=200, ignore_eos=True)), daemon=True
        )
        running.start()
        time.sleep(2.0)
        os.kill(before[0], signal.SIGKILL)
        server.wait_for("is gone (killed by SIGKILL)")
        server.wait_for("up on 3 ranks", times=2)
        running.join(180)
        (reply,) = replies
        assert reply.status_code == 200, reply.text
        assert reply.json()["usage"]["completion_tokens"] == 200, "it went on with the new ranks"
        assert not any(alive(pid) for pid in before)
        assert eventually(lambda: server.ask().status_code == 200, 30)
        assert set(ranks(server.children()["engine"])).isdisjoint(before)
    finally:
        server.close()
