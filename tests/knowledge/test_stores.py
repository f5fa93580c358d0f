"""Chunks in SQLite with an index beside it, and in PostgreSQL: the same answers from both."""

from __future__ import annotations

import sqlite3
import tracemalloc
from collections.abc import AsyncIterator
from pathlib import Path

import numpy as np
import pytest

from penstock.knowledge.catalogue import Catalogue
from penstock.knowledge.chunks import index as index_module
from penstock.knowledge.chunks import sqlite as sqlite_module
from penstock.knowledge.chunks.base import ChunkStores, EmbeddedChunk
from penstock.knowledge.chunks.files import SQLiteStores
from penstock.knowledge.chunks.frequencies import affordable
from penstock.knowledge.chunks.postgres import PostgresStores
from penstock.knowledge.entities import Chunk, Collection
from penstock.storage import open_database
from tests.knowledge.embedding import DIMENSIONS, HashingEmbedder

embedder = HashingEmbedder()


async def embedded(*texts: str) -> list[EmbeddedChunk]:
    vectors = (await embedder.embed(texts)).vectors
    return [
        EmbeddedChunk(Chunk(i, "Heading", text, 10 * i, 10 * i + len(text), None, 3), vector, f"late {text}".encode())
        for i, (text, vector) in enumerate(zip(texts, vectors, strict=True))
    ]


def collection(id: str = "a") -> Collection:
    return Collection(f"col_{id * 32}", "acme", id, "", {}, "hashing", DIMENSIONS, 200, 32, 0.0)


@pytest.fixture(params=["sqlite", "postgres"])
async def stores(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[ChunkStores]:
    if request.param == "sqlite":
        files = SQLiteStores(tmp_path, most_open=2)
        yield files
        await files.close()
        return
    database = await open_database(request.getfixturevalue("pgvector_url"))
    tables = PostgresStores(database)
    await tables.prepare()
    yield tables
    for id in "abc":
        await tables.drop(collection(id))
    await database.close()


async def test_words_and_vectors_find_chunks(stores: ChunkStores) -> None:
    async with stores.use(collection()) as store:
        await store.replace("one", await embedded("pumps need oil", "valves leak sometimes"))
        await store.replace("two", await embedded("the oil price rises", "holidays in May"))
        (vector,) = (await embedder.embed(["valves leak"])).vectors
        best, similarity = (await store.nearest(vector, 3))[0]
        assert similarity > 0.8
        found = await store.fetch([best, 999])
        assert list(found) == [best] and found[best].chunk.text == "valves leak sometimes"
        assert (found[best].document, found[best].chunk.start, found[best].chunk.tokens) == ("one", 10, 3)
        assert await store.late([best]) == {best: b"late valves leak sometimes"}
        ranked = await store.matching(["pump", "oil"], 10)
        texts = [(await store.fetch([key]))[key].chunk.text for key, _ in ranked]
        assert texts == ["pumps need oil", "the oil price rises"]
        assert ranked[0][1] > ranked[1][1] > 0
        assert (await store.frequencies(["oil", "nowhere"]))[0] == [2, 0]
        assert [one.chunk.ordinal for one in await store.of_document("two")] == [0, 1]


async def test_a_search_among_some_documents_misses_nothing_of_theirs(stores: ChunkStores) -> None:
    async with stores.use(collection()) as store:
        await store.replace("far", await embedded("oil is mentioned here among many other things of the world"))
        for number in range(30):  # all of them nearer, and with the word more often
            await store.replace(f"near {number}", await embedded("oil oil", "pumps"))
        (vector,) = (await embedder.embed(["oil"])).vectors
        for among in (["far"], ["far", "nowhere"]):
            keys = {one.key for one in await store.of_document("far")}
            assert {key for key, _ in await store.nearest(vector, 5, among)} == keys
            assert {key for key, _ in await store.matching(["oil"], 5, among)} == keys
        assert await store.nearest(vector, 5, []) == [] == await store.matching(["oil"], 5, [])
        some = await store.nearest(vector, 3, [f"near {number}" for number in range(5)])
        assert len(some) == 3 and all(similarity > 0.99 for _, similarity in some)
        assert dict(some).keys() <= dict(await store.nearest(vector, 31)).keys()


def test_a_search_among_most_of_a_large_collection_takes_little_memory() -> None:
    connection, dimensions, count = sqlite3.connect(":memory:"), 64, 40_000
    connection.execute("CREATE TABLE chunks (key INTEGER PRIMARY KEY, document TEXT, vector BLOB)")
    vectors = np.random.default_rng(0).normal(size=(97, dimensions)).astype(np.float16)
    rows = ((key, "a", vectors[key % 97].tobytes()) for key in range(count))
    connection.executemany("INSERT INTO chunks VALUES (?, ?, ?)", rows)
    tracemalloc.start()
    found = sqlite_module._nearest(connection, '["a"]', vectors[5], 3)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert [key for key, _ in found] == [5, 102, 199] and found[0][1] == pytest.approx(1.0, abs=1e-3)
    assert peak < 4e6 < count * dimensions * 2, "never all vectors at once"


async def test_replacing_and_removing_leave_nothing_behind(stores: ChunkStores) -> None:
    async with stores.use(collection()) as store:
        (vector,) = (await embedder.embed(["pumps need oil"])).vectors
        await store.replace("one", await embedded("pumps need oil"))
        first = (await store.nearest(vector, 5))[0][0]
        await store.replace("one", await embedded("gears need grease", "pumps again"))
        assert first not in dict(await store.nearest(vector, 5))
        assert first not in dict(await store.matching(["pumps", "oil"], 5))
        assert len(await store.nearest(vector, 5)) == 2
        await store.replace("one", [])
        assert await store.nearest(vector, 5) == [] == await store.matching(["grease"], 5)


async def test_collections_do_not_see_each_other(stores: ChunkStores) -> None:
    (vector,) = (await embedder.embed(["secret plan"])).vectors
    async with stores.use(collection("a")) as store:
        await store.replace("one", await embedded("secret plan"))
    async with stores.use(collection("b")) as store:
        assert await store.nearest(vector, 5) == [] == await store.matching(["secret"], 5)
        assert (await store.frequencies(["secret"])) == ([0], 0)
    await stores.drop(collection("a"))
    async with stores.use(collection("a")) as store:
        assert await store.matching(["secret"], 5) == []


async def test_odd_words_are_only_words(stores: ChunkStores) -> None:
    async with stores.use(collection()) as store:
        await store.replace("one", await embedded("it's a NOT near * trap", "drop table chunks"))
        for terms in (["not"], ["near"], ["'; drop table chunks; --"], ["*"], ['"'], ["é"]):
            await store.matching([term.replace('"', "") or "x" for term in terms], 5)
        assert len(await store.of_document("one")) == 2


def index_files(folder: Path) -> list[Path]:
    return list(folder.glob("*.usearch"))


async def nearest_texts(stores: SQLiteStores, query: str, count: int = 3) -> list[str]:
    async with stores.use(collection()) as store:
        (vector,) = (await embedder.embed([query])).vectors
        keys = [key for key, _ in await store.nearest(vector, count)]
        found = await store.fetch(keys)
        return [found[key].chunk.text for key in keys]


async def filled(folder: Path, count: int = 40) -> SQLiteStores:
    stores = SQLiteStores(folder)
    async with stores.use(collection()) as store:
        for n in range(count):
            await store.replace(f"doc{n}", await embedded(f"topic{n} about thing{n}"))
    return stores


async def test_the_index_file_is_used_and_caught_up_with(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stores = await filled(tmp_path)
    assert (await nearest_texts(stores, "topic7 thing7"))[0] == "topic7 about thing7"
    await stores.close()
    (file,) = index_files(tmp_path)
    assert file.stat().st_mode & 0o777 == 0o600, "for nobody else, as the store itself"
    # Another process changes the store, and does not write the index.
    monkeypatch.setattr(sqlite_module.SQLiteChunks, "_save", _nothing)
    other = SQLiteStores(tmp_path)
    async with other.use(collection()) as store:
        await store.replace("doc7", await embedded("something else entirely"))
        await store.replace("new", await embedded("topic99 about thing99"))
    await other.close()
    assert index_files(tmp_path) == [file]
    loads = []
    original = index_module.VectorIndex.load
    monkeypatch.setattr(index_module.VectorIndex, "load", lambda *args: loads.append(original(*args)) or loads[-1])
    stores = SQLiteStores(tmp_path)
    assert (await nearest_texts(stores, "topic99 thing99"))[0] == "topic99 about thing99"
    assert len(loads) == 1 and len(loads[0]) == 41 - 1 + 1
    assert "topic7 about thing7" not in await nearest_texts(stores, "topic7 thing7", 41)
    await stores.close()


async def _nothing(*_: object) -> None:
    return None


@pytest.mark.parametrize("damage", ["missing", "truncated", "garbage", "stale"])
async def test_a_lost_or_damaged_index_is_made_again(
    tmp_path: Path, damage: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    stores = await filled(tmp_path)
    await nearest_texts(stores, "topic7")
    await stores.close()
    (file,) = index_files(tmp_path)
    if damage == "missing":
        file.unlink()
    elif damage == "truncated":
        file.write_bytes(file.read_bytes()[:-100])
    elif damage == "garbage":
        file.write_bytes(np.random.default_rng(0).bytes(file.stat().st_size))
    else:
        # Removals it has not seen are forgotten: it was away for too long.
        monkeypatch.setattr(sqlite_module, "KEPT_REMOVALS", 2)
        monkeypatch.setattr(sqlite_module.SQLiteChunks, "_save", _nothing)
        other = SQLiteStores(tmp_path)
        async with other.use(collection()) as store:
            for n in range(5):
                await store.replace(f"doc{n}", [])
        await other.close()
    stores = SQLiteStores(tmp_path)
    found = await nearest_texts(stores, "topic7 thing7", 60)
    assert found[0] == "topic7 about thing7"
    assert len(found) == (35 if damage == "stale" else 40)
    await stores.close()


async def test_open_files_are_bounded_and_reopen(tmp_path: Path) -> None:
    stores = SQLiteStores(tmp_path, most_open=2)
    for id in "abcde":
        async with stores.use(collection(id)) as store:
            await store.replace("one", await embedded(f"words of {id}"))
        assert len(stores._open) <= 2
    async with stores.use(collection("a")) as store:
        assert len(await store.matching(["words"], 5)) == 1
    await stores.close()


def test_rare_words_are_searched_first_and_common_ones_left_out() -> None:
    assert affordable(["the", "pump", "oil"], [90_000, 10, 500], 100_000) == ["pump", "oil"]
    assert affordable(["the", "nowhere"], [90_000, 0], 100_000) == ["the"]


async def test_many_vectors_go_through_the_graph(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(index_module, "EXACT", 0)
    stores = await filled(tmp_path, 120)
    for n in (3, 50, 119):
        assert (await nearest_texts(stores, f"topic{n} thing{n}"))[0] == f"topic{n} about thing{n}"
    await stores.close()


async def test_names_belong_to_a_tenant(tmp_path: Path) -> None:
    database = await open_database(f"sqlite:///{tmp_path / 'c.db'}")
    catalogue = Catalogue(database)
    await catalogue.prepare()
    made = {}
    for tenant in ("acme", "globex"):
        made[tenant] = await catalogue.add_collection(
            tenant, "handbook", description="", metadata={}, embedding_model="m", dimensions=4, chunk_tokens=200,
            overlap_tokens=0,
        )  # fmt: skip
    assert await catalogue.collection("acme", "handbook") == made["acme"]
    assert await catalogue.collection("acme", made["globex"].id) is None
    assert [one.id for one in await catalogue.collections("globex", limit=9)] == [made["globex"].id]
    await database.close()
