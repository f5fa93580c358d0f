"""The vector index of one collection: usearch in memory, a file beside the store.

The store is authoritative and the index a copy that can always be rebuilt: keys only grow, vectors never change, and
removals are numbered. So two numbers (`Mark`) say exactly how much of the store an index contains, and catching up is
reading what came after. A file is used only if its checksum and mark match those in the store.

Vectors are int8, each scaled so that its largest value is 127 (which does not change the cosine): half the memory of
float16 and a third of the build time; `penstock bench search-speed` measures the recall.
"""

from __future__ import annotations

import os
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray
from usearch.index import Index

from penstock.knowledge.chunks.base import Ranked
from penstock.machine import usable_cores

if TYPE_CHECKING:
    from penstock.knowledge.embedder import Vectors

EXACT = 20_000
"""Up to this many vectors the search is exact: still a few milliseconds."""
EXPANSION_ADD = 64
EXPANSION_SEARCH = 96
SUFFIX = "i8.usearch"
"""Format version: files of another version are not read."""
BULK = 1024
"""From this many vectors on, up to `MOST_THREADS` threads add them; not all cores, because requests are served too."""
MOST_THREADS = 4
LARGEST = 127


@dataclass(frozen=True, slots=True)
class Mark:
    """How much of the store an index has seen: the last key, and the number of the last removal."""

    key: int = 0
    removal: int = 0


@dataclass(frozen=True, slots=True)
class SavedIndex:
    """What the store remembers about the file beside it."""

    file: str
    checksum: int
    mark: Mark


class VectorIndex:
    """Not thread-safe: its owner allows one thread at a time. Nothing here is asynchronous."""

    def __init__(self, dimensions: int) -> None:
        self._index = _new(dimensions)
        self.mark = Mark()
        self.unsaved = 0
        """Changes since the file was written."""

    def __len__(self) -> int:
        return len(self._index)

    def add(self, keys: NDArray[np.uint64], vectors: NDArray[np.float16], mark: Mark) -> None:
        if len(keys):
            threads = min(MOST_THREADS, usable_cores()) if len(keys) >= BULK else 1
            self._index.add(keys, _stretched(vectors), threads=threads)
        self.unsaved += len(keys)
        self.mark = mark

    def remove(self, keys: NDArray[np.uint64], mark: Mark) -> None:
        if len(keys):
            self._index.remove(keys)
        self.unsaved += len(keys)
        self.mark = mark

    def search(self, vector: Vectors, count: int) -> Ranked:
        size = len(self._index)
        if not size or not count:
            return []
        found = self._index.search(_stretched(vector), min(count, size), threads=1, exact=size <= EXACT)
        return [(int(key), 1.0 - float(distance)) for key, distance in zip(found.keys, found.distances, strict=True)]

    def save(self, folder: Path, stem: str) -> SavedIndex:
        """Writes the index to a new file; the caller records it in the store, then deletes the old file."""
        data = self._index.save()
        assert data is not None, "no file was named, so the bytes come back"
        name = f"{stem}.{self.mark.key}-{self.mark.removal}.{SUFFIX}"
        partial = folder / f"{name}.{os.getpid()}.partial"
        with open(os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        partial.rename(folder / name)
        self.unsaved = 0
        return SavedIndex(name, zlib.crc32(data), self.mark)

    @classmethod
    def load(cls, folder: Path, saved: SavedIndex, dimensions: int) -> VectorIndex | None:
        """Loads a saved index; None when the file is missing, of another version, or damaged."""
        if not saved.file.endswith(SUFFIX):
            return None
        try:
            data = (folder / saved.file).read_bytes()
        except OSError:
            return None
        if zlib.crc32(data) != saved.checksum:
            return None
        index = cls(dimensions)
        index._index.load(data)
        index.mark = saved.mark
        return index


def _stretched(vectors: NDArray[np.float16] | Vectors) -> NDArray[np.int8]:
    """Each vector scaled to int8."""
    wide = vectors.astype(np.float32)
    largest = np.abs(wide).max(axis=-1, keepdims=True)
    return np.asarray(np.rint(wide * (LARGEST / np.maximum(largest, np.finfo(np.float32).tiny))), np.int8)


def _new(dimensions: int) -> Index:
    return Index(
        ndim=dimensions,
        metric="cos",
        dtype="i8",
        expansion_add=EXPANSION_ADD,
        expansion_search=EXPANSION_SEARCH,
    )
