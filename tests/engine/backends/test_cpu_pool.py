"""The thread pool: right under contention, quiet when idle, not hurt by more threads than cores."""

from __future__ import annotations

import threading
import time
from pathlib import Path

import pytest
import torch

from penstock.engine.backends import cpu
from penstock.engine.backends.cpu.ops import CpuOps


def loaded(threads: int) -> CpuOps:
    ops = cpu.load(threads)
    if ops is None:
        pytest.skip(cpu.status().detail)
    return ops


def test_thousands_of_short_jobs_are_all_complete() -> None:
    ops = loaded(4)  # more threads than a small machine has cores
    x = torch.randn(300, 2 * 64)
    expected = torch.nn.functional.silu(x[:, :64]) * x[:, 64:]
    for _ in range(3000):
        out = ops.silu_mul(x)
    torch.testing.assert_close(out, expected)
    for _ in range(200):
        torch.testing.assert_close(ops.silu_mul(x), expected)


def test_two_callers_share_one_pool() -> None:
    ops = loaded(2)
    wrong: list[int] = []

    def caller(seed: int) -> None:
        logits = torch.randn(40, 5000, generator=torch.Generator().manual_seed(seed))
        best = logits.argmax(dim=1)
        wrong.extend(i for i in range(150) if not torch.equal(ops.argmax(logits), best))

    threads = [threading.Thread(target=caller, args=(seed,)) for seed in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


def test_an_idle_pool_uses_no_processor_time() -> None:
    ops = loaded(4)
    ops.argmax(torch.randn(64, 10_000))
    time.sleep(0.05)
    before = time.process_time()
    time.sleep(0.5)
    assert time.process_time() - before < 0.1


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="counts threads in /proc")
def test_dropping_the_operations_ends_their_threads() -> None:
    loaded(1)  # the library itself is loaded
    before = _native_threads()
    ops = loaded(5)
    assert _native_threads() == before + 4
    del ops
    deadline = time.monotonic() + 60
    while _native_threads() != before and time.monotonic() < deadline:
        time.sleep(0.01)
    assert _native_threads() == before


def _native_threads() -> int:
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) for line in file if line.startswith("Threads:"))
