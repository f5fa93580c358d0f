"""The interface of chunk stores. Each collection has its own tables, so other tenants' words affect neither its
statistics nor the speed of its searches."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from typing import TYPE_CHECKING

from penstock.knowledge.entities import Chunk, Collection, StoredChunk

if TYPE_CHECKING:
    from penstock.knowledge.embedder import Vectors

Ranked = list[tuple[int, float]]
"""Keys with scores, best first."""


@dataclass(frozen=True, slots=True)
class EmbeddedChunk:
    """A chunk with its vectors; `late` are its token vectors, packed by `late_interaction.pack`."""

    chunk: Chunk
    vector: Vectors
    late: bytes


class ChunkStore(ABC):
    """The chunks of one collection."""

    @abstractmethod
    async def replace(self, document: str, chunks: Sequence[EmbeddedChunk]) -> None:
        """Replaces the chunks of a document atomically; an empty list removes them."""

    @abstractmethod
    async def nearest(self, vector: Vectors, count: int, among: Sequence[str] | None = None) -> Ranked:
        """By cosine similarity. `among`: only chunks of these documents."""

    @abstractmethod
    async def matching(self, terms: Sequence[str], count: int, among: Sequence[str] | None = None) -> Ranked:
        """By words: BM25 or the store's closest equivalent. `among`: only chunks of these documents."""

    @abstractmethod
    async def fetch(self, keys: Sequence[int]) -> dict[int, StoredChunk]:
        """The chunks that still exist."""

    @abstractmethod
    async def late(self, keys: Sequence[int]) -> dict[int, bytes]:
        """Packed token vectors."""

    @abstractmethod
    async def frequencies(self, terms: Sequence[str]) -> tuple[list[int], int]:
        """The number of chunks with each term, and the total number of chunks."""

    @abstractmethod
    async def of_document(self, document: str) -> list[StoredChunk]:
        """In the order of the text."""


class ChunkStores(ABC):
    """Opens the stores of collections."""

    @abstractmethod
    def use(self, collection: Collection) -> AbstractAsyncContextManager[ChunkStore]:
        """The store of a collection, created if needed, and kept open while in use."""

    @abstractmethod
    async def drop(self, collection: Collection) -> None:
        """Deletes everything that a collection has stored."""

    @abstractmethod
    async def close(self) -> None: ...
