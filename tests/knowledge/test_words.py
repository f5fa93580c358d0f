"""Words are ranked as FTS5 ranks them, at a fraction of the cost."""

from __future__ import annotations

import random
import sqlite3

import pytest

from penstock.knowledge.chunks import words as module
from penstock.knowledge.chunks.words import HEADING, TOKENIZER, Words, _varints

VOCABULARY = [f"word{n}" for n in range(60)]


@pytest.fixture
def connection() -> sqlite3.Connection:
    connection = sqlite3.connect(":memory:", isolation_level=None)
    connection.execute(f"CREATE VIRTUAL TABLE words USING fts5(heading, text, tokenize='{TOKENIZER}')")
    connection.execute(f"INSERT INTO words (words, rank) VALUES ('rank', 'bm25({HEADING}, 1.0)')")
    Words.prepare(connection)
    return connection


def fill(connection: sqlite3.Connection, rows: int) -> None:
    chance = random.Random(0)
    for _ in range(rows):
        # Some words are common and some rare; chunks are of any length, more than a byte can count too.
        text = " ".join(VOCABULARY[int(60 * chance.random() ** 2)] for _ in range(chance.choice((5, 40, 300))))
        connection.execute("INSERT INTO words VALUES (?, ?)", (chance.choice(VOCABULARY), text))


def by_fts5(connection: sqlite3.Connection, terms: list[str], count: int) -> list[float]:
    query = " OR ".join(f'"{term}"' for term in terms)
    rows = connection.execute("SELECT rank FROM words WHERE words MATCH ? ORDER BY rank LIMIT ?", (query, count))
    return [-row[0] for row in rows]


@pytest.mark.parametrize("terms", [["word3"], ["word59", "word40", "word2"], ["word1", "nowhere"]])
@pytest.mark.parametrize("count", [1, 10, 900])
def test_the_scores_are_those_of_fts5(connection: sqlite3.Connection, terms: list[str], count: int) -> None:
    fill(connection, 500)
    found = Words().search(connection, terms, count)
    assert [score for _, score in found] == pytest.approx(by_fts5(connection, terms, count), rel=1e-4, abs=1e-6)
    assert len(dict(found)) == len(found)


def test_words_meet_as_the_index_spells_them(connection: sqlite3.Connection) -> None:
    connection.execute("INSERT INTO words VALUES ('', 'Pumping stations in Malmö')")
    words = Words()
    for term in ("pumps", "PUMPED", "malmo", "malmö", "station"):
        assert len(words.search(connection, [term], 5)) == 1, term
    assert words.search(connection, ["²", "…", "'; DROP TABLE words"], 5) == []
    assert words.frequencies(connection, ["pump", "nowhere", "…"]) == ([1, 0, 0], 1)


def test_what_is_kept_ends_with_a_write_of_anybody(connection: sqlite3.Connection, tmp_path: object) -> None:
    path = f"{tmp_path}/words.db"
    writer, reader = (sqlite3.connect(path, isolation_level=None) for _ in range(2))
    writer.execute(f"CREATE VIRTUAL TABLE words USING fts5(heading, text, tokenize='{TOKENIZER}')")
    writer.execute("INSERT INTO words VALUES ('', 'pumps need oil')")
    for one in (writer, reader):
        Words.prepare(one)
    here, there = Words(), Words()
    assert len(here.search(writer, ["pump"], 5)) == len(there.search(reader, ["pump"], 5)) == 1
    writer.execute("INSERT INTO words VALUES ('', 'more pumps')")
    assert len(here.search(writer, ["pump"], 5)) == len(there.search(reader, ["pump"], 5)) == 2
    writer.execute("DELETE FROM words WHERE rowid = 1")
    assert [key for key, _ in there.search(reader, ["pump"], 5)] == [2]


def test_little_is_kept(connection: sqlite3.Connection, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "KEPT", 1)
    fill(connection, 200)
    words = Words()
    for term in VOCABULARY:
        words.search(connection, [term], 5)
    assert sum(len(postings.keys) for postings in words._kept._postings.values()) == words._kept._size <= 200


def test_integers_of_any_length() -> None:
    assert _varints(bytes([5, 0x81, 0x00, 0x7F])) == [5, 128, 127]
    assert _varints(b"\xff" * 9 + b"\x01") == [2**64 - 1, 1]
