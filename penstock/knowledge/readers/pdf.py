"""PDF through pypdf: the text of each page, in paragraphs with their page number."""

from __future__ import annotations

import io
import re

from penstock.errors import needs_extra
from penstock.knowledge.entities import UnreadableDocument
from penstock.knowledge.readers.blocks import BlockWriter, Extracted
from penstock.knowledge.readers.plain import kind_of, read_plain

_HYPHENATED = re.compile(r"(?<=[a-z])-\n(?=[a-z])")


def read_pdf(body: bytes) -> Extracted:
    try:
        from pypdf import PdfReader
    except ImportError as error:
        raise UnreadableDocument(f"Reading a PDF {needs_extra('knowledge')}.") from error

    out = BlockWriter()
    title = ""
    try:
        reader = PdfReader(io.BytesIO(body))
        if reader.is_encrypted and not reader.decrypt(""):
            raise UnreadableDocument("The PDF is protected with a password.")
        if reader.metadata is not None and isinstance(reader.metadata.title, str):
            title = _clean(reader.metadata.title).strip()
        for number, page in enumerate(reader.pages, start=1):
            text = _HYPHENATED.sub("", _clean(page.extract_text()))
            for block in read_plain(text).blocks:
                paragraph = text[block.start : block.end]
                out.add(kind_of(paragraph), paragraph, page=number)
    except (UnreadableDocument, MemoryError):
        raise
    except Exception as error:
        # The library raises arbitrary exceptions for damaged files, failed assertions among them.
        raise UnreadableDocument(f"The PDF cannot be read: {str(error)[:200] or type(error).__name__}.") from error
    if not out.blocks:
        raise UnreadableDocument("The PDF contains no text; a scan needs OCR first.")
    return out.extracted(title)


def _clean(text: str) -> str:
    """Fonts map letters to whatever they say, also to NUL and to halves of surrogates, which are no text."""
    return text.replace("\0", "").encode("utf-16", "surrogatepass").decode("utf-16", "replace")
