"""What a store of chunks offers. Each collection has tables of its own: other tenants' words are neither in its
statistics nor in the way of its searches."""

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
    """A chunk with its vectors; `late` is what `late.pack` made of its tokens' vectors."""

    chunk: Chunk
    vector: Vectors
    late: bytes


class ChunkStore(ABC):
    """The chunks of one collection."""

    @abstractmethod
    async def replace(self, document: str, chunks: Sequence[EmbeddedChunk]) -> None:
        """Make these the chunks of a document: all of them or, when it fails, none. None given: remove them."""

    @abstractmethod
    async def nearest(self, vector: Vectors, count: int) -> Ranked:
        """By cosine similarity."""

    @abstractmethod
    async def matching(self, terms: Sequence[str], count: int) -> Ranked:
        """By words: BM25 or what the store has nearest to it."""

    @abstractmethod
    async def fetch(self, keys: Sequence[int]) -> dict[int, StoredChunk]:
        """Those that (still) exist."""

    @abstractmethod
    async def late(self, keys: Sequence[int]) -> dict[int, bytes]:
        """Packed token vectors."""

    @abstractmethod
    async def frequencies(self, terms: Sequence[str]) -> tuple[list[int], int]:
        """In how many chunks each term is, and how many chunks there are."""

    @abstractmethod
    async def of_document(self, document: str) -> list[StoredChunk]:
        """In the order of the text."""


class ChunkStores(ABC):
    """Opens the stores of collections."""

    @abstractmethod
    def use(self, collection: Collection) -> AbstractAsyncContextManager[ChunkStore]:
        """The store, made when it does not exist, and open for as long as it is in use."""

    @abstractmethod
    async def drop(self, collection: Collection) -> None:
        """Remove everything a collection has stored."""

    @abstractmethod
    async def close(self) -> None: ...
