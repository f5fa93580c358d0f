"""Tokenizing neither holds the interpreter lock nor works on text that cannot fit."""

from __future__ import annotations

import re
import threading
import time
from functools import partial
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers

from penstock.text import TextModel
from penstock.text.guard import SpecialTokens
from penstock.text.tokenizer_calls import CUT_TOKENS, PIECE, beginning, encode_ids, most_bytes_per_token

WORDS = "The quick brown fox, aged 13, jumps over lazy dogs; isn't that so?\n"


class Counted:
    """A tokenizer that knows how much it was given."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self.characters = 0

    def encode_batch_fast(self, texts: list[str], **options: Any) -> Any:
        self.characters += sum(map(len, texts))
        return self._tokenizer.encode_batch_fast(texts, **options)


def ticks_while(work: Any) -> int:
    """How often another thread gets to run meanwhile."""
    ticks, done = 0, threading.Event()

    def tick() -> None:
        nonlocal ticks
        while not done.is_set():
            time.sleep(0.002)
            ticks += 1

    thread = threading.Thread(target=tick)
    thread.start()
    try:
        work()
    finally:
        done.set()
        thread.join()
    return ticks


def test_other_threads_run_while_a_text_is_encoded(smollm2: TextModel) -> None:
    for encode in (smollm2.encode, lambda text: smollm2.encode_chat([{"role": "user", "content": text}])):
        for times in (4_000, 16_000, 64_000):  # a busy machine may have had no core for the other thread
            if (ticks := ticks_while(partial(encode, WORDS * times))) > 10:
                break
        assert ticks > 10


@settings(max_examples=30, deadline=None)
@given(text=st.text(max_size=300), most=st.integers(1, 40))
def test_a_limit_changes_no_token(smollm2: TextModel, text: str, most: int) -> None:
    ids = smollm2._tokenizer.encode(text, add_special_tokens=False).ids
    assert smollm2.encode(text, add_special_tokens=False) == ids
    limited = smollm2.encode(text, add_special_tokens=False, most=most)
    assert limited == (ids if len(limited) == len(ids) else ids[: most + 1])
    assert (len(limited) > most) == (len(ids) > most)


@pytest.mark.parametrize("text", [WORDS * 30_000, "a" * 2_000_000, "é☃" * 300_000])
def test_the_work_is_bounded_by_the_window(smollm2: TextModel, text: str) -> None:
    tokenizer: Any = Counted(smollm2._tokenizer)
    ids = encode_ids(tokenizer, text, add_special_tokens=False, most=2000)
    assert ids == smollm2.encode(text[:100_000], add_special_tokens=False)[:2001]
    assert tokenizer.characters < 4 * PIECE, "a few pieces, of two million characters"


def test_a_long_text_that_fits_is_encoded_whole(smollm2: TextModel) -> None:
    text = (" " * 80 + "\n") * 2000
    ids = smollm2.encode(text, add_special_tokens=False, most=20_000)
    assert ids == smollm2._tokenizer.encode(text, add_special_tokens=False).ids and len(ids) < 20_000


@settings(max_examples=20, deadline=None)
@given(piece=st.text(min_size=1, max_size=40), most=st.integers(1, 50))
def test_what_is_refused_early_is_too_long(smollm2: TextModel, piece: str, most: int) -> None:
    text = piece * (9000 // len(piece))
    begin = beginning(smollm2._tokenizer, text, most)
    if begin is not None:
        assert len(smollm2.encode(begin, add_special_tokens=False)) > most
        assert len(smollm2.encode(text, add_special_tokens=False)) > most
    else:
        assert len(smollm2.encode(text, add_special_tokens=False)) <= most + 2 * CUT_TOKENS + 1


@settings(max_examples=50, deadline=None)
@given(text=st.text(min_size=1, max_size=200))
def test_no_token_covers_more_bytes_than_the_widest(smollm2: TextModel, sentencepiece: TextModel, text: str) -> None:
    for model in (smollm2, sentencepiece):
        widest = model.most_bytes_per_token
        assert widest is not None
        ids = model.encode(text, special=False, add_special_tokens=False)
        kept = re.sub(r"[\0-\x08\x0b\x0c\x0e-\x1f\x7f]", "", text)  # vocabularies lack some of these
        assert len(kept.encode("utf-8", "replace")) <= widest * len(ids)


def test_tokenizers_that_drop_or_join_text_have_no_widest_token() -> None:
    byte_level = Tokenizer(models.BPE({letter: n for n, letter in enumerate(pre_tokenizers.ByteLevel.alphabet())}, []))
    byte_level.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    byte_level.decoder = decoders.ByteLevel()
    assert most_bytes_per_token(byte_level) == 4
    letters = byte_level.get_vocab()
    byte_level.model = models.BPE({letter: n for n, letter in enumerate(letters.keys() - {"Ą"})}, [])
    assert most_bytes_per_token(byte_level) == 4, "U+0004 is dropped"
    byte_level.model = models.BPE({letter: n for n, letter in enumerate(letters.keys() - {"Ċ"})}, [])
    assert most_bytes_per_token(byte_level) is None, "line breaks are dropped"
    byte_level.model = models.BPE(letters, [])
    byte_level.normalizer = normalizers.NFC()
    assert most_bytes_per_token(byte_level) == 12
    byte_level.normalizer = normalizers.Strip()
    assert most_bytes_per_token(byte_level) is None
    byte_level.normalizer = normalizers.Sequence([normalizers.NFC(), normalizers.Replace("a", "")])
    assert most_bytes_per_token(byte_level) is None
    assert most_bytes_per_token(Tokenizer(models.BPE({"a": 0}, []))) is None, "it drops what it does not know"
    assert most_bytes_per_token(Tokenizer(models.WordPiece({"a": 0, "[UNK]": 1}, unk_token="[UNK]"))) is None


def test_control_tokens_are_found_across_pieces() -> None:
    special = SpecialTokens({"<|end|>": 0, "<|endless|>": 1})
    for shift in range(-12, 13):
        text = "x" * (PIECE + shift) + "<|endless|>" + "y" * PIECE + "<|end|>"
        assert special.substitute(text, lambda found: "[" + found[2:-2] + "]") == (
            "x" * (PIECE + shift) + "[endless]" + "y" * PIECE + "[end]"
        )
