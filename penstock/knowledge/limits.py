"""Limits of collections and documents."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class LibraryLimits:
    """The configured limits."""

    collections: int = 1000
    """Of a tenant."""
    documents: int = 100_000
    """Of a collection."""
    waiting: int = 20_000
    """Documents of a tenant waiting to be ingested."""
    chunks: int = 20_000
    """Of a document."""
    readers: int = 2
