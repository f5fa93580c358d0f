"""The output of every reader: one text, and blocks that are ranges of it, in order and without overlap."""

from __future__ import annotations

from typing import Literal

import msgspec

from penstock.knowledge.entities import UnreadableDocument

Kind = Literal["heading", "prose", "lines"]


class Block(msgspec.Struct, frozen=True, array_like=True):
    """`lines` (code, tables, lists) is split between lines, `prose` between sentences."""

    kind: Kind
    start: int
    end: int
    level: int = 0
    """Of a heading: 1 is the outermost."""
    page: int | None = None


class Extracted(msgspec.Struct, array_like=True):
    """A document as it is cut into chunks."""

    text: str
    blocks: list[Block]
    title: str = ""


MOST_TEXT = 32 * 2**20
"""Maximum characters of a document. A file that expands to more is malicious, or cannot be searched anyway."""
MOST_BLOCKS = 200_000


def bounded(text: int, blocks: int) -> None:
    """Refuses documents above the size limits."""
    if text > MOST_TEXT or blocks > MOST_BLOCKS:
        raise UnreadableDocument(
            f"The document has more than {MOST_TEXT:,} characters or {MOST_BLOCKS:,} paragraphs; split it into parts."
        )


class BlockWriter:
    """Collects pieces of text as blocks, for readers whose text is not a range of their input."""

    def __init__(self) -> None:
        self._parts: list[str] = []
        self._length = 0
        self.blocks: list[Block] = []

    def add(self, kind: Kind, text: str, *, level: int = 0, page: int | None = None) -> None:
        if not text.strip():
            return
        start = self._length
        self._parts += (text, "\n\n")
        self._length += len(text) + 2
        self.blocks.append(Block(kind, start, start + len(text), level, page))
        bounded(self._length, len(self.blocks))

    def extracted(self, title: str = "") -> Extracted:
        return Extracted("".join(self._parts), self.blocks, title)
