"""Matches are the longest, latest earlier occurrence of a text's end, whatever way the text was entered."""

from __future__ import annotations

import random

import pytest

from penstock.engine.speculative.match_finder import MatchFinder, continuation


def longest(tokens: list[int]) -> int:
    """Length of the longest earlier occurrence of the text's end, by trying all."""
    best = 0
    for at in range(len(tokens) - 1):
        length = 0
        while length <= at and length < 16 and tokens[at - length] == tokens[-1 - length]:
            length += 1
        best = max(best, length)
    return best if best >= 2 else 0


@pytest.mark.parametrize("vocab", [3, 30, 50_000])
def test_the_longest_match_is_found_after_every_token(vocab: int) -> None:
    rng = random.Random(vocab)
    base = [rng.randrange(vocab) for _ in range(150)]
    text = base + base[40:90] + [rng.randrange(vocab) for _ in range(30)] + base[10:60]
    finder = MatchFinder()
    for end in range(120, len(text) + 1):
        tokens = text[:end]
        finder.extend(tokens)
        match, best = finder.find(tokens), longest(tokens)
        if match is None:
            assert best == 0
            continue
        assert tokens[match.end - match.length : match.end] == tokens[end - match.length :]
        assert match.end < end
        # Only a few candidates are tried, so in a text of three tokens the longest may be missed.
        assert match.length == best or vocab == 3


def test_entering_at_once_or_one_by_one_is_the_same() -> None:
    rng = random.Random(5)
    text = [rng.randrange(12) for _ in range(900)]
    at_once, by_one, in_parts = MatchFinder(), MatchFinder(), MatchFinder()
    at_once.extend(text)
    for end in range(1, len(text) + 1):
        by_one.extend(text[:end])
    for end in (1, 3, 200, 203, 420, 900):
        in_parts.extend(text[:end])
    assert at_once._chain == by_one._chain == in_parts._chain
    assert at_once._head == by_one._head == in_parts._head


def test_short_texts_have_no_match() -> None:
    finder = MatchFinder()
    for tokens in ([], [1], [1, 1], [1, 2, 3]):
        finder.extend(tokens)
        assert finder.find(tokens) is None


def test_a_continuation_goes_round_at_the_end() -> None:
    assert continuation([1, 2, 3, 4, 2, 3], 3, 2) == [4, 2]
    assert continuation([7, 8, 7, 8], 2, 5) == [7, 8, 7, 8, 7]
