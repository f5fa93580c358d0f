"""The nouns of knowledge. A tenant owns collections, a collection holds documents, a document is cut into chunks."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from penstock.errors import PenstockError

DocumentStatus = Literal["queued", "processing", "ready", "failed", "duplicate"]
STATUSES: tuple[DocumentStatus, ...] = ("queued", "processing", "ready", "failed", "duplicate")
SearchMode = Literal["hybrid", "vector", "bm25"]


class KnowledgeError(PenstockError):
    """Something cannot be done as asked; the message says what, in words for the client."""


class UnreadableDocument(KnowledgeError):
    """The bytes are not what they are said to be, or hold no text."""


class CollectionExists(KnowledgeError):
    """The tenant has a collection of this name."""


class TooMany(KnowledgeError):
    """A limit of the configuration is reached."""


@dataclass(frozen=True, slots=True)
class Collection:
    """Documents of one tenant that are searched together, embedded by one model."""

    id: str
    tenant: str
    name: str
    description: str
    metadata: Mapping[str, str]
    embedding_model: str
    dimensions: int
    chunk_tokens: int
    overlap_tokens: int
    created_at: float


@dataclass(frozen=True, slots=True)
class Document:
    """What was uploaded, and how far it is."""

    collection: str
    id: str
    name: str
    url: str
    """Where people find the original; empty when nobody said."""
    media_type: str
    digest: str
    """SHA-256 of the content: the same content is not read twice."""
    size: int
    metadata: Mapping[str, str]
    status: DocumentStatus
    error: str = ""
    chunks: int = 0
    chunks_done: int = 0
    tokens: int = 0
    version: int = 1
    """Counts updates: work on an older version does not count."""
    duplicate_of: str = ""
    created_at: float = 0.0
    updated_at: float = 0.0


@dataclass(frozen=True, slots=True)
class Chunk:
    """A part of a document: `start` and `end` are characters of its extracted text, `page` that of a PDF."""

    ordinal: int
    heading: str
    """The headings it stands under, outermost first, joined with ` > `."""
    text: str
    start: int
    end: int
    page: int | None
    tokens: int

    @property
    def embedded(self) -> str:
        """What the embedding model reads: a passage without its headings often does not say what it is about."""
        return f"{self.heading}\n{self.text}" if self.heading else self.text


@dataclass(frozen=True, slots=True)
class StoredChunk:
    """A chunk as a store returns it. Keys are never used twice in a collection."""

    key: int
    document: str
    chunk: Chunk

    @property
    def id(self) -> str:
        return f"{CHUNK_PREFIX}{self.key}"


CHUNK_PREFIX = "chunk_"


@dataclass(frozen=True, slots=True)
class Passage:
    """A chunk that was found, where it is from, and why it is here."""

    stored: StoredChunk
    document: Document
    score: float
    scores: Mapping[str, float] = field(default_factory=dict)
    """What each step said: the similarity, BM25, the fused score, late interaction."""
