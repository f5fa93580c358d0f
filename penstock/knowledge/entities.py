"""The entities of knowledge. A tenant owns collections, a collection has documents, a document is split into chunks."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from penstock.errors import PenstockError

DocumentStatus = Literal["queued", "processing", "ready", "failed", "duplicate", "cancelled"]
STATUSES: tuple[DocumentStatus, ...] = ("queued", "processing", "ready", "failed", "duplicate", "cancelled")
Attribute = str | bool | int | float
"""A value of a document's metadata; searches may be restricted by them."""
SERVER_FAILED = "The server failed on this document; its log says why."
"""The error of a document that failed through no fault of its own."""
DAY_S = 86400.0
SearchMode = Literal["hybrid", "vector", "bm25"]


class KnowledgeError(PenstockError):
    """A request about collections cannot be fulfilled; the message is for the client."""


class UnreadableDocument(KnowledgeError):
    """The content does not match its media type, or contains no text."""


class CollectionExists(KnowledgeError):
    """The tenant already has a collection with this name."""


class TooMany(KnowledgeError):
    """A configured limit is reached."""


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
    title: str = ""
    """What people call it, if that is not its name: any text, and not unique."""
    expires_days: int = 0
    """Days without use after which its documents are deleted; 0: never."""
    last_active_at: float = 0.0
    """When it was last searched or written to, to the minute; 0 where that was never recorded."""

    @property
    def used_at(self) -> float:
        return self.last_active_at or self.created_at

    @property
    def expires_at(self) -> float | None:
        return self.used_at + self.expires_days * DAY_S if self.expires_days else None


@dataclass(frozen=True, slots=True)
class Document:
    """An uploaded document and its ingestion state."""

    collection: str
    id: str
    name: str
    url: str
    """URL of the original; may be empty."""
    media_type: str
    digest: str
    """SHA-256 of the content: the same content is not ingested twice."""
    size: int
    metadata: Mapping[str, Attribute]
    status: DocumentStatus
    error: str = ""
    chunks: int = 0
    chunks_done: int = 0
    tokens: int = 0
    version: int = 1
    """Incremented with every update: work on an older version is discarded."""
    duplicate_of: str = ""
    created_at: float = 0.0
    updated_at: float = 0.0
    chunk_tokens: int = 0
    """Size of its chunks; 0: that of its collection."""
    overlap_tokens: int = 0


@dataclass(frozen=True, slots=True)
class Chunk:
    """A part of a document: `start` and `end` are positions in its extracted text, `page` is the page of a PDF."""

    ordinal: int
    heading: str
    """The headings above it, outermost first, joined with ` > `."""
    text: str
    start: int
    end: int
    page: int | None
    tokens: int

    @property
    def embedded(self) -> str:
        """The text to embed, with headings: without them a passage often does not say what it is about."""
        return f"{self.heading}\n{self.text}" if self.heading else self.text


@dataclass(frozen=True, slots=True)
class StoredChunk:
    """A chunk as a store returns it. Keys are never reused in a collection."""

    key: int
    document: str
    chunk: Chunk

    @property
    def id(self) -> str:
        return f"{CHUNK_PREFIX}{self.key}"


CHUNK_PREFIX = "chunk_"


@dataclass(frozen=True, slots=True)
class Passage:
    """A retrieved chunk with its document and scores."""

    stored: StoredChunk
    document: Document
    score: float
    scores: Mapping[str, float] = field(default_factory=dict)
    """Scores by step: similarity, BM25, fused score, late interaction."""
