"""Text comes out as tokens go in: never half a character, and all of it in the end."""

from __future__ import annotations

import itertools
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.text import IncrementalDetokenizer, TextModel

TEXTS = st.text(
    # SmolLM2's vocabulary lacks a few bytes: some control characters, and those that begin unassigned planes.
    alphabet=st.one_of(
        st.characters(max_codepoint=0x3FFFF, exclude_categories=["Cc", "Cs"]), st.sampled_from("😀👍🏽👩‍👧é日 \n\ufffd")
    ),
    max_size=40,
)


def pieces(ids: list[int], cuts: list[int]) -> list[list[int]]:
    bounds = [0, *sorted(cut % (len(ids) + 1) for cut in cuts), len(ids)]
    return [ids[start:end] for start, end in itertools.pairwise(bounds)]


def streamed(model: TextModel, ids: list[int], cuts: list[int], *, skip_special: bool) -> list[str]:
    detokenizer = IncrementalDetokenizer(model, skip_special=skip_special)
    texts = [detokenizer.push(part) for part in pieces(ids, cuts)]
    return [*texts, detokenizer.flush()]


@settings(max_examples=200, deadline=None)
@given(st.lists(st.integers(0, 49151), max_size=30), st.lists(st.integers(0, 30), max_size=8), st.booleans())
def test_random_ids_add_up_to_the_full_decode(
    smollm2: TextModel, ids: list[int], cuts: list[int], skip_special: bool
) -> None:
    whole = "".join(streamed(smollm2, ids, cuts, skip_special=skip_special))
    assert whole == smollm2.decode(ids, skip_special=skip_special)
    assert whole == smollm2._tokenizer.decode(ids, skip_special_tokens=skip_special)


@settings(max_examples=200, deadline=None)
@given(TEXTS)
def test_text_one_token_at_a_time(smollm2: TextModel, text: str) -> None:
    ids = smollm2.encode(text, special=False)
    parts = streamed(smollm2, ids, list(range(len(ids))), skip_special=True)
    assert "".join(parts) == text
    if "\ufffd" not in text:
        assert not any("\ufffd" in part for part in parts), "half a character was emitted"


@settings(max_examples=200, deadline=None)
@given(TEXTS)
def test_sentencepiece_text_one_token_at_a_time(sentencepiece: TextModel, text: str) -> None:
    text = text.replace("▁", "")
    ids = sentencepiece.encode(text, special=False, add_special_tokens=False)
    parts = streamed(sentencepiece, ids, list(range(len(ids))), skip_special=True)
    assert "".join(parts) == text == sentencepiece._tokenizer.decode(ids)
    if "\ufffd" not in text:
        assert not any("\ufffd" in part for part in parts)


@settings(max_examples=200, deadline=None)
@given(st.lists(st.integers(0, 320), max_size=30), st.lists(st.integers(0, 30), max_size=8))
def test_sentencepiece_random_ids(sentencepiece: TextModel, ids: list[int], cuts: list[int]) -> None:
    assert "".join(streamed(sentencepiece, ids, cuts, skip_special=True)) == sentencepiece.decode(ids)


def test_an_emoji_waits_for_its_last_byte(smollm2: TextModel) -> None:
    ids = smollm2.encode("🧿")
    assert len(ids) > 1
    detokenizer = smollm2.detokenizer()
    assert [detokenizer.push([token]) for token in ids] == [""] * (len(ids) - 1) + ["🧿"]
    assert detokenizer.flush() == ""


def test_a_character_cut_short_is_replaced_at_the_end(smollm2: TextModel) -> None:
    detokenizer = smollm2.detokenizer()
    assert detokenizer.push(smollm2.encode("ok 🧿")[:-1]) == "ok "
    assert detokenizer.flush() == "\ufffd"


def test_control_tokens_are_shown_only_on_request(smollm2: TextModel) -> None:
    ids = smollm2.encode("a<|im_end|>b")
    assert smollm2.decode(ids) == "ab"
    assert smollm2.decode(ids, skip_special=False) == "a<|im_end|>b"


def test_a_continuation_keeps_its_first_space(sentencepiece: TextModel) -> None:
    ids = sentencepiece.encode("world", add_special_tokens=False)
    assert sentencepiece.decode(ids) == "world"
    assert sentencepiece.detokenizer(continuation=True).push(ids) == " world"


def test_ids_that_stand_for_nothing_are_silent(smollm2: TextModel) -> None:
    assert smollm2.token_bytes(10**9) == b""
    assert smollm2.token_bytes(-1) == b""
    assert smollm2.decode([10**6]) == ""


def test_token_bytes_and_text(smollm2: TextModel) -> None:
    ids = smollm2.encode("café 🧿")
    assert b"".join(smollm2.token_bytes(token) for token in ids).decode() == "café 🧿"
    assert [smollm2.token_text(token) for token in smollm2.encode(" the")] == [" the"]
    assert "\ufffd" in smollm2.token_text(ids[-1])


@pytest.mark.parametrize("bad", [0xBF, 0x80])
def test_endless_malformed_bytes_cost_no_more_than_good_ones(smollm2: TextModel, bad: int) -> None:
    token = next(id for id in range(smollm2.vocab_size) if smollm2.token_bytes(id) == bytes([bad]))
    detokenizer = smollm2.detokenizer()
    started = time.process_time()
    for _ in range(20_000):
        assert detokenizer.push([token]) == "\ufffd"
    assert time.process_time() - started < 2
