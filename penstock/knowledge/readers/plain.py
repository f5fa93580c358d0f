"""Plain text: paragraphs are separated by blank lines."""

from __future__ import annotations

import re

from penstock.knowledge.readers.blocks import Block, Extracted, Kind

_PARAGRAPH = re.compile(r"\S[^\n]*(?:\n[^\n]*\S[^\n]*)*")
_INDENTED = re.compile(r"(?:[ \t]|[-*+•|>] |\d+[.)] )")


def read_plain(text: str) -> Extracted:
    return Extracted(text, [Block(kind_of(match[0]), *match.span()) for match in _PARAGRAPH.finditer(text)])


def kind_of(paragraph: str) -> Kind:
    """`lines` if line breaks matter: a paragraph with indented lines or bullets is a list, code or table."""
    lines = paragraph.split("\n")
    special = sum(1 for line in lines if _INDENTED.match(line))
    return "lines" if len(lines) > 1 and special * 2 >= len(lines) else "prose"
