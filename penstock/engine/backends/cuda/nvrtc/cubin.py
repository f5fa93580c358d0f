"""Machine code of the kernels in `csrc/`, from the cache or compiled now.

A cubin is named by the hash of all that it depends on: source, headers, options, architecture and NVRTC's version.
"""

from __future__ import annotations

import hashlib
import logging
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from penstock.engine.backends.build_cache import cache_dir, cached
from penstock.engine.backends.cuda.nvrtc.compiler import Compiler, CudaBuildError, compiler

log = logging.getLogger(__name__)

SOURCES = Path(__file__).parents[1] / "csrc"
_BASE_OPTIONS = ("--std=c++17",)
_ARCHITECTURE_SPECIFIC = (9, 0)
"""From this compute capability on, `a` after the architecture adds instructions that only it has."""

Defines = Mapping[str, int | float | str]


def build(
    name: str | Path,
    *,
    defines: Defines | None = None,
    options: Sequence[str] = (),
    arch: str = "sm_90a",
    directory: Path | None = None,
    using: Compiler | None = None,
) -> bytes:
    """The cubin of a source in `csrc/` (or at a path) with these macros and options. Raises `CudaBuildError`."""
    path, source, headers = _texts(name)
    made_with = using or compiler()
    flags = _flags(defines, options, arch)
    target = (directory or cache_dir("cuda")) / f"{path.stem}-{arch}-{_key(made_with, source, headers, flags)}.cubin"

    def compiled() -> bytes:
        began = time.monotonic()
        cubin, said = made_with.compile(source, path.name, headers, flags)
        log.info("compiled %s for %s in %.1f s (kept in %s)", path.name, arch, time.monotonic() - began, target.parent)
        if said:
            log.debug("%s: %s", path.name, said)
        return cubin

    return cached(target, compiled)


def report(
    name: str | Path, *, defines: Defines | None = None, options: Sequence[str] = (), arch: str = "sm_90a"
) -> str:
    """Registers, spills and shared memory of every kernel of a source, and warnings: needs NVRTC, but no device."""
    path, source, headers = _texts(name)
    flags = _flags(defines, (*options, "--ptxas-options=-v"), arch)
    return compiler().compile(source, path.name, headers, flags)[1]


def _texts(name: str | Path) -> tuple[Path, str, dict[str, str]]:
    path = SOURCES / name
    try:
        return path, path.read_text(), {header.name: header.read_text() for header in sorted(SOURCES.glob("*.cuh"))}
    except OSError as error:
        raise CudaBuildError(f"a source of the kernel {path} cannot be read: {error}; reinstall penstock") from error


def _flags(defines: Defines | None, options: Sequence[str], arch: str) -> tuple[str, ...]:
    return (*_BASE_OPTIONS, f"--gpu-architecture={arch}", *macros(defines or {}), *options)


def macros(defines: Defines) -> tuple[str, ...]:
    """As options of a compiler, in an order that does not depend on the caller's."""
    return tuple(f"-D{name}={value}" for name, value in sorted(defines.items()))


def architecture(capability: tuple[int, int]) -> str:
    """The name of a compute capability: (9, 0) is sm_90a."""
    suffix = "a" if capability >= _ARCHITECTURE_SPECIFIC else ""
    return f"sm_{capability[0]}{capability[1]}{suffix}"


def _key(made_with: Compiler, source: str, headers: Mapping[str, str], flags: Sequence[str]) -> str:
    key = hashlib.sha256()
    for part in (f"nvrtc {made_with.version}", source, *(text for pair in headers.items() for text in pair), *flags):
        key.update(f"{len(part)}\0{part}".encode())
    return key.hexdigest()[:24]
