"""Patterns over streams: the same result however the text was cut, and never a part of a match."""

from __future__ import annotations

import itertools
import re
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.errors import ConfigError
from penstock.text.pattern_filter import LONGEST, Deadline, StreamFilter, TextPattern, TooSlow

SOON = Deadline(1e6)
PATTERNS = {
    "words": TextPattern.of_words(("secret", "secretary", "bad word")),
    "number": TextPattern(r"\b\d{3}-\d{2}-\d{4}\b"),
    "unbounded": TextPattern(r"sk-[a-z0-9]+"),
    "alternatives": TextPattern(r"ab|abcd|bcx"),
    "ahead": TextPattern(r"foo(?!bar)"),
    "end": TextPattern(r"(?:the end|\Abegin)$"),
    "lazy": TextPattern(r"<.+?>"),
}
TEXTS = [
    "my secret is no secretary; BAD WORD, badword secre",
    "call 123-45-6789, not 123-45-67890 or 9123-45-6789; 123-45-6789",
    "key sk-abc123 and sk- and sk-9",
    "abcd ab bcx abcx xabcdab",
    "foobar foo fool foo",
    "the end\nthe end",
    "begin",
    "a <b> c <d <e>> f <",
]


def run(pattern: TextPattern, pieces: list[str], replacement: str | None) -> tuple[str, bool, list[str]]:
    stream = StreamFilter(pattern, replacement)
    shown: list[str] = []
    for piece in pieces:
        text, ended = stream.push(piece)
        shown.append(text)
        if ended:
            return "".join(shown), True, shown
    text, ended = stream.push("", final=True)
    return "".join([*shown, text]), ended, [*shown, text]


@pytest.mark.parametrize("name", PATTERNS)
@pytest.mark.parametrize("text", TEXTS)
def test_every_way_to_cut_a_text_gives_what_the_whole_text_gives(
    name: str, text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("penstock.text.pattern_filter.PUSH_S", 60.0)  # a busy machine may stand still for longer
    pattern = PATTERNS[name]
    redacted = pattern.compiled.sub("#", text)
    first = pattern.compiled.search(text)
    kept = (text, False) if first is None else (text[: first.start()], True)
    cuts = [[text[:i], text[i:]] for i in range(len(text) + 1)]
    cuts += [[text[:i], text[i:j], text[j:]] for i, j in itertools.combinations(range(0, len(text), 2), 2)]
    cuts.append(list(text))
    for pieces in cuts:
        assert run(pattern, pieces, "#")[0] == redacted, pieces
        whole, ended, shown = run(pattern, pieces, None)
        assert (whole, ended) == kept, pieces
        for count in range(len(shown)):  # what was shown at any moment is a beginning of what may be shown
            assert kept[0].startswith("".join(shown[:count]))


@given(
    st.text(alphabet="secrtay -0123456789kab<>\nfo", max_size=120),
    st.lists(st.integers(1, 7), max_size=60),
    st.sampled_from(sorted(PATTERNS)),
)
def test_cuts_do_not_matter(text: str, sizes: list[int], name: str) -> None:
    pieces, rest = [], text
    for size in sizes:
        pieces.append(rest[:size])
        rest = rest[size:]
    for replacement in ("#", None):
        assert run(PATTERNS[name], [*pieces, rest], replacement)[:2] == run(PATTERNS[name], [text], replacement)[:2]


def test_text_is_held_back_only_while_a_match_may_be_under_way() -> None:
    stream = StreamFilter(PATTERNS["number"], "#")
    assert stream.push("call ") == ("call ", False)
    assert stream.push("12")[0] == ""
    assert stream.push("x now")[0] == "12x now"
    assert stream.push(" 123-45-6789")[0] == " "
    assert stream.push(" is it") == ("# is it", False)


def test_a_pattern_without_a_longest_match_holds_back_a_bounded_text() -> None:
    stream = StreamFilter(TextPattern(r"<.*>"), "#")
    shown = "".join(stream.push("<" + "x" * 9)[0] for _ in range(100))
    assert 1000 - len(shown) <= LONGEST


def test_a_pattern_that_never_ends_refuses_instead_of_hanging() -> None:
    pattern = TextPattern(r"(?:a|a|aa)+c")
    text = "a" * 80 + "b"
    assert StreamFilter(pattern, "#").push(text, final=True)[1]
    with pytest.raises(TooSlow):
        pattern.found(text, Deadline(0.05))


def test_a_piece_of_a_stream_takes_a_bounded_time_however_many_positions_it_has() -> None:
    """Each position is quick enough alone; together they would take seconds."""
    stream = StreamFilter(TextPattern(r"(?:a|a|aa){6,14}c"), "#")
    begun = time.thread_time()
    _, ended = stream.push("a" * 4_000)
    assert ended and time.thread_time() - begun < 0.5


@pytest.mark.parametrize("source", ["(", "a*", "(?r)abc", ""])
def test_patterns_that_cannot_work_are_refused(source: str) -> None:
    with pytest.raises(ConfigError):
        TextPattern(source)


def test_words_are_literal_and_whole() -> None:
    pattern = TextPattern.of_words(("a.b", "c++"))
    assert pattern.found("see A.B!", SOON) and pattern.found("c++", SOON)
    assert not pattern.found("axb c+ ca.b", SOON)
    assert re.escape("c++") in pattern.compiled.pattern
