"""`penstock bench engine --profile`: the recorded time is accounted for, and the engine is left idle."""

from __future__ import annotations

import io
from pathlib import Path

import pytest
from rich.console import Console

from penstock.bench import profiler, workloads
from penstock.engine.backends import cpu
from tests.engine.harness import assert_idle, make_engine
from tests.engine.tiny import write_checkpoint


def test_prompts_and_decode_steps_are_recorded_and_shown(tmp_path: Path) -> None:
    folder = write_checkpoint("llama-gqa", tmp_path)
    engine = make_engine(folder, num_blocks=200, max_running=4, token_budget=32, prefix_cache=False)
    workload = workloads.closed_loop(4, 20, 80)
    for _ in range(20):  # whoever takes the core away between two kernels takes a share of the time
        prompts, decoding = profiler.record(engine, workload)
        if min(profile.busy_s / profile.wall_s for profile in (prompts, decoding)) > 0.5:
            break
    assert prompts.steps == 3 and decoding.steps == profiler.STEPS  # 80 tokens, at most 32 a step
    for profile, kind in ((prompts, "prompts"), (decoding, "decoding")):
        assert profile.kind == kind and profile.rows == 4
        assert 0.5 < profile.busy_s / profile.wall_s <= 1.01
        assert any("attention" in share.name for share in profile.shares)
        screen = io.StringIO()
        profiler.show(profile, workload, Console(file=screen, width=140))
        assert f"{kind}: 4 sequences" in screen.getvalue() and "us/step" in screen.getvalue()
    assert_idle(engine)


def test_figures_are_readable_on_a_narrow_terminal_whatever_kernels_are_called() -> None:
    share = profiler.Share("void at::native::" + "elementwise_" * 20, 4200, 1.5)
    profile = profiler.Profile("decoding", 10, 4, 3.0, 2.0, [share])
    screen = io.StringIO()
    profiler.show(profile, workloads.closed_loop(4, 20, 80), Console(file=screen, width=80))
    assert all(figure in screen.getvalue() for figure in ("420.0", "357.1", "150,000.0", "50%"))


def test_outputs_too_short_for_decode_steps_leave_the_prompts(tmp_path: Path) -> None:
    engine = make_engine(write_checkpoint("llama-gqa", tmp_path), num_blocks=200, max_running=4)
    (profile,) = profiler.record(engine, workloads.closed_loop(2, 20, 1))
    assert profile.kind == "prompts" and profile.steps >= 1
    assert_idle(engine)


@pytest.mark.skipif(not cpu.status().available, reason="no native kernels here")
def test_a_recorded_forward_pass_shows_its_kernels(tmp_path: Path) -> None:
    engine = make_engine(write_checkpoint("llama-gqa", tmp_path), num_blocks=200, max_running=4, weights="int8")
    workload = workloads.closed_loop(4, 20, 80)
    prompts, profile = profiler.record(engine, workload)
    assert any(share.name == "pk_linear" and share.calls == 13 * prompts.steps for share in prompts.shares)
    linears = next(share for share in profile.shares if share.name == "pk_linear")
    assert linears.calls == 13 * profiler.STEPS and linears.seconds > 0
    assert profile.native_s is not None and linears.seconds < profile.native_s < profile.wall_s
    assert profile.python_s is not None and 0 < profile.python_s < profile.wall_s / profile.steps
    screen = io.StringIO()
    profiler.show(profile, workload, Console(file=screen, width=160))
    told = " ".join(screen.getvalue().split())  # lines are wrapped, wherever the figures end
    assert "kernels" in told and "us a step" in told


@pytest.mark.parametrize(
    ("spans", "length"), [([], 0.0), ([(0, 2), (1, 3)], 3.0), ([(0, 1), (5, 6)], 2.0), ([(0, 9), (2, 3)], 9.0)]
)
def test_overlapping_kernels_count_once(spans: list[tuple[float, float]], length: float) -> None:
    assert profiler._covered(spans) == length
