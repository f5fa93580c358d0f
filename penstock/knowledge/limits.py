"""How much a library may hold and do at once."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class LibraryLimits:
    """Bounds of the configuration."""

    collections: int = 1000
    """Of a tenant."""
    documents: int = 100_000
    """Of a collection."""
    waiting: int = 20_000
    """Documents of a tenant that wait to be read."""
    chunks: int = 20_000
    """Of a document."""
    readers: int = 2
