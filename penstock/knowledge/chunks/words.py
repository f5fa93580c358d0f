"""Full-text search of a collection: FTS5 keeps the index, ranking is done here.

Ranking is done here (`bm25`), because FTS5's own costs microseconds for every chunk with a
word, every time: it looks up the chunk's length and walks its positions. Here the postings of a word are read as a
whole (`fts5vocab`) and cached until something is written; the lengths of all chunks are in memory, four bytes each.
Everything here blocks: it runs on the thread of the connection.
"""

from __future__ import annotations

import sqlite3
from collections import OrderedDict
from collections.abc import Sequence
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from penstock.knowledge.chunks.base import Ranked
from penstock.knowledge.chunks.bm25 import Numbers, Postings, rank
from penstock.knowledge.chunks.frequencies import Frequencies, affordable

TOKENIZER = "porter unicode61 remove_diacritics 2"
HEADING = 1.5
"""Weight of an occurrence in a heading."""
KEPT = 16
"""Maximum of cached postings (12 bytes each) as a multiple of the number of chunks: less than the vectors take."""


class Words:
    """The full-text search of one collection."""

    def __init__(self) -> None:
        self._frequencies = Frequencies()
        self._stems = _Stems()
        self._kept = _Kept()
        self._lengths = _Lengths()

    @staticmethod
    def prepare(connection: sqlite3.Connection) -> None:
        """Creates temporary views of the index, which belong to the connection."""
        for kind in ("instance", "row"):
            connection.execute(f"CREATE VIRTUAL TABLE IF NOT EXISTS temp.{kind}s USING fts5vocab(main, words, {kind})")

    def search(
        self,
        connection: sqlite3.Connection,
        terms: Sequence[str],
        count: int,
        among: NDArray[np.int64] | None = None,
    ) -> Ranked:
        """`among`: only chunks with these keys."""
        stems = list(dict.fromkeys(stem for term in terms for stem in self._stems.of(term)))
        total, tokens = _totals(connection)
        counts = self._counts(connection, stems, total)
        chosen = affordable(stems, counts, total)
        self._kept.are_of(_state(connection), KEPT * total)
        words = [self._kept.get(stem) or self._kept.put(stem, _postings(connection, stem)) for stem in chosen]
        return rank(words, total, self._lengths.all(connection), tokens / max(total, 1), count, among)

    def frequencies(self, connection: sqlite3.Connection, terms: Sequence[str]) -> tuple[list[int], int]:
        """The number of chunks with each term, and the total number of chunks."""
        total, _ = _totals(connection)
        counts = [self._counts(connection, self._stems.of(term), total) for term in terms]
        return [min(each, default=0) for each in counts], total

    def _counts(self, connection: sqlite3.Connection, stems: Sequence[str], total: int) -> list[int]:
        self._frequencies.size = total
        for stem in self._frequencies.unknown(stems):
            row = connection.execute("SELECT doc FROM temp.rows WHERE term = ?", (stem,)).fetchone()
            self._frequencies.put(stem, row[0] if row else 0)
        return [self._frequencies.get(stem) for stem in stems]


class _Kept:
    """Cached postings of one state of the collection."""

    def __init__(self) -> None:
        self._state: object = None
        self._postings: OrderedDict[str, Postings] = OrderedDict()
        self._size = self._most = 0

    def are_of(self, state: object, most: int) -> None:
        self._most = most
        if state != self._state:
            self._state, self._size = state, 0
            self._postings.clear()

    def get(self, stem: str) -> Postings | None:
        if stem in self._postings:
            self._postings.move_to_end(stem)
        return self._postings.get(stem)

    def put(self, stem: str, postings: Postings) -> Postings:
        self._postings[stem] = postings
        self._size += len(postings.keys)
        while self._size > self._most:
            self._size -= len(self._postings.popitem(last=False)[1].keys)
        return postings


class _Stems:
    """Stems of words as FTS5 indexes them, from a table in memory."""

    def __init__(self) -> None:
        self._connection = sqlite3.connect(":memory:", isolation_level=None, check_same_thread=False)
        self._connection.execute(f"CREATE VIRTUAL TABLE one USING fts5(text, tokenize='{TOKENIZER}')")
        self._connection.execute("CREATE VIRTUAL TABLE stems USING fts5vocab(one, row)")
        self.of = lru_cache(4096)(self._ask)

    def _ask(self, word: str) -> tuple[str, ...]:
        self._connection.execute("BEGIN")
        self._connection.execute("INSERT INTO one VALUES (?)", (word,))
        found = tuple(row[0] for row in self._connection.execute("SELECT term FROM stems"))
        self._connection.execute("ROLLBACK")
        return found


def _postings(connection: sqlite3.Connection, stem: str) -> Postings:
    # One string for all occurrences: a row for each would cost four times as much.
    (text,) = connection.execute(
        "SELECT group_concat(doc * 2 + (col = 'heading')) FROM temp.instances WHERE term = ?", (stem,)
    ).fetchone()
    marked = np.array(text.split(",") if text else [], np.int64)
    return Postings.of(marked >> 1, np.where(marked & 1, np.float32(HEADING), np.float32(1)))


class _Lengths:
    """The number of words of each chunk, heading and text together, by key. Keys only grow and are never reused: known
    values stay valid, and new ones come after them."""

    def __init__(self) -> None:
        self._by_key: Numbers = np.zeros(1, np.float32)

    def all(self, connection: sqlite3.Connection) -> Numbers:
        (last,) = connection.execute("SELECT MAX(id) FROM words_docsize").fetchone()
        known = len(self._by_key)
        if last is not None and last >= known:
            new = np.zeros(last + 1 - known, np.float32)
            for id, sizes in connection.execute("SELECT id, sz FROM words_docsize WHERE id >= ?", (known,)):
                new[id - known] = sum(_varints(sizes))
            self._by_key = np.concatenate([self._by_key, new])
        return self._by_key


def _state(connection: sqlite3.Connection) -> tuple[int, int]:
    """A value that changes with every write: the first number counts writes of others, the second our own."""
    return connection.execute("PRAGMA data_version").fetchone()[0], connection.total_changes


def _totals(connection: sqlite3.Connection) -> tuple[int, int]:
    """The number of chunks and of words in all of them, from FTS5's first record."""
    row = connection.execute("SELECT block FROM words_data WHERE id = 1").fetchone()
    chunks, *words = _varints(row[0]) if row and row[0] else [0]
    return chunks, sum(words)


def _varints(data: bytes) -> list[int]:
    """SQLite's variable-length integers: seven bits a byte, the highest first; a ninth byte counts whole."""
    if max(data, default=0) < 0x80:
        return list(data)
    found, value, length = [], 0, 0
    for byte in data:
        length += 1
        if length == 9:
            value = value << 8 | byte
        else:
            value = value << 7 | byte & 0x7F
            if byte & 0x80:
                continue
        found.append(value)
        value = length = 0
    return found
