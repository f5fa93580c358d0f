"""Native CPU kernels: compiled on first use, loaded with ctypes, with the PyTorch path as the fallback.

`load` returns None rather than raising when the library cannot be had, so that an engine always starts; `status`
says which of the two it will be, and why.
"""

from __future__ import annotations

import logging
from typing import NamedTuple

from penstock.engine.backends.cpu.build import BuildError, isa_choices
from penstock.engine.backends.cpu.native import Handle, library
from penstock.engine.backends.cpu.ops import CpuOps
from penstock.engine.backends.cpu.quant_linear import QuantLinear

__all__ = ["CpuOps", "QuantLinear", "Status", "isa_choices", "load", "status"]

log = logging.getLogger(__name__)


class Status(NamedTuple):
    """Whether the native kernels are in use here, for which instruction set, and the detail for a person."""

    available: bool
    isa: str
    detail: str


def load(threads: int, isa: str = "native") -> CpuOps | None:
    """The native operations on a pool of `threads` threads, or None (logged) where they cannot be built."""
    try:
        return CpuOps(Handle(threads, isa))
    except BuildError as error:
        log.warning("native CPU kernels unavailable, using PyTorch: %s", error)
        return None


def status(isa: str = "native") -> Status:
    """What `load` would give; compiles the library if that was never done."""
    try:
        loaded = library(isa)
    except BuildError as error:
        return Status(False, "none", str(error))
    name = str(loaded.pk_isa().decode())
    lacking = f", without {', '.join(loaded.left_out)}, which the compiler does not know" if loaded.left_out else ""
    return Status(True, name, f"native kernels for {name}{lacking}")
