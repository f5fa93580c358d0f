"""Compiles the native library on first use and keeps it in the user's cache.

The kernels' sources are compiled once per instruction set, each time into its own namespace. A library holds one set
or several, and `native` picks among them when it loads the library. One with all sets of an architecture serves every
machine of it: `python -m penstock.engine.backends.cpu.build --all` makes one to ship with the package (`prebuilt/`).
Without one, only the best set that this CPU runs is compiled.

A library is named by the hash of sources, flags and compiler. It is written to a temporary name and renamed, under a
file lock, so that processes that start together compile it once and none loads half a file.
"""

from __future__ import annotations

import argparse
import ctypes
import hashlib
import logging
import os
import platform
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from penstock.engine.backends import build_cache
from penstock.errors import PenstockError

log = logging.getLogger(__name__)

SOURCES = Path(__file__).parent / "csrc"
PREBUILT = Path(__file__).parent / "prebuilt"
_COMMON = "common/library.cpp"
"""What a library has once; everything else is compiled per instruction set."""

_BASE_FLAGS = (
    "-std=c++17", "-O3", "-ffp-contract=fast", "-fno-math-errno", "-fno-trapping-math", "-fPIC", "-pthread",
    "-fvisibility=hidden",
)  # fmt: skip

_GCC_AARCH64 = "-fno-schedule-insns"
"""Scheduling before register allocation makes GCC copy accumulators around: 5% of the integer product loop."""


_SHIPPED_LINK = ("-static-libstdc++", "-Wl,--exclude-libs,ALL", "-Wl,--gc-sections", "-s")
"""A library for other machines brings the parts of the C++ runtime that it uses, hidden: theirs may be older."""


class BuildError(PenstockError):
    """The native library cannot be built here; the engine runs on the PyTorch path instead."""


@dataclass(frozen=True, slots=True)
class InstructionSet:
    """A set of CPU instructions that the kernels are compiled for; its name is their namespace."""

    name: str
    flags: tuple[str, ...]


_AVX2 = ("-mavx2", "-mfma", "-mf16c", "-mbmi", "-mbmi2", "-mpopcnt")
_AVX512 = (*_AVX2, "-mavx512f", "-mavx512bw", "-mavx512cd", "-mavx512dq", "-mavx512vl")
_VNNI = (*_AVX512, "-mavx512vnni")
_BF16 = (*_VNNI, "-mavx512bf16")
_AMX = (*_BF16, "-mavx512vbmi", "-mamx-tile", "-mamx-bf16", "-mamx-int8", "-mtune=sapphirerapids")

_GENERIC = InstructionSet("generic", ("-DPENSTOCK_GENERIC",))
"""Plain C++ without intrinsics."""

_SETS: dict[str, tuple[InstructionSet, ...]] = {
    "aarch64": (
        _GENERIC,
        InstructionSet("neon", ("-march=armv8-a",)),
        InstructionSet("dotprod", ("-march=armv8.2-a+fp16+dotprod", "-mtune=neoverse-n1")),
    ),
    "x86_64": (
        _GENERIC,
        InstructionSet("avx2", _AVX2),
        InstructionSet("avxvnni", (*_AVX2, "-mavxvnni")),
        InstructionSet("avx512", _AVX512),
        InstructionSet("avx512vnni", _VNNI),
        InstructionSet("avx512bf16", _BF16),
        InstructionSet("amx", _AMX),
    ),
}
"""Least capable first, the order in which they are linked: where two sets instantiate the same function of the standard
library, the linker keeps the first, which every CPU that gets there can run. Names as in common/library.cpp."""


def instruction_sets() -> tuple[InstructionSet, ...]:
    """The sets of this architecture, least capable first."""
    return _SETS.get(_machine(), (_GENERIC,))


def isa_choices() -> tuple[str, ...]:
    """What `build` accepts on this kind of machine: "native" is the best set that this CPU runs."""
    return ("native", *(known.name for known in instruction_sets()))


def cache_dir() -> Path:
    """Where compiled libraries are kept."""
    return build_cache.cache_dir("native")


def build(isa: str = "native", directory: Path | None = None) -> Path:
    """The path of a library with this instruction set; compiles it if there is none yet. Raises `BuildError`."""
    by_name = {known.name: known for known in instruction_sets()}
    if isa != "native" and isa not in by_name:
        raise BuildError(f"unknown instruction set {isa!r}; this machine offers {', '.join(isa_choices())}")
    shipped = PREBUILT / _prebuilt_name()
    if shipped.exists():
        return shipped
    if isa == "native":
        isa = next(name for name in _runnable(directory) if name in by_name and _compiles(by_name[name]))
    return build_library((by_name[isa],), directory)


def build_library(
    sets: Sequence[InstructionSet], directory: Path | None = None, link_flags: Sequence[str] = ()
) -> Path:
    """A library of these instruction sets, least capable first; none of them: only what tells which ones a CPU runs."""
    compiler, version = _compiler()
    directory = directory or cache_dir()
    key = _sources_hash()
    compiled = (f"{known.name} {known.flags}" for known in sets)
    for part in (*_base_flags(), *link_flags, version, platform.machine(), *compiled):
        key.update(part.encode() + b"\0")
    names = "+".join(known.name for known in sets) or "probe"
    target = directory / f"cpu-{names}-{key.hexdigest()[:16]}.so"
    if target.exists():
        return target
    try:
        directory.mkdir(parents=True, exist_ok=True)
        with build_cache.locked(directory / ".lock"):
            if not target.exists():
                _compile(compiler, sets, target, link_flags)
    except OSError as error:
        raise BuildError(f"cannot write the native library under {directory}: {error}") from error
    return target


def build_prebuilt(directory: Path, cache: Path | None = None) -> Path:
    """A library for every machine of this architecture, as `build` looks for it in `PREBUILT`. It is compiled once and
    kept in the cache, like others."""
    sets = [known for known in instruction_sets() if _compiles(known)]
    left_out = [known.name for known in instruction_sets() if known not in sets]
    if left_out:
        log.warning("left out, because the compiler does not know them: %s", ", ".join(left_out))
    directory.mkdir(parents=True, exist_ok=True)
    made = build_library(sets, cache, _SHIPPED_LINK)
    with tempfile.TemporaryDirectory(dir=directory) as scratch:
        return Path(shutil.copy(made, scratch)).replace(directory / _prebuilt_name())


def _runnable(directory: Path | None) -> list[str]:
    """The instruction sets that this CPU runs, best first: asked of a library without kernels."""
    probe = ctypes.CDLL(str(build_library((), directory)))
    probe.pk_runnable_sets.restype = ctypes.c_char_p
    return str(probe.pk_runnable_sets().decode()).split()


def _base_flags() -> tuple[str, ...]:
    gcc = "clang" not in _compiler()[1]
    return (*_BASE_FLAGS, _GCC_AARCH64) if _machine() == "aarch64" and gcc else _BASE_FLAGS


def _machine() -> str:
    machine = platform.machine().lower()
    return {"arm64": "aarch64", "amd64": "x86_64"}.get(machine, machine)


def _prebuilt_name() -> str:
    return f"cpu-{_machine()}-{_sources_hash().hexdigest()[:16]}.so"


def _sources_hash() -> hashlib._Hash:
    key = hashlib.sha256()
    for path in sorted(path for path in SOURCES.rglob("*") if path.suffix in (".cpp", ".h", ".def")):
        key.update(str(path.relative_to(SOURCES)).encode() + b"\0" + path.read_bytes())
    return key


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
def _compiles(known: InstructionSet) -> bool:
    """Whether the compiler knows the flags of this set."""
    command = [_compiler()[0], *known.flags, "-x", "c++", "-fsyntax-only", os.devnull]
    return subprocess.run(command, capture_output=True, check=False).returncode == 0


def _compile(compiler: str, sets: Sequence[InstructionSet], target: Path, link_flags: Sequence[str]) -> None:
    began = time.monotonic()
    if sets:
        names = ", ".join(known.name for known in sets)
        log.info("compiling the native CPU kernels for %s with %s (once per machine)", names, compiler)
    # The largest files first: a core that is left with one of them at the end would keep the others waiting.
    kernels = sorted(SOURCES.rglob("*.cpp"), key=lambda path: (-path.stat().st_size, path))
    jobs: list[tuple[Path, tuple[str, ...]]] = [(SOURCES / _COMMON, ())]
    for known in sets:
        flags = (*known.flags, f"-DPK_SET={known.name}")
        jobs += [(source, flags) for source in kernels if source != SOURCES / _COMMON]
    with tempfile.TemporaryDirectory(dir=target.parent) as scratch:
        objects = [str(Path(scratch) / f"{index}.o") for index in range(len(jobs))]
        base = [compiler, *_base_flags(), f"-I{SOURCES}"]
        commands = [
            [*base, *flags, "-c", str(source), "-o", made] for (source, flags), made in zip(jobs, objects, strict=True)
        ]
        with ThreadPoolExecutor(len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else None) as pool:
            for command, failure in zip(commands, pool.map(_failure, commands), strict=True):
                if failure is not None:
                    raise BuildError(f"compiling failed: {' '.join(command)}\n{failure[-2000:]}")
        built = Path(scratch) / "library.so"
        command = [compiler, "-shared", "-pthread", *objects, *link_flags, "-o", str(built)]
        failure = _failure(command)
        if failure is not None:
            raise BuildError(f"linking failed: {' '.join(command)}\n{failure[-2000:]}")
        built.replace(target)
    if sets:
        log.info("native CPU kernels ready in %.1f s: %s", time.monotonic() - began, target)


def _failure(command: list[str]) -> str | None:
    """What a failing command wrote; None if it succeeded."""
    done = subprocess.run(command, stderr=subprocess.PIPE, text=True, check=False)
    return done.stderr if done.returncode else None


def main() -> None:
    """Compile now instead of at the first start; without a compiler say so and leave it, unless it is for shipping."""
    parser = argparse.ArgumentParser(description="Compile the native CPU kernels.")
    parser.add_argument("--all", action="store_true", help="every instruction set of this architecture, to be shipped")
    parser.add_argument("--output", type=Path, default=PREBUILT, help="folder for --all (default: inside the package)")
    options = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    try:
        log.info("native CPU kernels: %s", build_prebuilt(options.output) if options.all else build())
    except BuildError as error:
        if options.all:
            sys.exit(f"native CPU kernels: {error}")
        log.warning("native CPU kernels are left out, PyTorch does their work: %s", error)


if __name__ == "__main__":
    main()
