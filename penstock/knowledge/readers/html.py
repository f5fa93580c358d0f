"""HTML: the visible text of the page. Scripts, styles and hidden elements are skipped: text that
people cannot see must not appear in an answer.

Every step takes time in proportion to what it reads, so that a page of any kind is read in linear time.
"""

from __future__ import annotations

import re
from collections import Counter
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
_MARKUP = re.compile(r"<[a-zA-Z/!?]")
_TITLE = 1024
"""Most characters of a title."""
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
    reader.feed(_finished(text))
    reader.close()
    reader.flush()
    return reader.out.extracted(" ".join("".join(reader.title).split())[:_TITLE])


def _finished(text: str) -> str:
    """The page without markup that never ends, of which a browser shows nothing. The parser would look for the end of
    each such piece in all that follows."""
    comment = text.find("<!--", text.rfind("-->") + 1)
    text = text if comment < 0 else text[:comment]
    tag = _MARKUP.search(text, text.rfind(">") + 1)
    return text if tag is None else text[: tag.start()]


class _Reader(HTMLParser):
    def __init__(self) -> None:
        super().__init__(convert_charrefs=True)
        self.out = BlockWriter()
        self.title: list[str] = []
        self._in_title = False
        self._words: list[str] = []
        self._said = False
        """Whether any of the words is not blank."""
        self._lines: list[str] = []
        """Of the list or table that is open."""
        self._heading = 0
        self._literal = 0
        self._skipped: list[str] = []
        """Open elements from the outermost that is not shown inwards."""
        self._open: Counter[str] = Counter()
        """How many of them are of each kind."""

    def parse_marked_section(self, i: int, report: int = 1) -> int:
        """`<![` is a comment up to the next `>`, as in browsers. The library's own reading ends in an assertion."""
        return self.parse_bogus_comment(i, bool(report))

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag == "title":
            self._in_title = True
        if self._skipped:
            if tag in _CLOSED_BY.get(self._skipped[-1], ()):
                self._unskip()
            if self._skipped:
                if tag not in _VOID:
                    self._skip(tag)
                return
        if tag not in _VOID and (tag in _SKIPPED or _hidden(dict(attrs))):
            self._skip(tag)
        elif tag == "br":
            self._words.append("\n" if self._literal else " ")
        elif tag in ("td", "th"):
            if self._said:
                self._words.append(" | ")
        elif tag in ("li", "tr"):
            self._line()
            if tag == "li":
                self._words.append("- ")
                self._said = True
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
            if self._open[tag]:
                while self._unskip() != tag:
                    pass
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
            self.title.append(data)
        elif not self._skipped:
            self._words.append(data if self._literal else _SPACE.sub(" ", data))
            self._said = self._said or not data.isspace()

    def _skip(self, tag: str) -> None:
        self._skipped.append(tag)
        self._open[tag] += 1

    def _unskip(self) -> str:
        tag = self._skipped.pop()
        self._open[tag] -= 1
        return tag

    def flush(self, kind: Kind = "prose") -> None:
        """Ends the open block."""
        if self._lines:
            self._line()
            self.out.add("lines", "\n".join(self._lines))
            self._lines = []
        text = "".join(self._words)
        text = text.strip("\n") if kind == "lines" else _SPACE.sub(" ", text).strip()
        self._forget_words()
        if self._heading:
            if text:
                self.out.add("heading", text, level=self._heading)
                if self._heading == 1 and not self.title:
                    self.title.append(text)
            self._heading = 0
        else:
            self.out.add(kind, text)

    def _line(self) -> None:
        text = _SPACE.sub(" ", "".join(self._words)).strip()
        if text and text != "-":
            self._lines.append(text)
        self._forget_words()

    def _forget_words(self) -> None:
        self._words.clear()
        self._said = False


def _hidden(attributes: dict[str, str | None]) -> bool:
    return (
        "hidden" in attributes
        or attributes.get("aria-hidden") == "true"
        or bool(_HIDDEN.search(attributes.get("style") or ""))
    )


def _level(tag: str) -> int:
    return int(tag[1]) if len(tag) == 2 and tag[0] == "h" and tag[1] in "123456" else 0
