"""Passages for tests."""

from __future__ import annotations

from penstock.knowledge.entities import Chunk, Document, Passage, StoredChunk


def passage(
    text: str, *, key: int = 1, name: str = "handbook.md", heading: str = "", page: int | None = None
) -> Passage:
    document = Document("col_x", f"doc_{key}", name, "", "text/markdown", "", len(text), {}, "ready")
    return Passage(StoredChunk(key, document.id, Chunk(0, heading, text, 0, len(text), page, 0)), document, 1.0)
