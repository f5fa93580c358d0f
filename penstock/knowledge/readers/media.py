"""Chooses the reader of a document by its media type or its name."""

from __future__ import annotations

import codecs
import re
from collections.abc import Callable
from pathlib import PurePosixPath

from penstock.knowledge.entities import UnreadableDocument
from penstock.knowledge.readers.blocks import Extracted, bounded
from penstock.knowledge.readers.html import read_html
from penstock.knowledge.readers.markdown import read_markdown
from penstock.knowledge.readers.pdf import read_pdf
from penstock.knowledge.readers.plain import read_plain

PDF = "application/pdf"
_READERS: dict[str, Callable[[str], Extracted]] = {
    "text/plain": read_plain,
    "text/markdown": read_markdown,
    "text/html": read_html,
}
MEDIA_TYPES = (*_READERS, PDF)
_SAME = {"text/x-markdown": "text/markdown", "application/xhtml+xml": "text/html", "application/x-pdf": PDF}
SUFFIXES = {
    ".md": "text/markdown",
    ".markdown": "text/markdown",
    ".html": "text/html",
    ".htm": "text/html",
    ".xhtml": "text/html",
    ".pdf": PDF,
    ".txt": "text/plain",
    ".text": "text/plain",
    ".rst": "text/markdown",
    ".log": "text/plain",
}
"""reStructuredText is read as Markdown: both may underline headings."""
_MARKS = ((codecs.BOM_UTF8, "utf-8-sig"), (codecs.BOM_UTF16_LE, "utf-16"), (codecs.BOM_UTF16_BE, "utf-16"))
_NO_CHARSETS = frozenset({"idna", "punycode", "raw-unicode-escape", "raw_unicode_escape", "undefined", "unicode-escape",
                          "unicode_escape"})  # fmt: skip
"""Encodings that Python knows and documents never have; some take quadratic time."""
_META = re.compile(rb"<meta[^>]{1,200}charset=[\"']?([A-Za-z0-9_-]{2,32})", re.I)


def media_type_of(said: str, name: str) -> str | None:
    """One of `MEDIA_TYPES`, or None; `said` may be empty or as vague as `application/octet-stream`."""
    kind = said.partition(";")[0].strip().lower()
    kind = _SAME.get(kind, kind)
    if kind in MEDIA_TYPES and kind != "text/plain":
        return kind
    by_name = SUFFIXES.get(PurePosixPath(name.lower()).suffix)
    if kind in ("", "application/octet-stream", "text/plain"):
        return by_name or ("text/plain" if kind == "text/plain" else None)
    return None


def read(body: bytes, media_type: str, charset: str = "") -> Extracted:
    """The text of a document; `UnreadableDocument` when it cannot be extracted."""
    if media_type == PDF:
        return read_pdf(body)
    found = _READERS[media_type](decoded(body, media_type, charset))
    bounded(len(found.text), len(found.blocks))
    if not found.blocks:
        raise UnreadableDocument("The document contains no text.")
    return found


def decoded(body: bytes, media_type: str = "text/plain", charset: str = "") -> str:
    """The characters of a document that is text; `UnreadableDocument` when it is not."""
    if not charset:
        charset = next((name for mark, name in _MARKS if body.startswith(mark)), "")
    if not charset and media_type == "text/html" and (meta := _META.search(body[:2048])):
        charset = meta[1].decode()
    try:
        if codecs.lookup(charset or "utf-8").name in _NO_CHARSETS:
            raise LookupError("an encoding, but of no documents")
        text = body.decode(charset or "utf-8")
    except (ValueError, LookupError) as error:
        raise UnreadableDocument(
            f"The document is not text in {charset or 'UTF-8'}; give its charset in the content type."
        ) from error
    if "\0" in text:
        raise UnreadableDocument("The document is not text: it contains NUL bytes.")
    return text.replace("\r\n", "\n").replace("\r", "\n")
