"""The steps of a workload, without an engine."""

from __future__ import annotations

from penstock.bench.step_walk import walk
from penstock.bench.workloads import named
from penstock.planning.step_time import StepWork


def steps(name: str, max_running: int = 256, token_budget: int = 8192, blocks: int | None = None) -> list[StepWork]:
    return list(walk(named(name), max_running=max_running, token_budget=token_budget, num_blocks=blocks))


def test_one_stream_is_a_prompt_and_decode_steps() -> None:
    found = steps("b1")
    assert found[0] == StepWork(0, 0, 128, 128 * 129 // 2, 1)
    assert found[1] == StepWork(1, 129, 0, 0, 1)
    assert len(found) == 256


def test_a_long_prompt_comes_in_chunks() -> None:
    found = steps("long30k")
    chunks = [step for step in found if step.prefill]
    assert [step.prefill for step in chunks] == [8192, 8192, 8192, 30_000 - 3 * 8192]
    assert sum(step.attended for step in chunks) == 30_000 * 30_001 // 2
    assert [step.samples for step in chunks] == [0, 0, 0, 1]


def test_everything_is_computed_once() -> None:
    for name, running in (("b64", 48), ("c16", 256), ("long8x30k", 256)):
        workload, found = named(name), steps(name, max_running=running)
        lengths = list(workload.lengths())
        # A single token that is left of a prompt counts as a decode, as the scheduler has it.
        assert sum(step.prefill + step.decodes for step in found) == sum(i + o - 1 for i, o in lengths)
        assert sum(step.samples for step in found) == sum(o for _, o in lengths)
        assert max(step.decodes for step in found) <= min(running, workload.concurrency or running)


def test_what_is_preempted_is_computed_again() -> None:
    tight = steps("b64", blocks=64 * 512 // 16 // 2)
    assert sum(step.prefill for step in tight) > 64 * 256
    assert sum(step.samples for step in tight) == 64 * 256
