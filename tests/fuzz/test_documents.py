"""Whatever is uploaded as a document is read or refused with a reason, in bounded time and memory.

The promises, for every reader: the documented error or blocks that are ranges of the text, in order; chunks that lose
no word of the text, fit their limit and stand where they say. PDFs go through a real reader process, which must answer
every time and be there for the next document.
"""

from __future__ import annotations

import asyncio
import random
import zlib
from collections.abc import Sequence
from itertools import compress
from pathlib import Path

import pytest

from penstock.knowledge.chunker import CHARACTERS_PER_TOKEN, MOST_HEADING_TOKENS, chunk
from penstock.knowledge.entities import Chunk, UnreadableDocument
from penstock.knowledge.readers import MEDIA_TYPES, Extracted, read
from penstock.knowledge.readers.process import ReaderProcess
from penstock.knowledge.readers.worker import Task
from penstock.knowledge.terms import words
from tests.fuzz.harness import DURATIONS, QUICK_S, fuzz, mutate_bytes
from tests.knowledge.files import make_pdf
from tests.knowledge.test_readers import HTML, MARKDOWN

MOST, OVERLAP = 48, 8
CRASHED = "crashed its reader"
KINDS = {kind.encode(): kind for kind in MEDIA_TYPES}
PIECES: Sequence[bytes] = [
    b"<!--", b"-->", b"<![CDATA[", b"]]>", b"<p hidden>", b"<template>", b"</template>", b"<title>", b"<script>",
    b"</script>", b"<table><tr><td>", b"<li>", b"<pre>", b"<h2>", b"&#x110000;", b"&nbsp;", b"style='display:none'",
    b"# ", b"## a ##\n", b"---\n", b"===\n", b"```\n", b"~~~", b"> - 1. ", b"\n\n", b"\r", b"\x0c", b"\xe2\x80\xa8",
    b"\xff\xfe", b"\xef\xbb\xbf", b"<meta charset=utf-7>", b"<meta charset=punycode>", b". ", b'."', "。".encode(),
    b" " * 200, b"word " * 100,
]  # fmt: skip
PDF_PIECES: Sequence[bytes] = [
    b"obj", b"endobj", b"stream\n", b"endstream", b"/FlateDecode", b"/ASCII85Decode", b"/Filter [", b"/Length 0",
    b"/Kids [2 0 R]", b"/Parent 3 0 R", b"/Count 1000000", b"1 0 R", b"<<", b">>", b"xref", b"trailer", b"startxref\n0",
    b"/Encrypt 1 0 R", b"/Type /ObjStm", b"/Prev 0", b"BT", b"Tj", b"(" * 100, b"[" * 100, b"99999999999",
]  # fmt: skip


def seeds() -> list[bytes]:
    """A document each, after the name of its kind and a line break."""
    documents = Path(__file__).parents[2] / "docs"
    pages = [b"text/markdown\n" + path.read_bytes()[:8000] for path in sorted(documents.glob("*.md"))[:6]]
    packed = zlib.compress(b"BT /F1 12 Tf (lorem ipsum dolor) Tj T* (sit amet) Tj ET")
    pdf = make_pdf(["One page about seals.", "Another page-\nwise one."])
    return [
        b"text/html\n" + HTML.encode(),
        b"text/html\n<ul><li>a<ul><li>b</ul><dl><dt>c<dd>d</dl></ul><table><tr><td>x<td>y<tr><th>z</table>",
        b"text/markdown\n" + MARKDOWN.encode(),
        b"text/plain\n" + "Ein Satz. Noch einer!\n\n- Liste\n- länger\n\nc'est «fini»…\n".encode(),
        b"text/plain\n" + "文書。短い文。\n\n".encode() * 20,
        b"text/plain\n" + "Sixteen bits.".encode("utf-16"),
        b"application/pdf\n" + pdf,
        b"application/pdf\n" + pdf.replace(b"stream\n", b"stream\n" + packed, 1),
        *pages,
    ]


def mutate(data: bytes, rng: random.Random, pool: Sequence[bytes]) -> bytes:
    kind, _, body = data.partition(b"\n")
    if rng.random() < 0.1:
        kind = rng.choice(list(KINDS))
    body = mutate_bytes(body, rng, pool)
    pieces = PDF_PIECES if kind == b"application/pdf" else PIECES
    for _ in range(rng.randrange(4)):
        at, times = rng.randrange(len(body) + 1), rng.choice((1, 1, 1, 3, 100))
        body = body[:at] + rng.choice(pieces) * times + body[at:]
    return kind + b"\n" + body[: 1 << 17]


def count(text: str) -> int:
    return len(words(text))


def check_blocks(found: Extracted) -> None:
    at = 0
    for block in found.blocks:
        assert at <= block.start < block.end <= len(found.text), f"{block} after {at}, of {len(found.text)}"
        assert found.text[block.start : block.end].strip(), f"{block} is blank"
        at = block.end


def check_chunks(found: Extracted, chunks: list[Chunk]) -> None:
    for number, made in enumerate(chunks):
        assert made.ordinal == number and made.text == found.text[made.start : made.end]
        assert made.tokens == count(made.embedded)
        room = max(16, MOST - count(made.heading))
        assert count(made.text) <= max(room, 1) + 1, f"{count(made.text)} tokens, room for {room}"
        assert len(made.text) <= 2 * MOST * CHARACTERS_PER_TOKEN * CHARACTERS_PER_TOKEN
        assert count(made.heading) <= MOST_HEADING_TOKENS
    left = bytearray(b"\1") * len(found.text)
    for made in chunks:
        left[made.start : made.end] = bytes(made.end - made.start)
    for block in found.blocks:
        if block.kind != "heading":
            lost = "".join(compress(found.text[block.start : block.end], left[block.start : block.end]))
            assert not words(lost), f"words of {block} are in no chunk: {lost[:80]!r}"


@pytest.mark.parametrize("seconds", DURATIONS)
def test_every_document_is_read_or_refused(seconds: float) -> None:
    with asyncio.Runner() as loop:
        reader = ReaderProcess(time_limit_s=30)

        def run(data: bytes) -> None:
            name, _, body = data.partition(b"\n")
            kind = KINDS.get(name, "text/plain")
            if kind == "application/pdf":
                try:
                    loop.run(reader.read(Task(len(body), kind, "", "name", "", MOST, OVERLAP, 2000), body))
                except UnreadableDocument as error:
                    assert CRASHED not in str(error) and "could not be read within" not in str(error), error
                return
            try:
                found = read(body, kind)
            except UnreadableDocument:
                return
            check_blocks(found)
            check_chunks(found, chunk(found, count, most=MOST, overlap=OVERLAP, name="name"))

        try:
            report = fuzz("documents", run, seeds(), seconds=seconds, quick=100, limit_s=5.0, mutate=mutate)
        finally:
            loop.run(reader.close())
    assert seconds == QUICK_S or report.inputs > 50, "a busy machine may stop a quick run early"
