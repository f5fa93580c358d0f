"""Markdown: headings of both kinds, fenced code, everything else as paragraphs. Blocks are ranges of the source, so
positions are those in the file."""

from __future__ import annotations

import re

from penstock.knowledge.readers.blocks import Block, Extracted
from penstock.knowledge.readers.plain import kind_of

_ATX = re.compile(r" {0,3}(#{1,6})(?=[ \t]|$)")
_UNDERLINE = re.compile(r" {0,3}(=+|-{2,})[ \t]*$")
_FENCE = re.compile(r" {0,3}(`{3,}|~{3,})")
_LINE = re.compile(r"[^\r\n]*(?:\r\n|\r|\n)|[^\r\n]+")
"""Form feeds and the like do not end a line of Markdown."""
_FRONT_MATTER = re.compile(r"---\n.*?\n(?:---|\.\.\.)(?:\n|\Z)", re.DOTALL)


def read_markdown(text: str) -> Extracted:
    blocks: list[Block] = []
    title = ""
    start: int | None = None  # where the paragraph that is open begins
    lines = 0  # how many it has
    fence = ""
    at = match.end() if (match := _FRONT_MATTER.match(text)) else 0
    for line in _LINE.findall(text, at):
        here, at = at, at + len(line)
        bare = line.rstrip("\r\n")
        if fence:
            if bare.strip().startswith(fence) and not bare.strip().strip(fence[0]):
                blocks.append(Block("lines", start or 0, here + len(bare)))
                fence, start = "", None
            continue
        if opening := _FENCE.match(bare):
            _close(text, blocks, start, here)
            fence, start = opening[1], here
        elif heading := _ATX.match(bare):
            _close(text, blocks, start, here)
            start = None
            begin, end = _heading_text(bare, heading.end())
            if bare[begin:end].strip():
                level = len(heading[1])
                blocks.append(Block("heading", here + begin, here + end, level))
                title = title or (bare[begin:end] if level == 1 else "")
        elif start is not None and lines == 1 and (line_under := _UNDERLINE.match(bare)):
            level = 1 if line_under[1][0] == "=" else 2
            found = text[start:here].strip()
            begin = text.index(found, start)
            blocks.append(Block("heading", begin, begin + len(found), level))
            title = title or (found if level == 1 else "")
            start = None
        elif not bare.strip():
            _close(text, blocks, start, here)
            start = None
        elif start is None:
            start, lines = here, 1
        else:
            lines += 1
    if fence:
        blocks.append(Block("lines", start or 0, len(text.rstrip())))
    else:
        _close(text, blocks, start, len(text))
    return Extracted(text, blocks, title)


def _heading_text(line: str, start: int) -> tuple[int, int]:
    """Where the text of a heading is in its line, without the number signs that may close it."""
    text = line[start:].rstrip(" \t")
    if (closed := text.rstrip("#")) != text and closed[-1:] in ("", " ", "\t"):
        text = closed.rstrip(" \t")
    return len(line) - len(line[start:].lstrip(" \t")), start + len(text)


def _close(text: str, blocks: list[Block], start: int | None, end: int) -> None:
    if start is not None:
        found = text[start:end].rstrip()
        blocks.append(Block(kind_of(found), start, start + len(found)))
