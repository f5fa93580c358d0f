"""Where a step goes: device busy or idle, and which kernels take the time.

All requests of a workload that run together are submitted at once. The steps until every one of them decodes are one
recording, a few of those behind it another. On CUDA a recording is the device's own timeline; on CPU it is Python's
profiler, in which the native kernels are calls, and, for recorded steps, their own times of each kernel. Python's share
of a decoding step is measured before that and without a profiler: what the engine's thread computes outside of native
calls, so that other processes do not count.
"""

from __future__ import annotations

import cProfile
import dataclasses
import pstats
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from rich.console import Console

from penstock.bench import report
from penstock.bench.workloads import Workload

if TYPE_CHECKING:
    from penstock.engine.backends.backend import Backend
    from penstock.engine.core import Engine

STEPS = 20
_SHOWN = 14
_FIGURES = 50
"""Columns of a terminal that the figures of a kernel take; its name has the rest."""


@dataclass(frozen=True, slots=True)
class Share:
    """One kernel (or function) over the recorded steps."""

    name: str
    calls: int
    seconds: float


@dataclass(frozen=True, slots=True)
class Profile:
    """Recorded steps: wall time, time the device (or the profiled thread) was busy, and who took it."""

    kind: str
    """`prompts`: steps that compute prompts, and a token of those that are done. `decoding`: a token of each."""
    steps: int
    rows: int
    wall_s: float
    busy_s: float
    shares: list[Share]
    native_s: float | None = None
    """On CPU, of a recorded step: time inside its kernels."""
    python_s: float | None = None
    """On CPU with native kernels: what a step takes outside of them, in the middle of the steps."""


def record(engine: Engine, workload: Workload) -> list[Profile]:
    """Profile the prompts of `workload` and, where its outputs are long enough, decode steps; then drain the engine."""
    together = min(workload.concurrency or workload.requests, engine.info.max_running)
    for request in workload.build(engine.info.vocab_size, salt="profile")[:together]:
        engine.submit(request)

    def prompts() -> int:
        steps = 0
        while engine.has_work and not _decoding(engine):
            engine.step()
            steps += 1
        return steps

    def decoding() -> int:
        for _ in range(STEPS):
            engine.step()
        return STEPS

    profiles = [_recorded(engine, "prompts", together, prompts)]
    if workload.output_len[0] > 3 * STEPS:  # shorter ones end before there is anything to record
        rows, python = len(engine.scheduler.running), _python_seconds(engine)
        profiles.append(dataclasses.replace(_recorded(engine, "decoding", rows, decoding), python_s=python))
    for seq in list(engine.scheduler.running):
        engine.abort(seq.id)
    while engine.has_work:
        engine.step()
    return profiles


def _recorded(engine: Engine, kind: str, rows: int, run: Callable[[], int]) -> Profile:
    """What `run` does, which returns its number of steps."""
    backend = engine.runner.backend
    return _on_cpu(engine, kind, rows, run) if backend.in_host_memory else _on_cuda(backend, kind, rows, run)


def _decoding(engine: Engine) -> bool:
    running = engine.scheduler.running
    return engine.scheduler.waiting == 0 and all(seq.length > seq.prompt_len for seq in running)


def _on_cuda(backend: Backend, kind: str, rows: int, run: Callable[[], int]) -> Profile:
    backend.synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as recording:
        begin = time.perf_counter()
        steps = run()
        backend.synchronize()
        wall = time.perf_counter() - begin
    spans: list[tuple[float, float]] = []
    totals: dict[str, list[float]] = {}
    for event in recording.events() or []:
        if event.device_type.name == "CUDA":
            spans.append((event.time_range.start, event.time_range.end))
            totals.setdefault(event.name, []).append(event.time_range.elapsed_us() / 1e6)
    shares = [Share(name, len(times), sum(times)) for name, times in totals.items()]
    return Profile(kind, steps, rows, wall, _covered(spans) / 1e6, sorted(shares, key=lambda s: -s.seconds))


def _covered(spans: list[tuple[float, float]]) -> float:
    """Length of the union: kernels may overlap, and idle time is what no kernel covers."""
    covered, reach = 0.0, float("-inf")
    for begin, end in sorted(spans):
        covered += max(0.0, end - max(begin, reach))
        reach = max(reach, end)
    return covered


class _Stopwatch:
    """Stands in for the library and adds up the CPU time that this thread spends in its calls."""

    def __init__(self, lib: Any) -> None:
        self._lib = lib
        self.seconds = 0.0

    def __getattr__(self, name: str) -> Callable[..., Any]:
        function = getattr(self._lib, name)

        def timed(*arguments: Any) -> Any:
            begin = time.thread_time()
            try:
                return function(*arguments)
            finally:
                self.seconds += time.thread_time() - begin

        self.__dict__[name] = timed
        return timed


def _python_seconds(engine: Engine) -> float | None:
    """What a step takes outside of native calls: the median of some."""
    native = engine.runner.backend.native
    if native is None:
        return None
    watch = _Stopwatch(native.lib)
    taken: list[float] = []
    with native.replaced_by(watch):
        for _ in range(STEPS):
            begin, inside = time.thread_time(), watch.seconds
            engine.step()
            taken.append(time.thread_time() - begin - (watch.seconds - inside))
    return statistics.median(taken)


def _on_cpu(engine: Engine, kind: str, rows: int, run: Callable[[], int]) -> Profile:
    profiler = cProfile.Profile()
    recorded = engine.runner.executor.recorded
    native: float | None = None
    if recorded is not None:
        recorded.timed = True
        recorded.seconds()
    begin = time.perf_counter()
    profiler.enable()
    steps = run()
    profiler.disable()
    wall = time.perf_counter() - begin
    rows_of_stats: dict[tuple[str, int, str], tuple[int, int, float, float, object]]
    rows_of_stats = pstats.Stats(profiler).stats  # type: ignore[attr-defined]
    shares = [
        Share(name if file.startswith("~") else f"{_short(file)}:{name}", calls, own)
        for (file, _, name), (calls, _, own, _, _) in rows_of_stats.items()
    ]
    if recorded is not None:
        recorded.timed = False
        kernels = recorded.seconds()
        native = sum(seconds for _, seconds in kernels.values())
        shares = _with_kernels(shares, kernels, steps)
    shares.sort(key=lambda share: -share.seconds)
    return Profile(kind, steps, rows, wall, sum(share.seconds for share in shares), shares, native)


def _with_kernels(shares: list[Share], kernels: dict[str, tuple[int, float]], steps: int) -> list[Share]:
    """Python's profiler sees a recorded step as part of the function that runs it: take the kernels out of that one."""
    inside = sum(seconds for _, seconds in kernels.values())
    runs = "backends/cpu/recorded_step.py:_run"
    outer = [Share(s.name, s.calls, s.seconds - inside) if s.name.endswith(runs) else s for s in shares]
    return outer + [Share(name, calls * steps, seconds) for name, (calls, seconds) in kernels.items()]


def _short(file: str) -> str:
    return file.rsplit("penstock/", 1)[-1].rsplit("site-packages/", 1)[-1]


def show(profile: Profile, workload: Workload, console: Console) -> None:
    """The profile as a table."""
    step = profile.wall_s / profile.steps
    title = (
        f"{workload.name}, {profile.kind}: {profile.rows} sequences, {profile.steps} steps of {step * 1e3:.2f} ms, "
        f"busy {profile.busy_s / profile.wall_s:.0%}, idle {max(0.0, 1 - profile.busy_s / profile.wall_s):.0%}"
    )
    if profile.native_s is not None:
        title += f"; kernels {profile.native_s / profile.steps * 1e3:.2f} ms a step"
    if profile.python_s is not None:
        title += f"; Python {profile.python_s * 1e6:,.0f} us a step (without the profiler)"
    rows = report.table(title, "kernel", "calls/step", "us/call", "us/step", "of step")
    widest = max(20, min(70, console.width - _FIGURES))
    for share in profile.shares[:_SHOWN]:
        rows.add_row(
            share.name[:widest],
            report.number(share.calls / profile.steps),
            report.number(share.seconds / share.calls * 1e6),
            report.number(share.seconds / profile.steps * 1e6),
            report.share(share.seconds / profile.wall_s),
        )
    console.print(rows)
