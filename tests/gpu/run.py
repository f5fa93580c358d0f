"""Run the kernel tests and benchmarks without pytest, and print a short table last.

    python tests/gpu/run.py                     # on a CUDA device: build in parallel, check, time
    python tests/gpu/run.py --interpret         # numerics on the CPU, through Triton's interpreter
    python tests/gpu/run.py --compile           # build every kernel for an H200 without a GPU; registers and spills

`--only WORD` selects modules, tests and benchmarks by name; `--no-bench`, `--no-test` leave a part out; `--tune` adds
the launch-shape sweeps; `--jobs N` runs the tests in N processes beside each other, benchmarks after them. They
build what they launch as they go, into one cache: building it first would keep the device idle and take longer in all.
"""

from __future__ import annotations

import argparse
import faulthandler
import importlib
import inspect
import os
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from pathlib import Path

HERE = Path(__file__).resolve().parent
PATIENCE_S = 90
"""A test that takes longer hangs: say where, and stop. Several processes have this times their number, and so do the
ranks that tests start (`peer_ranks`, which learns the number from `PENSTOCK_GPU_JOBS`)."""
LONGEST = (
    "int4.",
    "latent.",
    "chosen.",
    "engine.",
    "moe",
    "gpt_oss.",
    "parallel.",
    "library_attention.",
    "attention.",
    "soak.",
    "deepseek_v4.",
    "capture.",
    "graph_pool.",
    "state_graphs.",
    "delta.",
    "speculation.",
    "gemv.",
    "lora.",
)
"""Modules whose tests are begun first when several processes share them."""


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("--interpret", action="store_true")
    parser.add_argument("--compile", action="store_true")
    parser.add_argument("--only", action="append", default=[])
    parser.add_argument("--no-bench", action="store_true")
    parser.add_argument("--no-test", action="store_true")
    parser.add_argument("--tune", action="store_true")
    parser.add_argument("--no-build", action="store_true", help="build kernels when they are first launched")
    parser.add_argument("--jobs", type=int, default=1, help="processes that share the tests")
    parser.add_argument("--shard", default="0/1", help=argparse.SUPPRESS)
    parser.add_argument("--claims", type=Path, help=argparse.SUPPRESS)
    return parser.parse_args()


def functions(prefixes: tuple[str, ...], only: list[str]) -> list[tuple[str, Callable[..., object]]]:
    found = []
    for path in sorted(HERE.glob("test_triton_*.py")):
        module = importlib.import_module(path.stem)
        for name, function in inspect.getmembers(module, inspect.isfunction):
            label = f"{path.stem.removeprefix('test_triton_')}.{name}"
            mine = function.__module__ == module.__name__ and name.startswith(prefixes)
            if mine and (not only or any(word in label for word in only)):
                found.append((label, function))
    return found


def build_in_parallel(options: argparse.Namespace, seed: int) -> None:
    """Fill Triton's cache from several processes: compiling is most of a cold run's time."""
    count = max(1, min(14, (os.cpu_count() or 2) - 2))
    command = [sys.executable, __file__, "--compile"]
    command += ["--tune"] if options.tune else []
    command += ["--no-bench"] if options.no_bench else []
    for word in options.only:
        command += ["--only", word]
    environment = dict(os.environ, OMP_NUM_THREADS="1", PENSTOCK_SEED=str(seed))
    start = time.perf_counter()
    workers = [
        subprocess.Popen([*command, "--shard", f"{i}/{count}"], env=environment, stdout=subprocess.DEVNULL)
        for i in range(count)
    ]
    failed = sum(worker.wait() != 0 for worker in workers)
    print(f"built in {time.perf_counter() - start:.1f} s, {failed} of {count} processes failed", flush=True)


def claimed(label: str, claims: Path | None) -> bool:
    """Whether this process is the one to run a test: the first that writes the file of its name."""
    if claims is None:
        return True
    try:
        (claims / label).touch(exist_ok=False)
    except FileExistsError:
        return False
    return True


def share_tests(options: argparse.Namespace, labels: list[str], seed: int) -> list[str]:
    """Run the tests in several processes, each taking the next that none has taken. Returns the failed ones."""
    with tempfile.TemporaryDirectory() as folder:
        command = [
            sys.executable,
            __file__,
            "--no-build",
            "--no-bench",
            "--claims",
            folder,
            "--jobs",
            str(options.jobs),
        ]
        for word in options.only:
            command += ["--only", word]
        environment = dict(
            os.environ, OMP_NUM_THREADS="1", PENSTOCK_SEED=str(seed), PENSTOCK_GPU_JOBS=str(options.jobs)
        )
        workers = [subprocess.Popen(command, env=environment) for _ in range(options.jobs)]
        for worker in workers:
            worker.wait()
        passed = {path.stem for path in Path(folder).glob("*.passed")}
    return [label for label in labels if label not in passed]


def _first_line(error: Exception) -> str:
    """What went wrong, for the end of the output."""
    return "".join(traceback.format_exception_only(error)).strip().splitlines()[0]


def main() -> int:
    options = arguments()
    if options.interpret:
        os.environ["TRITON_INTERPRET"] = "1"
    if options.compile:
        os.environ["PENSTOCK_GPU_TESTS"] = "compile"
        if options.shard == "0/1":
            os.environ["PENSTOCK_RESOURCES"] = "1"
    sys.path.insert(0, str(HERE))
    import gpu_harness as harness

    print(f"mode {harness.MODE}, seed {harness.seed()}", flush=True)
    if harness.MODE == "compile":
        harness.install_compile_mode(*map(int, options.shard.split("/")))
    elif harness.MODE == "device" and not options.no_build and (options.jobs == 1 or options.no_test):
        build_in_parallel(options, harness.seed())

    failures = []
    reasons: dict[str, str] = {}
    tests = [] if options.no_test else functions(("test_",), options.only)
    shared = options.jobs > 1 and harness.MODE == "device"
    if shared:
        tests.sort(
            key=lambda test: next((i for i, word in enumerate(LONGEST) if test[0].startswith(word)), len(LONGEST))
        )
    if shared and options.claims is None:
        failures = share_tests(options, [label for label, _ in tests], harness.seed())
    for label, function in [] if shared and options.claims is None else tests:
        if not claimed(label, options.claims):
            continue
        harness.reseed(label)
        start = time.perf_counter()
        if harness.MODE == "device":
            faulthandler.dump_traceback_later(PATIENCE_S * options.jobs, exit=True)
        try:
            function()
            outcome = "ok"
            if options.claims is not None:
                (options.claims / f"{label}.passed").touch()
        except Exception as error:
            failures.append(label)
            reasons[label] = _first_line(error)
            outcome = "FAILED"
            traceback.print_exc()
        faulthandler.cancel_dump_traceback_later()
        print(f"{outcome:6s} {label} {time.perf_counter() - start:.1f} s", flush=True)

    rows: list[harness.Row] = []
    if harness.MODE != "interpret" and not options.no_bench:
        prefixes = ("bench_", "tune_") if options.tune else ("bench_",)
        for label, function in functions(prefixes, options.only):
            harness.reseed(label)
            try:
                for row in function():  # type: ignore[attr-defined]
                    rows.append(row)
                    if harness.MODE == "device":
                        print(f"  {row[0]:58s} {row[1]:9.1f} us  {row[2]}", flush=True)
            except Exception as error:
                failures.append(label)
                reasons[label] = _first_line(error)
                traceback.print_exc()
    if harness.MODE == "compile":
        for line in sorted(harness.compiled.values()):
            print(line)
    if options.claims is not None:
        return 1 if failures else 0
    print(f"\n{len(tests)} tests, {len(failures)} failed: {', '.join(failures) or 'none'}")
    for label, reason in reasons.items():
        print(f"{label}: {reason}")
    for name, us, rate in rows if harness.MODE == "device" else []:
        print(f"{name:58s} {us:9.1f} us  {rate}")
    return 1 if failures else 0


if __name__ == "__main__":
    raise SystemExit(main())
