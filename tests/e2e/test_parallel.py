"""`penstock serve` with a model on three ranks: same answer, and a killed rank heals (R-ENG-10, R-OPS-2)."""

from __future__ import annotations

import os
import signal
import threading
from concurrent.futures import ThreadPoolExecutor
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
@pytest.mark.timeout(900)
def test_three_ranks_answer_and_a_killed_one_is_replaced_with_its_engine() -> None:
    # Whether it has a token by then or not, the request waits for the engine as long as a busy machine needs.
    patient = ("server.engine_wait_s=300", "resilience.resume_s=300", "generation.time_limit_s=400")
    server = Server("--tensor-parallel", "3", *(word for setting in patient for word in ("--set", setting)))
    try:
        server.wait_for("curl http")
        assert "Paris" in server.ask().json()["choices"][0]["message"]["content"]
        engine = server.children()["engine"]
        before = ranks(engine)
        assert len(before) == 2

        replies: list[httpx.Response] = []
        running = threading.Thread(
            target=lambda: replies.append(server.ask(timeout_s=400, max_tokens=200, ignore_eos=True)), daemon=True
        )
        running.start()
        assert eventually(lambda: running_requests(server) == 1, 60)
        os.kill(before[0], signal.SIGKILL)
        server.wait_for("is gone (killed by SIGKILL)")
        server.wait_for("up on 3 ranks", times=2)
        running.join(400)
        (reply,) = replies
        assert reply.status_code == 200, reply.text
        assert reply.json()["usage"]["completion_tokens"] == 200, "it went on with the new ranks"
        assert not any(alive(pid) for pid in before)
        assert eventually(lambda: server.ask().status_code == 200, 30)
        assert set(ranks(server.children()["engine"])).isdisjoint(before)
    finally:
        server.close()


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_with_rank_restarts_a_killed_rank_is_replaced_alone() -> None:
    settings = ("models.0.rank_restarts=1", "generation.time_limit_s=400")
    server = Server("--tensor-parallel", "3", *(word for setting in settings for word in ("--set", setting)))
    try:
        server.wait_for("curl http")
        engine = server.children()["engine"]
        first, second = ranks(engine)
        with ThreadPoolExecutor(1) as pool:
            answer = pool.submit(server.ask, timeout_s=180, max_tokens=40, ignore_eos=True)
            assert eventually(lambda: running_requests(server) == 1)
            os.kill(first, signal.SIGKILL)
            server.wait_for("is gone (killed by SIGKILL); it is started again")
            reply = answer.result(180)
        assert reply.status_code == 200, reply.text
        assert reply.json()["usage"]["completion_tokens"] == 40
        assert "Paris" in server.ask().json()["choices"][0]["message"]["content"]
        assert server.children()["engine"] == engine, "it is the same process"
        now = ranks(engine)
        assert len(now) == 2 and second in now and first not in now
    finally:
        server.close()


def running_requests(server: Server) -> float:
    return count(httpx.get(f"{server.url}/metrics", timeout=180).text, "vllm:num_requests_running")


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_ranks_share_a_draft_model_and_sleep_with_it() -> None:
    """The default model as its own draft: every draft token of it is right. Asleep, the ranks are gone."""
    settings = ("speculation=draft", "draft_model=smollm2-135m")
    server = Server("--tensor-parallel", "3", *(word for one in settings for word in ("--set", f"models.0.{one}")))
    try:
        server.wait_for("curl http")
        engine = server.children()["engine"]
        for turn in range(2):
            before = ranks(engine)
            assert len(before) == 2
            drafted = server.ask(max_tokens=40, ignore_eos=True).json()["choices"][0]["message"]["content"]
            plain = server.ask(max_tokens=40, ignore_eos=True, speculation=False).json()
            assert "Paris" in drafted and drafted == plain["choices"][0]["message"]["content"]
            metrics = httpx.get(f"{server.url}/metrics").text
            tried, accepted = (count(metrics, f"vllm:spec_decode_num_{kind}_tokens") for kind in ("draft", "accepted"))
            assert accepted == tried > 0
            if turn:
                break
            for action in ("sleep", "wake"):
                done = httpx.post(f"{server.url}/v1/admin/models/smollm2-135m/{action}", timeout=300)
                assert done.status_code == 200, done.text
                assert not any(alive(pid) for pid in before)
        assert server.children()["engine"] == engine, "it is the same process"
    finally:
        server.close()


def count(metrics: str, name: str) -> float:
    return sum(float(line.split()[-1]) for line in metrics.splitlines() if line.startswith(name))
