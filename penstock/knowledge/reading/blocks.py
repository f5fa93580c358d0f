"""What every reader produces: one text, and blocks that are ranges of it, in order and without overlap."""

from __future__ import annotations

from typing import Literal

import msgspec

Kind = Literal["heading", "prose", "lines"]


class Block(msgspec.Struct, frozen=True, array_like=True):
    """`lines` (code, tables, lists) is cut between lines, `prose` between sentences."""

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

    def extracted(self, title: str = "") -> Extracted:
        return Extracted("".join(self._parts), self.blocks, title)
