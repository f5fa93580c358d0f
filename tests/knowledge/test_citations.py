"""Citations are found wherever a stream is cut; attributed ones are added, and nothing else is changed."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.knowledge.citations import Citation, Citer
from penstock.knowledge.passage_prompt import Source
from tests.knowledge.nouns import passage

SOURCES = [
    Source(1, passage("Parents receive twelve weeks of paid leave after a birth."), ""),
    Source(2, passage("The office opens at eight and closes at six."), ""),
]
SOURCES = [Source(one.number, one.passage, one.passage.stored.chunk.text) for one in SOURCES]


def read(pieces: Sequence[str], *, attribute: bool = True) -> tuple[str, list[Citation]]:
    citer = Citer(SOURCES, attribute=attribute)
    said = [citer.push(piece) for piece in pieces]
    said.append(citer.push("", final=True))
    return "".join(text for text, _ in said), [one for _, found in said for one in found]


def cited(pieces: Sequence[str], *, attribute: bool = True) -> tuple[str, list[tuple[int, str, str]]]:
    text, found = read(pieces, attribute=attribute)
    return text, [(one.source.number, text[one.start : one.end], one.origin) for one in found]


def test_the_models_own_numbers_are_resolved() -> None:
    text = "Twelve weeks [1]. It opens at eight [2, 1] and more [7]."
    assert cited([text], attribute=False) == (
        text,
        [(1, "[1]", "model"), (2, "[2, 1]", "model"), (1, "[2, 1]", "model")],
    )


def test_a_sentence_that_comes_from_a_source_gets_its_number() -> None:
    said, found = cited(
        ["Parents receive twelve weeks of paid leave. Hello there my friend. The office opens at eight!"]
    )
    assert (
        said == "Parents receive twelve weeks of paid leave. [1] Hello there my friend. The office opens at eight! [2]"
    )
    assert found == [(1, "[1]", "attributed"), (2, "[2]", "attributed")]


def test_a_sentence_with_a_number_gets_no_other() -> None:
    for text in (
        "Parents receive twelve weeks of paid leave [2]. And so on it goes.",
        "Parents receive twelve weeks of paid leave. [2] And so on it goes.",
        "Parents receive twelve weeks of paid leave.[2]\nAnd so on it goes.",
    ):
        assert cited([text]) == (text, [(2, "[2]", "model")])


def test_lines_are_sentences_too() -> None:
    said, _ = cited(["- twelve weeks paid leave for parents\n- office opens at eight\n"])
    assert said == "- twelve weeks paid leave for parents [1]\n- office opens at eight [2]\n"


def test_repeating_the_question_is_no_citation() -> None:
    def said(text: str) -> str:
        return Citer(SOURCES, attribute=True, question="When does the office open?").push(text, final=True)[0]

    assert said("The answer: when does the office open?") == "The answer: when does the office open?"
    assert said("You asked when the office opens.") == "You asked when the office opens."
    assert said("The office opens at eight.") == "The office opens at eight. [2]"


def test_abbreviations_and_numbers_end_nothing() -> None:
    text = "Parents receive e.g. twelve weeks 3.5 of paid leave"
    assert cited([text])[0] == text + " [1]"


def test_nothing_is_held_back_but_white_space() -> None:
    citer = Citer(SOURCES, attribute=True)
    assert citer.push("The office opens at eight.")[0] == "The office opens at eight."
    assert citer.push(" ")[0] == ""
    assert citer.push("And")[0] == " [2] And"


TEXTS = [
    "Parents receive twelve weeks of paid leave. [1] The office opens at eight.\n\n- closes at six\n- [2] see",
    "Well. Yes [1][2] no. [ 1 ] office opens eight [see] that. 1. Parents receive paid leave! What? [",
]


@settings(max_examples=80, deadline=None)
@given(st.sampled_from(TEXTS), st.lists(st.integers(0, 110), max_size=12))
def test_it_does_not_matter_where_the_stream_is_cut(text: str, cuts: list[int]) -> None:
    edges = [0, *sorted({cut for cut in cuts if cut < len(text)}), len(text)]
    pieces = [text[a:b] for a, b in itertools.pairwise(edges)]
    assert read(pieces) == read([text])


@settings(max_examples=80, deadline=None)
@given(st.lists(st.sampled_from([*"ab .\n[]12,!", "office opens at eight", " "]), max_size=40))
def test_only_markers_are_added(pieces: list[str]) -> None:
    said, found = read(pieces)
    for one in sorted(found, key=lambda one: -one.start):
        if one.origin == "attributed":
            said = said[: one.start - 1] + said[one.end :]
    assert said == "".join(pieces)
    assert read(pieces, attribute=False)[0] == "".join(pieces)
