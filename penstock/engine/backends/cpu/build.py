"""Compile the native library on first use and keep it in the user's cache.

A library is named by the hash of everything that decides its code: sources, flags, compiler and CPU. It is
written to a temporary name and renamed, under a file lock, so that processes starting together compile it once
and nobody ever loads half a file.
"""

from __future__ import annotations

import hashlib
import logging
import os
import platform
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path

from penstock.errors import PenstockError

log = logging.getLogger(__name__)

_BASE_FLAGS = (
    "-std=c++17", "-O3", "-ffp-contract=fast", "-fno-math-errno", "-fno-trapping-math", "-fPIC", "-pthread",
    "-fvisibility=hidden",
)  # fmt: skip

_ISA_FLAGS: dict[str, dict[str, tuple[str, ...]]] = {
    "aarch64": {
        "native": ("-mcpu=native",),
        "neon": ("-march=armv8-a",),
        "dotprod": ("-march=armv8.2-a+fp16+dotprod",),
    },
    "x86_64": {
        "native": ("-march=native",),
        "avx2": ("-march=x86-64-v3",),
        "avx512": ("-march=x86-64-v4",),
        "avx512vnni": ("-march=x86-64-v4", "-mavx512vnni"),
    },
}


SOURCES = Path(__file__).parent / "csrc"

_GCC_AARCH64 = "-fno-schedule-insns"
"""Scheduling before register allocation makes GCC copy accumulators around: 5% of the integer product loop."""


class BuildError(PenstockError):
    """The native library cannot be built here; the engine runs on the PyTorch path instead."""


def isa_choices() -> tuple[str, ...]:
    """Instruction sets `build` accepts on this kind of machine; "generic" is plain C++ without intrinsics."""
    return ("native", "generic", *(name for name in _ISA_FLAGS.get(_machine(), {}) if name != "native"))


def cache_dir() -> Path:
    """Where compiled libraries are kept."""
    root = os.environ.get("XDG_CACHE_HOME")
    return (Path(root) if root else Path.home() / ".cache") / "penstock" / "native"


def build(isa: str = "native", directory: Path | None = None) -> Path:
    """The compiled library's path; compiles it when this machine has none yet. Raises `BuildError`."""
    compiler, version = _compiler()
    flags = _flags(isa)
    if _machine() == "aarch64" and "clang" not in version:
        flags = (*flags, _GCC_AARCH64)
    directory = directory or cache_dir()
    sources = _sources()
    key = hashlib.sha256()
    for part in (*(path.name for path in sources), *flags, version, platform.machine(), _cpu_identity()):
        key.update(part.encode() + b"\0")
    for path in sources:
        key.update(path.read_bytes())
    target = directory / f"cpu-{isa}-{key.hexdigest()[:16]}.so"
    if target.exists():
        return target
    try:
        directory.mkdir(parents=True, exist_ok=True)
        with _locked(directory / ".lock"):
            if not target.exists():
                _compile(compiler, flags, sources, target)
    except OSError as error:
        raise BuildError(f"cannot write the native library under {directory}: {error}") from error
    return target


def _flags(isa: str) -> tuple[str, ...]:
    if isa == "generic":
        return (*_BASE_FLAGS, "-DPENSTOCK_GENERIC")
    table = _ISA_FLAGS.get(_machine(), {"native": ()})
    if isa not in table:
        raise BuildError(f"unknown instruction set {isa!r}; this machine offers {', '.join(isa_choices())}")
    return (*_BASE_FLAGS, *table[isa])


def _machine() -> str:
    machine = platform.machine().lower()
    return {"arm64": "aarch64", "amd64": "x86_64"}.get(machine, machine)


def _sources() -> list[Path]:
    return sorted([*SOURCES.rglob("*.cpp"), *SOURCES.rglob("*.h")])


@cache
def _compiler() -> tuple[str, str]:
    """The first working C++ compiler: its path and what it calls itself."""
    for name in filter(None, (os.environ.get("CXX"), "c++", "g++", "clang++")):
        path = shutil.which(name)
        if path is None:
            continue
        probe = subprocess.run([path, "--version"], capture_output=True, text=True, check=False)
        if probe.returncode == 0:
            return path, probe.stdout
    raise BuildError("no C++ compiler found (looked for $CXX, c++, g++, clang++); install g++ for the fast CPU path")


@cache
def _cpu_identity() -> str:
    """What `-march=native` depends on: the CPU's model and features."""
    try:
        text = Path("/proc/cpuinfo").read_text()
    except OSError:
        return platform.processor()
    wanted = ("model name", "flags", "Features", "CPU part", "CPU implementer", "CPU variant")
    return "\n".join(sorted({line for line in text.splitlines() if line.startswith(wanted)}))


def _compile(compiler: str, flags: tuple[str, ...], sources: list[Path], target: Path) -> None:
    began = time.monotonic()
    log.info("compiling the native CPU kernels with %s (once per machine)", compiler)
    with tempfile.TemporaryDirectory(dir=target.parent) as scratch:
        objects, children = [], []
        for index, source in enumerate(path for path in sources if path.suffix == ".cpp"):
            objects.append(str(Path(scratch) / f"{index}.o"))
            command = [compiler, *flags, f"-I{SOURCES}", "-c", str(source), "-o", objects[-1]]
            children.append((command, subprocess.Popen(command, stderr=subprocess.PIPE, text=True)))
        failures = []
        for command, child in children:
            _, errors = child.communicate()
            if child.returncode != 0:
                failures.append((command, errors))
        for command, errors in failures:
            raise BuildError(f"compiling failed: {' '.join(command)}\n{errors[-2000:]}")
        built = Path(scratch) / "library.so"
        command = [compiler, "-shared", "-pthread", *objects, "-o", str(built)]
        linked = subprocess.run(command, stderr=subprocess.PIPE, text=True, check=False)
        if linked.returncode != 0:
            raise BuildError(f"linking failed: {' '.join(command)}\n{linked.stderr[-2000:]}")
        built.replace(target)
    log.info("native CPU kernels ready in %.1f s: %s", time.monotonic() - began, target)


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    try:
        import fcntl
    except ImportError as error:
        raise BuildError("the native CPU kernels need a POSIX system (file locks)") from error
    with path.open("w") as handle:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield


def main() -> None:
    """Compile now instead of at the first start; without a compiler say so and leave it."""
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    try:
        log.info("native CPU kernels: %s", build())
    except BuildError as error:
        log.warning("native CPU kernels are left out, PyTorch does their work: %s", error)


if __name__ == "__main__":
    main()
