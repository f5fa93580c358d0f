"""A vocabulary for the tiny checkpoints: ASCII bytes, a few longer tokens, control tokens."""

from __future__ import annotations

import random

import numpy as np

from penstock.engine.grammar.guidance import GuidanceCompiler, GuidanceMatcher
from penstock.engine.grammar.interface import Vocabulary, words_for

VOCAB = 199
END = 198
WORDS = [b"ab", b"abc", b"10", b"the ", b'{"', b'":', b"\xc3", b"\xa9"]
TOKENS = [bytes([i]) for i in range(128)] + WORDS
CLOSING = (b'"', b"}", b"]", b",", b":", b"{")
"""What ends parts of JSON: a random text without a preference for them would hardly end."""
SPECIAL = frozenset(range(190, VOCAB))


def encode(text: str) -> list[int]:
    return [TOKENS.index(bytes([byte])) for byte in text.encode()]


NAMES = [*TOKENS, *[b""] * (190 - len(TOKENS)), *(b"<%d>" % i for i in range(190, VOCAB))]
VOCABULARY = Vocabulary(NAMES, SPECIAL, (END,), encode)


def text_of(tokens: list[int]) -> str:
    return b"".join(NAMES[token] for token in tokens if token not in SPECIAL).decode()


def compiler(size: int) -> GuidanceCompiler:
    return GuidanceCompiler(VOCABULARY, size)


def walk(compiler: GuidanceCompiler, fresh: GuidanceMatcher, rng: random.Random, steps: int = 400) -> str | None:
    """A random text that follows a grammar; None when it did not end in time."""
    matcher = compiler.copy(fresh)
    mask = np.zeros((1, words_for(VOCAB)), np.int32)
    taken: list[int] = []
    for _ in range(steps):
        compiler.fill([matcher], mask)
        assert matcher.error is None, (matcher.error, text_of(taken))
        allowed = np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little")).tolist()
        closing = [token for token in allowed if token == END or NAMES[token] in CLOSING]
        token = int(rng.choice(closing if closing and rng.random() < 0.5 else allowed))
        taken.append(token)
        matcher.accept(token)
        assert matcher.error is None, (matcher.error, text_of(taken))
        if matcher.complete:
            return text_of(taken)
    return None
