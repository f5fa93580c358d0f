"""A vocabulary for the tiny checkpoints: ASCII bytes, a few longer tokens, control tokens."""

from __future__ import annotations

from penstock.engine.grammar.guidance import GuidanceCompiler
from penstock.engine.grammar.interface import Vocabulary

VOCAB = 199
END = 198
WORDS = [b"ab", b"abc", b"10", b"the ", b'{"', b'":', b"\xc3", b"\xa9"]
TOKENS = [bytes([i]) for i in range(128)] + WORDS
SPECIAL = frozenset(range(190, VOCAB))


def encode(text: str) -> list[int]:
    return [TOKENS.index(bytes([byte])) for byte in text.encode()]


NAMES = [*TOKENS, *[b""] * (190 - len(TOKENS)), *(b"<%d>" % i for i in range(190, VOCAB))]
VOCABULARY = Vocabulary(NAMES, SPECIAL, (END,), encode)


def text_of(tokens: list[int]) -> str:
    return b"".join(NAMES[token] for token in tokens if token not in SPECIAL).decode()


def compiler(size: int) -> GuidanceCompiler:
    return GuidanceCompiler(VOCABULARY, size)
