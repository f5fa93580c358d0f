"""The part of `Ops` on the native CPU library that all kinds of operations share."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from penstock.engine.backends.cpu.native import Handle
from penstock.engine.backends.interface import Link
from penstock.engine.backends.reference.mixers import PlainMixers


class NativeOps(PlainMixers):
    """Calls into the library, on its thread pool."""

    def __init__(self, handle: Handle) -> None:
        self.handle = handle
        self.batch_invariant = False
        self._ctx = handle.pointer

    def chain(self, links: Sequence[Link]) -> None:
        """See `Ops`: there is no such kernel here."""

    @property
    def _lib(self) -> Any:
        return self.handle.lib
