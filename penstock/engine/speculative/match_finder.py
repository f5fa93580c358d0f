"""Where a sequence's end has occurred before: hash chains over its own tokens, as LZ77 compressors find matches.

Every pair of neighbouring tokens is entered once, in a table of the latest position per hash and a chain to the
position before. Adding a token is O(1), looking up walks a bounded chain and keeps the longest match, so the cost of a
step does not grow with the text. A hash may collide: candidates are compared with the tokens themselves.
"""

from __future__ import annotations

from array import array
from dataclasses import dataclass

import numpy as np

_BITS = 13
_SLOTS = 1 << _BITS
_CANDIDATES = 8
_LONGEST = 16
"""Longer matches are not told apart."""
_BULK = 64
"""More tokens than this are entered with array arithmetic."""
_A, _B = 0x9E3779B1, 0x85EBCA77


@dataclass(frozen=True, slots=True)
class Match:
    """The text so far ends with the `length` tokens before position `end`."""

    end: int
    length: int


class MatchFinder:
    """The index of one sequence. Memory: 32 KiB and four bytes per token."""

    __slots__ = ("_chain", "_head", "_size")

    def __init__(self) -> None:
        self._head = array("i", [-1]) * _SLOTS
        self._chain = array("i")
        """By position of a pair's second token: the position before it with the same hash."""
        self._size = 0

    def extend(self, tokens: list[int]) -> None:
        """Enter what `tokens` has beyond what was seen, but for its last pair: that is what is looked up."""
        end = len(tokens) - 1
        if end - self._size > _BULK:
            self._enter_many(np.array(tokens[max(self._size - 1, 0) : end], np.uint32), end)
        head, chain = self._head, self._chain
        for at in range(self._size, end):
            slot = _hash(tokens[at - 1], tokens[at]) if at else 0
            chain.append(head[slot] if at else -1)
            if at:
                head[slot] = at
        self._size = max(self._size, end)

    def find(self, tokens: list[int]) -> Match | None:
        """The longest earlier occurrence of the end of `tokens`, the latest of equals; at least a pair long."""
        last = len(tokens) - 1
        if last < 2:
            return None
        at = self._head[_hash(tokens[last - 1], tokens[last])]
        best = Match(-1, 0)
        for _ in range(_CANDIDATES):
            if at < 0:
                break
            length = _common(tokens, at, last)
            if length > best.length:
                best = Match(at + 1, length)
                if length == _LONGEST:
                    break
            at = self._chain[at]
        return best if best.length >= 2 else None

    def _enter_many(self, part: np.ndarray, end: int) -> None:
        first = end - len(part)  # position of part[0]
        with np.errstate(over="ignore"):
            mixed: np.ndarray = part[:-1] * np.uint32(_A) + part[1:] * np.uint32(_B)
        slots = (mixed >> np.uint32(32 - _BITS)).astype(np.int64)
        positions = np.arange(first + 1, end, dtype=np.int32)
        order = np.argsort(slots, kind="stable")
        ordered = slots[order]
        same = ordered[1:] == ordered[:-1]
        heads = np.frombuffer(self._head, np.int32)
        before = heads[slots]
        before[order[1:][same]] = positions[order[:-1][same]]
        heads[slots] = positions  # of equal slots the last one stays
        del heads
        if first == 0:
            self._chain.append(-1)
        self._chain.frombytes(before.astype(np.int32).tobytes())
        self._size = end


def _hash(a: int, b: int) -> int:
    return ((a * _A + b * _B) & 0xFFFFFFFF) >> (32 - _BITS)


def _common(tokens: list[int], at: int, last: int) -> int:
    """How many tokens up to `at` equal those up to `last`."""
    length = 0
    while length < _LONGEST and at >= length and tokens[at - length] == tokens[last - length]:
        length += 1
    return length


def continuation(tokens: list[int], begin: int, count: int) -> list[int]:
    """`count` tokens from `begin` on; past the end the text is taken to go on as it does there (a period)."""
    known = tokens[begin : begin + count]
    period = len(tokens) - begin
    while len(known) < count:
        known.append(known[len(known) - period])
    return known
