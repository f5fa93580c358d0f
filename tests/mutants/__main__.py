"""`make mutants`: do the tests notice small faults? Puts seeded faults into pure modules, one at a time, and runs the
module's own tests against each.

A fault that no test notices is a survivor: its line is not held by any promise. Faults that change nothing observable
are declared, with the reason, in `modules.py`. The exit status is 1 when fewer than `--least` percent are caught, and 2
when a module's tests fail without any fault.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import signal
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

from tests.mutants.faults import Fault, faults
from tests.mutants.modules import EQUIVALENT, MODULES, Module

ROOT = Path(__file__).parents[2]
LOADED = ROOT / "build" / "mutants-loaded.txt"
"""The modules that the tests without a fault had loaded in the end."""
OURS = ("penstock", "tests", "conftest", "__main__")

Outcome = Literal["caught", "survived", "timeout"]


@dataclass(frozen=True, slots=True)
class Result:
    module: str
    line: int
    kind: str
    diff: str
    outcome: Outcome
    seconds: float


def main() -> int:
    parser = argparse.ArgumentParser(prog="make mutants", description=__doc__.split("\n\n")[0])
    parser.add_argument("--seed", type=int, default=1, help="chooses the sample; the same seed takes the same faults")
    parser.add_argument("--per-module", type=int, default=6, help="faults per module; 0: all of them")
    parser.add_argument("--only", default="", help="only modules whose path contains this")
    parser.add_argument("--least", type=float, default=90.0, help="percent that must be caught")
    parser.add_argument("--report", type=Path, default=ROOT / "build" / "mutants.json", help="where the results go")
    options = parser.parse_args()
    os.chdir(ROOT)
    os.nice(10)
    for file in (LOADED, options.report):
        file.parent.mkdir(parents=True, exist_ok=True)
    results: list[Result] = []
    for module in MODULES:
        if options.only in module.path:
            chosen = _sample(module, options.seed, options.per_module)
            print(f"{module.path}: {len(chosen)} faults", file=sys.stderr, flush=True)
            outcome, baseline_s = _run(module, None, timeout=600.0)
            if outcome != "survived":
                print(f"{module.path}: its tests fail without any fault: {' '.join(module.tests)}", file=sys.stderr)
                return 2
            _import_the_packages_of_others()
            results += [_try(module, fault, baseline_s) for fault in chosen]
    options.report.write_text(json.dumps([asdict(result) for result in results], indent=1))
    share = _print_table(results)
    print(f"report: {options.report}")
    return 0 if share >= options.least else 1


def _import_the_packages_of_others() -> None:
    """What the tests imported that is not ours, once: the processes of the mutants are forked from this one."""
    for name in LOADED.read_text().splitlines():
        if name.partition(".")[0] not in OURS and name not in sys.modules:
            with contextlib.suppress(Exception):
                __import__(name)


def _sample(module: Module, seed: int, count: int) -> list[Fault]:
    equivalent = EQUIVALENT.get(module.path, {})
    source = (ROOT / module.path).read_text()
    found = [fault for fault in faults(source) if (fault.before, fault.after) not in equivalent]
    if not count or count >= len(found):
        return found
    chosen = random.Random(f"{seed}:{module.path}").sample(found, count)
    return sorted(chosen, key=lambda fault: fault.line)


def _try(module: Module, fault: Fault, baseline_s: float) -> Result:
    outcome, seconds = _run(module, fault, timeout=15.0 + 4 * baseline_s)
    diff = fault.diff((ROOT / module.path).read_text())
    if outcome == "survived":
        print(f"  survived: line {fault.line}, {fault.kind}\n    {fault.before}\n    {fault.after}", file=sys.stderr)
    return Result(module.path, fault.line, fault.kind, diff, outcome, round(seconds, 1))


def _run(module: Module, fault: Fault | None, timeout: float) -> tuple[Outcome, float]:
    """The module's tests in a process of their own, which is killed with all its children when it takes too long."""
    begun = time.monotonic()
    pid = os.fork()
    if pid == 0:
        os._exit(_child(module, fault))
    while time.monotonic() - begun < timeout:
        done, status = os.waitpid(pid, os.WNOHANG)
        if done:
            _kill(pid)
            return ("survived" if os.waitstatus_to_exitcode(status) == 0 else "caught"), time.monotonic() - begun
        time.sleep(0.02)
    _kill(pid)
    os.waitpid(pid, 0)
    return "timeout", time.monotonic() - begun


def _kill(group: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(group, signal.SIGKILL)


def _child(module: Module, fault: Fault | None) -> int:
    os.setsid()
    quiet = os.open(os.devnull, os.O_RDWR)
    for stream in (0, 1, 2):
        os.dup2(quiet, stream)
    import pytest

    from tests.mutants import plugin

    if fault is not None:
        plugin.install(module.name, ROOT / module.path, fault.source)
    options = ["-x", "-q", "-p", "tests.mutants.plugin", "-p", "no:cacheprovider", "-p", "no:schemathesis"]
    status = int(pytest.main([*options, *module.tests]))
    if fault is None:
        LOADED.write_text("\n".join(list(sys.modules)))
    return status


def _print_table(results: list[Result]) -> float:
    print(f"{'module':44} {'mutants':>7} {'caught':>7}")
    for path in dict.fromkeys(result.module for result in results):
        of_module = [result for result in results if result.module == path]
        caught = sum(result.outcome != "survived" for result in of_module)
        print(f"{path:44} {len(of_module):>7} {caught:>7}")
    survivors = [result for result in results if result.outcome == "survived"]
    share = 100.0 * (len(results) - len(survivors)) / max(len(results), 1)
    print(f"{'all':44} {len(results):>7} {len(results) - len(survivors):>7}  {share:.1f}%")
    for result in survivors:
        print(f"\nsurvived: {result.module}:{result.line} ({result.kind})\n{result.diff}")
    return share


if __name__ == "__main__":
    sys.exit(main())
