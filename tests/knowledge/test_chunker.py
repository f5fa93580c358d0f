"""Chunks follow the structure of a document and the size of the model that reads them."""

from __future__ import annotations

import itertools

from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.knowledge.chunker import chunk
from penstock.knowledge.entities import Chunk
from penstock.knowledge.readers import read


def count(text: str) -> int:
    return len(text.split())


def cut(text: str, kind: str = "text/markdown", *, most: int = 40, overlap: int = 0, name: str = "file") -> list[Chunk]:
    return chunk(read(text.encode(), kind), count, most=most, overlap=overlap, name=name)


def sentences(n: int, about: str = "word") -> str:
    return " ".join(f"{about} number {i} is here." for i in range(n))


def test_a_chunk_never_spans_two_sections_and_knows_its_headings() -> None:
    found = cut("# Guide\n\nIntro.\n\n## Leave\n\n### Parents\n\nTwelve weeks.\n\n## Pay\n\nMonthly.\n")
    assert [(one.heading, one.text) for one in found] == [
        ("Guide", "Intro."),
        ("Guide > Leave > Parents", "Twelve weeks."),
        ("Guide > Pay", "Monthly."),
    ]
    assert found[1].embedded == "Guide > Leave > Parents\nTwelve weeks."


def test_the_name_stands_for_a_missing_title() -> None:
    assert cut("Just text.", name="notes.txt")[0].heading == "notes.txt"
    assert cut("## Part\n\nText.", name="notes.txt")[0].heading == "notes.txt > Part"


def test_blocks_are_packed_together_and_cut_between_sentences() -> None:
    text = sentences(20)
    found = cut(f"# T\n\nShort one.\n\nShort two.\n\n{text}\n")
    assert found[0].text.startswith("Short one.\n\nShort two.")
    assert all(one.text.endswith(".") for one in found)
    assert all(one.tokens <= 40 for one in found)
    assert " ".join(one.text for one in found).split() == f"Short one. Short two. {text}".split()


def test_neighbours_cut_from_one_block_overlap() -> None:
    found = cut(f"# T\n\n{sentences(30)}\n", overlap=10)
    for before, after in itertools.pairwise(found):
        assert before.start < after.start < before.end < after.end
    assert all(one.tokens <= 40 for one in found)


def test_code_and_tables_are_cut_between_lines() -> None:
    code = "\n".join(f"x{i} = call(argument, {i})" for i in range(40))
    found = cut(f"# T\n\n```\n{code}\n```\n")
    assert len(found) > 2
    for one in found:
        assert all(line in (*code.splitlines(), "```") for line in one.text.splitlines())


def test_a_word_without_end_is_cut_too() -> None:
    found = chunk(read(b"a" * 1000, "text/plain"), len, most=100)
    assert "".join(one.text for one in found) == "a" * 1000
    assert all(len(one.text) <= 100 for one in found)


def test_long_headings_leave_room_for_text() -> None:
    heading = " ".join(["heading"] * 200)
    found = cut(f"# {heading}\n\n## Inner\n\nText of it.\n", most=100)
    assert found[0].text == "Text of it." and found[0].heading.endswith("Inner") and found[0].tokens <= 60


@settings(max_examples=60, deadline=None)
@given(
    st.lists(
        st.sampled_from(["# A", "## B", "", "```", "word " * 30, "One. Two! Three?", "- item", "| a | b |", "x" * 90]),
        max_size=30,
    ),
    st.integers(20, 60),
    st.integers(0, 9),
)
def test_nothing_is_lost_nothing_is_too_large(lines: list[str], most: int, overlap: int) -> None:
    text = "start\n" + "\n".join(lines)
    extracted = read(text.encode(), "text/markdown")
    found = chunk(extracted, count, most=most, overlap=overlap, name="n")
    covered = {i for one in found for i in range(one.start, one.end)}
    for block in extracted.blocks:
        if block.kind != "heading":
            missed = [i for i in range(block.start, block.end) if i not in covered and not text[i].isspace()]
            assert not missed
    for one in found:
        assert one.text == text[one.start : one.end] and one.tokens == count(one.embedded)
        assert one.tokens <= most
    assert [one.ordinal for one in found] == list(range(len(found)))
