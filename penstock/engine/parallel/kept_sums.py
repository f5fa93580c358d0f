"""Sums over shards that a rank takes part in while it loads, kept in a file for one that is started again in its place.

Where the `transformers` library runs a model, shards are compared with the whole while they load, and sum what they
compute. A rank that is started again loads alone: it is given the sums that the one before it had. Loading is the same
computation each time, so it asks for the same ones in the same order.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from safetensors.torch import load_file, save_file
from torch import Tensor

from penstock.errors import ReplicaLost


class KeptSums:
    """Adds up what all shards have, as `total` does."""

    def __init__(self, total: Callable[[Tensor], Tensor], file: Path) -> None:
        self._total = total
        self._file = file
        self._again = file.exists()
        self._sums: dict[str, Tensor] = load_file(file) if self._again else {}
        self._count = 0
        self._loading = True

    def __call__(self, x: Tensor) -> Tensor:
        """In place."""
        if not self._loading:
            return self._total(x)
        name = str(self._count)
        self._count += 1
        if not self._again:
            total = self._total(x)
            self._sums[name] = total.cpu().clone()
            return total
        kept = self._sums.get(name)
        if kept is None or (kept.shape, kept.dtype) != (x.shape, x.dtype):
            raise ReplicaLost("it loads otherwise than the rank in whose place it was started")
        return x.copy_(kept)

    def loaded(self) -> None:
        """From now on, sums are made with the others."""
        if not self._again:
            begun = self._file.with_suffix(".part")
            save_file(self._sums, begun)
            begun.rename(self._file)
        self._sums, self._loading = {}, False
