"""HTML: the visible text of the page. Scripts, styles and hidden elements are skipped: text that
people cannot see must not appear in an answer."""

from __future__ import annotations

import re
from html.parser import HTMLParser

from penstock.knowledge.readers.blocks import BlockWriter, Extracted, Kind

_WORDS = {
    "void": "area base br col embed hr img input link meta param source track wbr",
    "skipped": "script style template noscript svg math head iframe object select button textarea",
    "blocks": """address article aside blockquote body dd details dialog div dl dt fieldset figcaption figure footer
        form header hr html li main nav ol p pre section summary table tbody tfoot thead tr ul""",
}
_VOID, _SKIPPED, _BLOCKS = (frozenset(_WORDS[kind].split()) for kind in ("void", "skipped", "blocks"))
_HIDDEN = re.compile(
    r"display\s*:\s*none|visibility\s*:\s*hidden|font-size\s*:\s*0(?![.\d])|opacity\s*:\s*0(?![.\d])", re.I
)
_SPACE = re.compile(r"\s+")
_CLOSED_BY = {
    "li": {"li"},
    "dt": {"dt", "dd"},
    "dd": {"dt", "dd"},
    "p": _BLOCKS | {"p"},
    "tr": {"tr"},
    "td": {"td", "th", "tr"},
}
"""Elements whose end tag may be left out, and what ends them; needed only to close one that is hidden."""


def read_html(text: str) -> Extracted:
    reader = _Reader()
    reader.feed(text)
    reader.close()
    reader.flush()
    return reader.out.extracted(reader.title.strip())


class _Reader(HTMLParser):
    def __init__(self) -> None:
        super().__init__(convert_charrefs=True)
        self.out = BlockWriter()
        self.title = ""
        self._in_title = False
        self._words: list[str] = []
        self._lines: list[str] = []
        """Of the list or table that is open."""
        self._heading = 0
        self._literal = 0
        self._skipped: list[str] = []
        """Open elements from the outermost that is not shown inwards."""

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag == "title":
            self._in_title = True
        if self._skipped:
            if tag in _CLOSED_BY.get(self._skipped[-1], ()):
                self._skipped.pop()
            if self._skipped:
                if tag not in _VOID:
                    self._skipped.append(tag)
                return
        if tag not in _VOID and (tag in _SKIPPED or _hidden(dict(attrs))):
            self._skipped.append(tag)
        elif tag == "br":
            self._words.append("\n" if self._literal else " ")
        elif tag in ("td", "th"):
            if "".join(self._words).strip():
                self._words.append(" | ")
        elif tag in ("li", "tr"):
            self._line()
            if tag == "li":
                self._words.append("- ")
        elif _level(tag):
            self.flush()
            self._heading = _level(tag)
        elif tag in _BLOCKS:
            # A list inside a list, or a paragraph inside an item, goes on with the same block.
            self._line() if self._lines else self.flush()
            if tag == "pre":
                self._literal += 1

    def handle_endtag(self, tag: str) -> None:
        if tag == "title":
            self._in_title = False
        if self._skipped:
            if tag in self._skipped:
                del self._skipped[len(self._skipped) - 1 - self._skipped[::-1].index(tag) :]
            return
        if tag in ("li", "tr"):
            self._line()
        elif _level(tag):
            self.flush()
        elif tag == "pre":
            self._literal = max(0, self._literal - 1)
            self.flush("lines")
        elif tag in ("ul", "ol", "table", "dl") or (tag in _BLOCKS and not self._lines):
            self._line() if self._lines else self.flush()
            if tag in ("ul", "ol", "table", "dl"):
                self.flush()

    def handle_data(self, data: str) -> None:
        if self._in_title:
            self.title += data
        elif not self._skipped:
            self._words.append(data if self._literal else _SPACE.sub(" ", data))

    def flush(self, kind: Kind = "prose") -> None:
        """Ends the open block."""
        if self._lines:
            self._line()
            self.out.add("lines", "\n".join(self._lines))
            self._lines = []
        text = "".join(self._words)
        text = text.strip("\n") if kind == "lines" else _SPACE.sub(" ", text).strip()
        self._words.clear()
        if self._heading:
            if text:
                self.out.add("heading", text, level=self._heading)
                self.title = self.title or (text if self._heading == 1 else "")
            self._heading = 0
        else:
            self.out.add(kind, text)

    def _line(self) -> None:
        text = _SPACE.sub(" ", "".join(self._words)).strip()
        if text and text != "-":
            self._lines.append(text)
        self._words.clear()


def _hidden(attributes: dict[str, str | None]) -> bool:
    return (
        "hidden" in attributes
        or attributes.get("aria-hidden") == "true"
        or bool(_HIDDEN.search(attributes.get("style") or ""))
    )


def _level(tag: str) -> int:
    return int(tag[1]) if len(tag) == 2 and tag[0] == "h" and tag[1] in "123456" else 0
