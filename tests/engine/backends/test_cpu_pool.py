"""The thread pool: right under contention, quiet when idle, not hurt by more threads than cores."""

from __future__ import annotations

import os
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


in_proc = pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="looks at threads in /proc")


@in_proc
def test_an_idle_pool_uses_no_processor_time() -> None:
    loaded(1)  # the library itself is loaded
    before = _native_threads()
    ops = loaded(4)
    its_threads = _native_threads() - before
    assert len(its_threads) >= 3
    ops.argmax(torch.randn(64, 10_000))
    deadline, used = time.monotonic() + 100, -1
    # They may look for more work for a moment. That ends, however seldom a busy machine lets them look.
    while used != (used := sum(map(_switches, its_threads))):
        assert time.monotonic() < deadline, "they never rest"
        time.sleep(0.5)
    ops.argmax(torch.randn(64, 10_000))


@in_proc
def test_dropping_the_operations_ends_their_threads() -> None:
    loaded(1)  # the library itself is loaded
    before = _native_threads()
    ops = loaded(5)
    its_threads = _native_threads() - before
    assert len(its_threads) >= 4
    del ops
    deadline = time.monotonic() + 100
    while its_threads & _native_threads():
        assert time.monotonic() < deadline, "they are still there"
        time.sleep(0.01)


def _native_threads() -> set[str]:
    return set(os.listdir("/proc/self/task"))


def _switches(thread: str) -> int:
    """How often a thread has been given a core."""
    try:
        lines = Path(f"/proc/self/task/{thread}/status").read_text().splitlines()
    except FileNotFoundError:
        return 0  # it was none of the pool, and has ended
    return sum(int(line.split()[1]) for line in lines if "ctxt_switches" in line)
