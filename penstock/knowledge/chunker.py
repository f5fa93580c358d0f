"""Splits extracted text into chunks along the document's own structure, up to a size that suits the embedding model.

A chunk never spans two sections or pages. Inside a section whole blocks are packed together; only a block that is too
large is split: prose between sentences, code and tables between lines, anything else between words. Neighbours split
from one block share up to `overlap` tokens. Sizes are counted with the given tokenizer, on the text that is embedded;
only short texts are counted, so that time and memory grow with the document, whatever is in it.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from penstock.knowledge.entities import Chunk, UnreadableDocument
from penstock.knowledge.readers import Block, Extracted

Count = Callable[[str], int]
MOST_HEADING_TOKENS = 48
CHARACTERS_PER_TOKEN = 32
"""Text with more characters than this per token is too long, however few tokens it has: to some tokenizers a word
without end is a single unknown token, and some characters are none."""
HEADING_CHARACTERS = 1024
_SENTENCE = re.compile(r"(?<=[.!?…。！？])[\"'”’)\]]*\s+|\n{2,}")
_LINE = re.compile(r"\n")
_WORDS = re.compile(r"\s+")


class TooManyChunks(UnreadableDocument):
    """A document that would fill the index."""


@dataclass(frozen=True, slots=True)
class _Atom:
    """The smallest unit of packing: a range of the text and its size."""

    start: int
    end: int
    tokens: int
    page: int | None
    block: int


@dataclass(slots=True)
class _Section:
    heading: str
    blocks: list[Block]


def chunk(
    extracted: Extracted, count: Count, *, most: int, overlap: int = 0, name: str = "", most_chunks: int | None = None
) -> list[Chunk]:
    """`most`: maximum tokens of a chunk with its headings. `name`: used as the title if the document has none.
    `most_chunks`: `TooManyChunks` when there are more."""
    chunks: list[Chunk] = []
    for section in _sections(extracted, name):
        heading = _fitting(section.heading, count)
        room = max(16, most - (count(heading) if heading else 0))
        atoms = [
            atom
            for number, block in enumerate(section.blocks)
            for atom in _atoms(extracted.text, block, number, count, room)
        ]
        for group in _packed(atoms, room, overlap):
            text = extracted.text[group[0].start : group[-1].end]
            made = Chunk(len(chunks), heading, text, group[0].start, group[-1].end, group[0].page, 0)
            chunks.append(Chunk(made.ordinal, heading, text, made.start, made.end, made.page, count(made.embedded)))
            if most_chunks is not None and len(chunks) > most_chunks:
                raise TooManyChunks(f"The document has more than {most_chunks} chunks; split it into parts.")
    return chunks


def _sections(extracted: Extracted, name: str) -> Iterator[_Section]:
    title = (extracted.title or name)[:HEADING_CHARACTERS]
    path: list[tuple[int, str]] = []
    section = _Section(title, [])
    for block in extracted.blocks:
        if block.kind != "heading":
            section.blocks.append(block)
            continue
        if section.blocks:
            yield section
        path = [(level, text) for level, text in path if level < block.level]
        end = min(block.end, block.start + HEADING_CHARACTERS)
        path.append((block.level, " ".join(extracted.text[block.start : end].split())))
        names = [text for _, text in path]
        section = _Section(" > ".join(names if names[0] == title or not title else [title, *names]), [])
    if section.blocks:
        yield section


def _fitting(heading: str, count: Count) -> str:
    """A heading path that leaves room for text: the outermost parts are dropped first."""
    while count(heading) > MOST_HEADING_TOKENS:
        _, parted, rest = heading.partition(" > ")
        heading = rest if parted else heading[: len(heading) // 2]
    return heading


def _atoms(text: str, block: Block, number: int, count: Count, room: int) -> Iterator[_Atom]:
    """A block as one atom, or as several that fit."""
    separators = (_LINE, _SENTENCE, _WORDS) if block.kind == "lines" else (_SENTENCE, _LINE, _WORDS)
    for start, end, tokens in _split(text, block.start, block.end, count, room, separators):
        yield _Atom(start, end, tokens, block.page, number)


def _split(
    text: str, start: int, end: int, count: Count, room: int, separators: Sequence[re.Pattern[str]]
) -> Iterator[tuple[int, int, int]]:
    tokens = count(text[start:end]) if end - start <= room * CHARACTERS_PER_TOKEN else room + 1
    if tokens <= room:
        yield start, end, tokens
        return
    if not separators:
        middle = (start + end) // 2  # a single very long word
        if middle == start:
            yield start, end, tokens
            return
        yield from _split(text, start, middle, count, room, ())
        yield from _split(text, middle, end, count, room, ())
        return
    if separators[0] is _WORDS:
        # Words are many and small: split in the middle instead of counting each.
        middle = (start + end) // 2
        gap = _WORDS.search(text, middle, end) or _last_gap(text, start, middle)
        if gap is None or gap.end() >= end:
            yield from _split(text, start, end, count, room, ())
        else:
            yield from _split(text, start, gap.start(), count, room, separators)
            yield from _split(text, gap.end(), end, count, room, separators)
        return
    at = start
    for gap in separators[0].finditer(text, start, end):
        if gap.start() > at:
            yield from _split(text, at, gap.start(), count, room, separators[1:])
        at = gap.end()
    if at < end:
        yield from _split(text, at, end, count, room, separators[1:])


def _last_gap(text: str, start: int, end: int) -> re.Match[str] | None:
    found = None
    for gap in _WORDS.finditer(text, start + 1, end):
        found = gap
    return found


def _packed(atoms: Sequence[_Atom], room: int, overlap: int) -> Iterator[list[_Atom]]:
    """Groups of neighbours of at most `room` tokens; a split inside a block repeats the end of the previous group."""
    group: list[_Atom] = []
    size = 0
    for atom in atoms:
        full = size + atom.tokens > room or (group and atom.end - group[0].start > room * CHARACTERS_PER_TOKEN)
        if group and (full or atom.page != group[-1].page):
            yield group
            longest = min(overlap * CHARACTERS_PER_TOKEN, room * CHARACTERS_PER_TOKEN - (atom.end - atom.start))
            repeated = group[-1].block == atom.block
            group = _tail(group, min(overlap, room - atom.tokens), longest) if repeated else []
            size = sum(kept.tokens for kept in group)
        group.append(atom)
        size += atom.tokens
    if group:
        yield group


def _tail(group: Sequence[_Atom], most: int, longest: int) -> list[_Atom]:
    """The last atoms of a group: at most `most` tokens and `longest` characters, never all of it."""
    kept: list[_Atom] = []
    for atom in reversed(group):
        most -= atom.tokens
        if most < 0 or group[-1].end - atom.start > longest or len(kept) + 1 == len(group):
            break
        kept.insert(0, atom)
    return kept
