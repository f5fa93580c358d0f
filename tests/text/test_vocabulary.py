"""The vocabulary for grammar compilers: exact bytes, and encodings that decode to exactly their text."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.engine.grammar.guidance import GuidanceCompiler
from penstock.engine.grammar.interface import GrammarError, words_for
from penstock.text import TextModel, grammars
from penstock.text.vocabulary import vocabulary


@pytest.fixture(params=["smollm2", "sentencepiece"])
def model(request: pytest.FixtureRequest) -> TextModel:
    found = request.getfixturevalue(request.param)
    assert isinstance(found, TextModel)
    return found


def test_encodings_are_exact(smollm2: TextModel, sentencepiece: TextModel) -> None:
    known = [(model, vocabulary(model)) for model in (smollm2, sentencepiece)]

    @settings(max_examples=60, deadline=None)
    @given(st.text(alphabet='aZ 09{}[]":,.<|>\\\n\té日€😀', max_size=12))
    def check(words: str) -> None:
        for model, told in known:
            ids = told.encode(words)
            assert b"".join(told.tokens[token] for token in ids) == words.encode()
            assert not any(model.is_special(token) for token in ids)

    check()
    # SentencePiece writes a space before every text; a grammar means what it says.
    assert sentencepiece.encode("Hello", special=False) != known[1][1].encode("Hello")


def test_grammars_are_followed_with_any_kind_of_tokenizer(model: TextModel) -> None:
    compiler = GuidanceCompiler(vocabulary(model), model.vocab_size + 5)
    matcher = compiler.compile(grammars.check(grammars.choice(["Hello world", "Hello the world!"])))
    written = b""
    for _ in range(40):
        mask = np.zeros((1, words_for(model.vocab_size + 5)), np.int32)
        compiler.fill([matcher], mask)
        allowed = np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little"))
        assert matcher.error is None and allowed.max() < model.vocab_size
        token = int(max(allowed, key=lambda token: len(model.token_bytes(token))))
        written += model.token_bytes(token)
        matcher.accept(token)
        if matcher.complete:
            break
    assert written.decode() in ("Hello world", "Hello the world!")


def test_a_text_the_vocabulary_cannot_write_is_an_error_and_not_something_else(smollm2: TextModel) -> None:
    """The default model has no token for some bytes."""
    compiler = GuidanceCompiler(vocabulary(smollm2), smollm2.vocab_size)
    matcher = compiler.compile(grammars.check(grammars.choice(["\U00040000"])))
    mask = np.zeros((1, words_for(smollm2.vocab_size)), np.int32)
    for _ in range(4):
        compiler.fill([matcher], mask)
        if matcher.error is not None:
            return
        matcher.accept(int(np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little"))[0]))
    raise AssertionError("it found a way to write it")


@pytest.mark.parametrize(
    ("build", "says"),
    [
        (lambda: grammars.json_schema({"type": "array", "contains": {}}), "contains"),
        (lambda: grammars.json_schema({"x-guidance": {}}), "x-guidance"),
        (lambda: grammars.regex("(?=look)"), "look-around"),
        (lambda: grammars.lark("start: missing"), "missing"),
        (lambda: grammars.json_schema({"description": "x" * 300_000}), "characters"),
    ],
)
def test_what_cannot_be_enforced_is_refused_with_a_reason(build: object, says: str) -> None:
    assert callable(build)
    with pytest.raises(GrammarError, match=says):
        grammars.check(build())
