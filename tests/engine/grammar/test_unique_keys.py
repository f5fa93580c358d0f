"""The scanner that keeps keys unique: wherever JSON begins, and however tokens split it."""

from __future__ import annotations

import json
import random

import numpy as np
import pytest

from penstock.engine.grammar.interface import words_for
from penstock.engine.grammar.unique_keys import TokenIndex, UniqueKeys, split_header, with_header

TOKENS = [bytes([i]) for i in range(128)] + [
    b'"b"',
    b'","b":',
    b'{"b":1,"',
    b"b",
    b'b"',
    b'bc"',
    b"<call>",
    b'},"b"',
    b'\\"b"',
]
CALL = len(TOKENS)
INDEX = TokenIndex([*TOKENS, b"<|call|>"], frozenset([CALL]))


def barred(keys: UniqueKeys) -> set[bytes]:
    mask = np.full(words_for(len(TOKENS)), -1, np.int32)
    keys.restrict(mask)
    bits = np.unpackbits(mask.view(np.uint8), bitorder="little")
    return {TOKENS[token] for token in range(len(TOKENS)) if not bits[token]}


def after(text: str, start: str | int = "") -> UniqueKeys:
    keys = UniqueKeys(INDEX, start)
    for byte in text.encode():
        keys.accept(byte)
    return keys


@pytest.mark.parametrize(
    ("text", "want"),
    [
        ('{"', set()),
        ('{"b":1,"', {b'b"', b'","b":'}),
        ('{"b":1,"b', {b'"', b'"b"', b'","b":'}),
        ('{"b":1,"a', {b'","b":'}),
        ('{"b":1,', {b'"b"', b'\\"b"'}),
        ('{"b":1', set()),
        ('{"b":"x', {b'","b":'}),
        ('{"b":{"a":1', {b'},"b"'}),
        ('{"b":{"', set()),
        ('[{"b":1},{"', set()),
        ('{"bc":1,"b":2,"b', {b'"', b'"b"', b'","b":'}),
        ('{"b":["b","', set()),
        ('{"a\\"b":1,"a', {b'\\"b"'}),
        ('{"a\\"b":1,"a\\"b', {b'"', b'"b"', b'","b":'}),
        ('{"\\\\":1,"b":"', {b'","b":'}),
    ],
)
def test_tokens_that_would_repeat_a_key_are_barred(text: str, want: set[bytes]) -> None:
    assert barred(after(text)) == want


def test_json_begins_behind_a_text_or_a_control_token() -> None:
    assert not barred(after('{"b":1,"b', "<call>"))
    assert b'"' in barred(after('say {"b":1} <call>[{"b":1,"b', "<call>"))
    waiting = after('{"b":1,"b', CALL)
    assert not barred(waiting)
    waiting.accept(CALL)
    for byte in b'{"b":1,"b':
        waiting.accept(byte)
    assert b'"' in barred(waiting)
    assert not barred(waiting.copy()), "a copy is at the beginning"


def test_a_key_written_in_another_way_is_noticed() -> None:
    assert after('{"\\b":1,"\\u0008":').repeated
    assert not after('{"\\b":1,"\\u0009":2,"b":{"\\b":1}}').repeated


def test_any_split_of_a_text_gives_the_same() -> None:
    rng = random.Random(2)
    text = json.dumps({"a": {"b": [1, {"b": 'x,{"b":'}], "c\\": "}"}, "b": "]", 'q"': {}}).encode()[:-1] + b',"'
    for _ in range(50):
        keys = UniqueKeys(INDEX, "")
        at = 0
        while at < len(text):
            size = rng.randint(1, 9)
            keys._scan(text[at : at + size])
            at += size
        assert keys._open == [{b"a": b"a", b"b": b"b", b'q"': b'q\\"'}]
        assert not keys.repeated


def test_the_header() -> None:
    assert split_header("{}") == (None, "{}")
    for start in ("", "<call>", 7, 'a\n"b'):
        assert split_header(with_header(start, '{"a":\n1}')) == (start, '{"a":\n1}')
