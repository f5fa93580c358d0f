"""Documents go in, are read in the background, and are found; tenants, updates, duplicates and crashes."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from penstock.knowledge import ingest
from penstock.knowledge.entities import Chunk, Collection, CollectionExists, Document, KnowledgeError, TooMany
from penstock.knowledge.filters import Comparison
from penstock.knowledge.library import Library
from penstock.knowledge.limits import LibraryLimits
from penstock.knowledge.pages import Page
from penstock.knowledge.queue import LEASE_S, IngestQueue
from penstock.knowledge.readers.process import ReaderProcess
from penstock.knowledge.readers.worker import Task
from penstock.protocol.errors import EngineUnavailable
from penstock.storage import DatabaseError
from tests.knowledge.embedding import HashingEmbedder
from tests.knowledge.files import make_pdf


@asynccontextmanager
async def opened(
    folder: Path, embedder: HashingEmbedder | None = None, limits: LibraryLimits | None = None
) -> AsyncIterator[Library]:
    library = await Library.open(f"sqlite:///{folder / 'k'}", embedder or HashingEmbedder(), limits=limits)
    try:
        yield library
    finally:
        await library.close()


async def put(library: Library, into: Collection, text: str, **more: str) -> Document:
    named = {"name": "note.md", "media_type": "text/markdown", **more}
    return (await library.put_document(into, text.encode(), **named))[0]  # type: ignore[arg-type]


async def settled(library: Library, into: Collection, within: float = 120.0) -> dict[str, int]:
    deadline = time.monotonic() + within
    while True:
        counts, _, _ = await library.catalogue.counts(into.id)
        if not counts.keys() & {"queued", "processing"}:
            return counts
        assert time.monotonic() < deadline, f"still {counts}"
        await asyncio.sleep(0.02)


async def texts(library: Library, into: Collection, query: str, **options: object) -> list[str]:
    found = await library.retriever.search(into, query, **options)  # type: ignore[arg-type]
    return [passage.stored.chunk.text for passage in found.passages]


async def test_documents_of_every_kind_are_found_with_their_places(tmp_path: Path) -> None:
    async with opened(tmp_path) as library:
        col = await library.create_collection("acme", "handbook")
        await put(library, col, "# Leave\n\nParents get twelve weeks.\n\n# Pay\n\nMonthly.", name="leave.md")
        await put(library, col, "<h1>Doors</h1><p>The office opens at eight.</p>", media_type="text/html")
        await library.put_document(
            col, make_pdf(["Intro.", "The boiler needs water."]), name="m.pdf", media_type="application/pdf"
        )
        await put(library, col, "Cats sleep a lot.", media_type="text/plain", name="cats.txt")
        assert await settled(library, col) == {"ready": 4}
        (passage,) = (await library.retriever.search(col, "how many weeks for parents", keep=1)).passages
        chunk = passage.stored.chunk
        assert (chunk.text, chunk.heading, chunk.start) == ("Parents get twelve weeks.", "Leave", 9)
        assert passage.document.name == "leave.md" and set(passage.scores) >= {"fused", "similarity", "bm25", "rerank"}
        (passage,) = (await library.retriever.search(col, "boiler water", keep=1)).passages
        assert passage.stored.chunk.page == 2
        for mode in ("vector", "bm25", "hybrid"):
            assert (await texts(library, col, "office opens", mode=mode, keep=1)) == ["The office opens at eight."]
        found = await library.chunk(col, passage.stored.id)
        assert found is not None and found[0] == passage.stored
        for odd in ("chunk_", "chunk_x", "1", "chunk_9999", "chunk_" + "9" * 40, "chunk_²"):
            assert await library.chunk(col, odd) is None


async def test_updates_replace_and_deletes_remove(tmp_path: Path) -> None:
    embedder = HashingEmbedder()
    async with opened(tmp_path, embedder) as library:
        col = await library.create_collection("acme", "handbook")
        await put(library, col, "Pumps need oil.", id="a")
        await settled(library, col)
        read_once = embedder.texts
        again = await put(library, col, "Pumps need oil.", id="a", name="renamed.md")
        assert (again.status, again.version, again.name) == ("ready", 1, "renamed.md")
        assert embedder.texts == read_once, "the same content is not read twice"
        updated = await put(library, col, "Pumps need grease.", id="a")
        assert (updated.status, updated.version) == ("queued", 2)
        await settled(library, col)
        assert await texts(library, col, "pumps") == ["Pumps need grease."]
        document = await library.catalogue.document(col.id, "a")
        assert document is not None
        await library.remove_document(col, document)
        assert await texts(library, col, "pumps") == []


async def test_the_same_content_is_one_document(tmp_path: Path) -> None:
    async with opened(tmp_path) as library:
        col = await library.create_collection("acme", "handbook")
        first = await put(library, col, "Pumps need oil.")
        second = await put(library, col, "Pumps need oil.", name="copy.md")
        assert second.id == first.id
        twin = await put(library, col, "Pumps need oil.", id="twin")
        assert (twin.status, twin.duplicate_of) == ("duplicate", first.id)
        await settled(library, col)
        assert await texts(library, col, "pumps") == ["Pumps need oil."]
        # When the original goes, the duplicate takes its place.
        found = await library.catalogue.document(col.id, first.id)
        assert found is not None
        await library.remove_document(col, found)
        assert await settled(library, col) == {"ready": 1}
        (passage,) = (await library.retriever.search(col, "pumps")).passages
        assert passage.document.id == "twin"


async def test_what_cannot_be_read_fails_alone(tmp_path: Path) -> None:
    async with opened(tmp_path) as library:
        col = await library.create_collection("acme", "handbook")
        bad, _ = await library.put_document(col, b"%PDF-nonsense", name="x.pdf", media_type="application/pdf")
        await put(library, col, "Good one.")
        assert await settled(library, col) == {"ready": 1, "failed": 1}
        found = await library.catalogue.document(col.id, bad.id)
        assert found is not None and "cannot be read" in found.error


async def test_a_mistake_of_ours_fails_one_document(tmp_path: Path) -> None:
    class Buggy(HashingEmbedder):
        def tokens(self, texts: Sequence[str]) -> list[list[str]]:
            if any("bomb" in text for text in texts):
                raise ZeroDivisionError("a bug")
            return super().tokens(texts)

    async with opened(tmp_path, Buggy(), LibraryLimits(readers=1)) as library:
        col = await library.create_collection("acme", "handbook")
        await put(library, col, "A bomb.")
        await put(library, col, "Good one.")
        assert await settled(library, col) == {"ready": 1, "failed": 1}


async def test_a_reader_outlives_what_nobody_expected(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ingest, "PAUSE_S", 0.0)

    async def forget(*_: object, **__: object) -> None:
        raise OSError("no space left on device")

    async with opened(tmp_path, limits=LibraryLimits(readers=1)) as library:
        monkeypatch.setattr(library._ingestor, "_forget", forget)
        col = await library.create_collection("acme", "handbook")
        await library.put_document(col, b"%PDF-nonsense", name="x.pdf", media_type="application/pdf")
        assert await settled(library, col) == {"failed": 1}
        await put(library, col, "Good one.")
        assert await settled(library, col) == {"ready": 1, "failed": 1}


async def test_work_left_by_a_crash_is_taken_up(tmp_path: Path) -> None:
    class Broken(HashingEmbedder):
        async def embed(self, *_: object, **__: object) -> None:  # type: ignore[override]
            raise EngineUnavailable("The encoder is starting.")

    async with opened(tmp_path, Broken()) as library:
        col = await library.create_collection("acme", "handbook")
        document = await put(library, col, "Pumps need oil.")
        await _until(lambda: any(one._process is not None for one in library._ingestor._processes))
    async with opened(tmp_path) as library:
        assert await settled(library, col) == {"ready": 1}
        found = await library.catalogue.document(col.id, document.id)
        assert found is not None and found.chunks == found.chunks_done == 1 and found.tokens > 0


async def _until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline
        await asyncio.sleep(0.01)


async def test_a_claim_is_renewed_while_a_document_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ingest, "RENEW_S", 0.01)
    read, progress = ReaderProcess.read, IngestQueue.progress
    go, renewed, given_up = asyncio.Event(), asyncio.Event(), asyncio.Event()

    async def slow(self: ReaderProcess, task: Task, body: bytes) -> list[Chunk]:
        try:
            await go.wait()
        except asyncio.CancelledError:
            given_up.set()
            raise
        return await read(self, task, body)

    async def seen(self: IngestQueue, document: Document, *, chunks: int, done: int) -> bool:
        wanted = await progress(self, document, chunks=chunks, done=done)
        renewed.set()
        return wanted

    monkeypatch.setattr(ReaderProcess, "read", slow)
    monkeypatch.setattr(IngestQueue, "progress", seen)
    async with opened(tmp_path) as library:
        col = await library.create_collection("acme", "handbook")
        document = await put(library, col, "Slow.")
        await asyncio.wait_for(renewed.wait(), 60)
        await library.remove_document(col, document)
        await asyncio.wait_for(given_up.wait(), 60)
        go.set()
        await put(library, col, "Slow.")
        assert await settled(library, col) == {"ready": 1}


async def test_a_claim_ends_with_its_lease(tmp_path: Path) -> None:
    """A gateway that was killed does not keep its documents: another takes them when it has said nothing for long."""
    now = [1000.0]
    async with opened(tmp_path, limits=LibraryLimits(readers=0)) as library:
        col = await library.create_collection("acme", "handbook")
        document = await put(library, col, "Pumps need oil.")
        one, other = (IngestQueue(library._database, lambda: now[0]) for _ in range(2))
        claim = await one.claim("acme")
        assert claim is not None and claim.body == b"Pumps need oil."
        assert await other.claim("acme") is None and await other.waiting_tenants() == []
        now[0] += LEASE_S / 2
        assert await one.progress(claim.document, chunks=2, done=1)
        now[0] += LEASE_S - 1
        assert await other.claim("acme") is None, "progress renews it"
        now[0] += 2
        again = await other.claim("acme")
        assert again is not None and again.attempts == 2
        updated = await put(library, col, "Pumps need water.", id=document.id)
        assert not await other.finish(again.document, chunks=1, tokens=1), "it was replaced meanwhile"
        assert updated.version == 2 and (await other.claim("acme")).body == b"Pumps need water."  # type: ignore[union-attr]


async def test_two_gateways_share_a_library(tmp_path: Path) -> None:
    async with opened(tmp_path) as one, opened(tmp_path) as other:
        col = await one.create_collection("acme", "handbook")
        assert await texts(other, col, "pumps") == []
        for n in range(12):
            await put(one if n % 2 else other, col, f"Pumps of kind{n} need oil.", id=f"d{n}")
        assert await settled(one, col) == {"ready": 12}
        for library in (one, other):
            assert (await texts(library, col, "kind7", keep=1)) == ["Pumps of kind7 need oil."]
        gone = await one.catalogue.document(col.id, "d7")
        assert gone is not None
        await one.remove_document(col, gone)
        assert "Pumps of kind7 need oil." not in await texts(other, col, "kind7 pumps", keep=20)
        await one.remove_collection(col)
        assert await other.catalogue.collection("acme", "handbook") is None
    assert not await asyncio.to_thread(lambda: list((tmp_path / "k").glob(f"{col.id}*"))), "left by neither"


async def test_a_collection_deleted_while_it_is_read_leaves_no_file(tmp_path: Path) -> None:
    started, go = asyncio.Event(), asyncio.Event()

    class Gated(HashingEmbedder):
        async def embed(self, texts, *, bulk=False):  # type: ignore[no-untyped-def]
            started.set()
            await go.wait()
            return await super().embed(texts)

    async with opened(tmp_path, Gated(), LibraryLimits(readers=1)) as library:
        col = await library.create_collection("acme", "handbook")
        await put(library, col, "Doomed words.")
        await started.wait()
        await library.remove_collection(col)
        go.set()
        other = await library.create_collection("acme", "next")
        await put(library, other, "Next words.")
        assert await settled(library, other) == {"ready": 1}
        assert not await asyncio.to_thread(lambda: list((tmp_path / "k").glob(f"{col.id}*")))


async def test_one_tenant_does_not_hold_up_another(tmp_path: Path) -> None:
    order: list[str] = []
    all_there = asyncio.Event()

    class Slow(HashingEmbedder):
        async def embed(self, texts, *, bulk=False):  # type: ignore[no-untyped-def]
            order.append(texts[0].split()[-1])
            await all_there.wait()
            return await super().embed(texts)

    async with opened(tmp_path, Slow(), LibraryLimits(readers=1)) as library:
        big = await library.create_collection("acme", "big")
        small = await library.create_collection("globex", "small")
        for n in range(12):
            await put(library, big, f"Text number acme{n}")
        await put(library, small, "Text globex")
        all_there.set()
        await settled(library, small)
        await settled(library, big)
    assert order.index("globex") < 8, "it did not wait for all of the other's"


async def test_a_document_replaced_while_it_is_read_ends_as_the_last_version(tmp_path: Path) -> None:
    started, go = asyncio.Event(), asyncio.Event()

    class Gated(HashingEmbedder):
        async def embed(self, texts, *, bulk=False):  # type: ignore[no-untyped-def]
            if bulk:
                started.set()
                await go.wait()
            return await super().embed(texts)

    async with opened(tmp_path, Gated(), LibraryLimits(readers=1)) as library:
        col = await library.create_collection("acme", "handbook")
        await put(library, col, "Old words.", id="a")
        await put(library, col, "Doomed words.", id="b")
        await started.wait()
        await put(library, col, "New words.", id="a")
        doomed = await library.catalogue.document(col.id, "b")
        assert doomed is not None
        await library.remove_document(col, doomed)
        go.set()
        await settled(library, col)
        assert await texts(library, col, "words") == ["New words."]


async def test_a_cancelled_batch_leaves_nothing(tmp_path: Path) -> None:
    started, go = asyncio.Event(), asyncio.Event()

    class Gated(HashingEmbedder):
        async def embed(self, texts, *, bulk=False):  # type: ignore[no-untyped-def]
            if bulk and "begun" in texts[0]:
                started.set()
                await go.wait()
            return await super().embed(texts)

    async with opened(tmp_path, Gated(), LibraryLimits(readers=1)) as library:
        col = await library.create_collection("acme", "handbook")
        await put(library, col, "Whole words.", id="whole")
        await settled(library, col)
        await put(library, col, "Words that are begun.", id="begun")
        await started.wait()
        await put(library, col, "Waiting words.", id="waiting")
        batch = await library.batches.add(col.id, ["whole", "begun", "waiting"])
        await library.cancel(col, batch)
        go.set()
        assert await library.batches.counts(batch) == {"ready": 1, "cancelled": 2}
        await put(library, col, "Later words.", id="later")  # read when the reader is done with the others
        assert await settled(library, col) == {"ready": 2, "cancelled": 2}
        assert sorted(await texts(library, col, "words")) == ["Later words.", "Whole words."]
        again = await put(library, col, "Waiting words.", id="waiting")
        assert again.status == "queued", "what was cancelled can be sent again"
        assert await settled(library, col) == {"ready": 3, "cancelled": 1}


async def _lists_batches_and_expiry(library: Library, col: Collection) -> None:
    for number in range(4):
        await put(library, col, f"Number {number}.", id=f"n{number}", distinct=True)  # type: ignore[arg-type]
    await settled(library, col)
    listed = library.listing
    newest = await listed.documents(col.id, Page(2))
    assert [one.id for one in newest] == ["n3", "n2", "n1"], "one more than asked for"
    marks = [(one.created_at, one.id) for one in newest]
    before = await listed.documents(col.id, Page(1, before=marks[2]))
    assert [one.id for one in before] == ["n3", "n2"]
    among = await listed.documents(col.id, Page(9, newest_first=False, after=marks[2]), statuses=["ready"])
    assert [one.id for one in among] == ["n2", "n3"]
    batch = await library.batches.add(col.id, ["n1", "n2", "gone"])
    assert [one.id for one in await listed.documents(col.id, Page(9), batch=batch.id)] == ["n2", "n1"]
    assert await library.batches.counts(batch) == {"ready": 2}
    totals = (await listed.totals([col.id]))[col.id]
    assert totals.by_status["ready"] == 5 and totals.bytes > 40
    assert [one.id for one in await listed.collections("acme", Page(9))] == [col.id]
    assert await library.batches.get("col_other", batch.id) is None

    documents = library.catalogue
    (n1,) = (await documents.some_documents(col.id, ["n1"])).values()
    await documents.describe_document(n1, name="n1", url="", metadata={"year": 2024, "public": True})
    assert await library.matching_documents(col, Comparison("gt", "year", 2023)) == ["n1"]
    assert await texts(library, col, "number", among=["n1"]) == ["Number 1."]
    await library.forget_file("other", "n1")
    assert await documents.document(col.id, "n1") is not None
    await library.forget_file("acme", "n1")
    assert await documents.document(col.id, "n1") is None

    # As a version before this one left it: nobody knows when it was last used.
    old_state = "UPDATE collections SET last_active_at = 0, created_at = ?"
    await library._database.execute(old_state, time.time() - 40 * 86400)
    await documents.describe_collection(col, title="Handbook", metadata={}, expires_days=1)
    assert await documents.expired_collections() == [], "days are counted from the change on"
    assert not await documents.empty_expired(col)
    assert [one.id for one in await listed.documents(col.id, Page(2))] == ["n3", "n2", "n0"]
    await library._database.execute("UPDATE collections SET last_active_at = ?", time.time() - 86401)
    (old,) = await documents.expired_collections()
    assert old.title == "Handbook" and library.expired(old)
    with pytest.raises(KnowledgeError, match="expired"):
        await put(library, old, "More.")
    assert await documents.empty_expired(old)
    await library.stores.drop(old)
    assert await documents.expired_collections() == [] and await library.batches.get(col.id, batch.id) is None


async def test_expiry_outlives_a_file_that_cannot_be_deleted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("penstock.knowledge.library.SWEEP_S", 0.01)
    async with opened(tmp_path) as library:
        first, second = [await library.create_collection("acme", name, expires_days=1) for name in ("a", "b")]
        dropped, both = list[str](), asyncio.Event()

        async def drop(collection: Collection) -> None:
            dropped.append(collection.id)
            if len(dropped) == 1:
                raise PermissionError(collection.id)
            both.set()

        monkeypatch.setattr(library.stores, "drop", drop)
        for col in (first, second):
            await put(library, col, "Words.")
            await settled(library, col)
        await library._database.execute("UPDATE collections SET last_active_at = ?", time.time() - 86401)
        await asyncio.wait_for(both.wait(), 60)
        assert sorted(dropped) == sorted([first.id, second.id])


async def test_lists_batches_and_expiry(tmp_path: Path) -> None:
    async with opened(tmp_path) as library:
        col = await library.create_collection("acme", "handbook")
        await put(library, col, "First.", id="a")
        await _lists_batches_and_expiry(library, col)


async def test_limits_and_names(tmp_path: Path) -> None:
    limits = LibraryLimits(collections=2, documents=2, chunks=3)
    async with opened(tmp_path, limits=limits) as library:
        col = await library.create_collection("acme", "one", chunk_tokens=32, overlap_tokens=0)
        with pytest.raises(CollectionExists):
            await library.create_collection("acme", "one")
        await library.create_collection("acme", "two")
        with pytest.raises(TooMany):
            await library.create_collection("acme", "three")
        await library.create_collection("globex", "one")
        with pytest.raises(KnowledgeError, match="window of 254"):
            await library.create_collection("globex", "large", chunk_tokens=300)
        await put(library, col, "First.")
        await put(library, col, "word " * 500)
        with pytest.raises(TooMany):
            await put(library, col, "Third.")
        assert await settled(library, col) == {"ready": 1, "failed": 1}


async def test_deleting_a_collection_deletes_its_files(tmp_path: Path) -> None:
    async with opened(tmp_path) as library:
        col = await library.create_collection("acme", "one")
        await put(library, col, "Pumps need oil.")
        await settled(library, col)
        await texts(library, col, "pumps")
        await library.remove_collection(col)
        assert await library.catalogue.collection("acme", "one") is None
        assert not await asyncio.to_thread(lambda: list((tmp_path / "k").glob(f"{col.id}*")))


async def test_another_embedding_model_is_not_mixed_in(tmp_path: Path) -> None:
    async with opened(tmp_path) as library:
        col = await library.create_collection("acme", "one")
        await put(library, col, "Pumps need oil.")
        await settled(library, col)
    async with opened(tmp_path, HashingEmbedder("other")) as library:
        with pytest.raises(KnowledgeError, match="was embedded with `hashing`"):
            await texts(library, col, "pumps")
        assert await texts(library, col, "pumps", mode="bm25", rerank=False) == ["Pumps need oil."]


async def test_the_whole_of_it_in_postgresql(pgvector_url: str) -> None:
    library = await Library.open(pgvector_url, HashingEmbedder())
    try:
        col = await library.create_collection("acme", "handbook")
        first = await put(library, col, "# Leave\n\nParents get twelve weeks.")
        await put(library, col, "The office opens at eight.")
        await put(library, col, "The office opens at eight.", id="twin")
        assert await settled(library, col) == {"ready": 2, "duplicate": 1}
        assert (await texts(library, col, "weeks for parents", keep=1)) == ["Parents get twelve weeks."]
        await library.remove_document(col, first)
        assert (await texts(library, col, "office opens")) == ["The office opens at eight."]
        await _lists_batches_and_expiry(library, col)
        await library.remove_collection(col)
        assert await library.catalogue.collections("acme", limit=9) == []
    finally:
        await library.close()


async def test_late_interaction_finds_the_passage_that_says_it(tmp_path: Path) -> None:
    """Two passages about the same things, of which one answers; the vectors of the whole cannot tell them apart."""
    async with opened(tmp_path) as library:
        col = await library.create_collection("acme", "handbook")
        answer = "warranty covers pump gasket valve seal hose filter rotor"
        other = "warranty warranty pump pump gasket valve seal hose"
        await put(library, col, answer, id="a")
        await put(library, col, other, id="b")
        await settled(library, col)
        query = "warranty pump rotor"
        found = await library.retriever.search(col, query, mode="vector", rerank=False)
        assert [passage.document.id for passage in found.passages] == ["b", "a"]
        assert (await texts(library, col, query, mode="vector"))[0] == answer


async def test_lost_chunks_are_an_error_and_not_an_empty_collection(tmp_path: Path) -> None:
    async with opened(tmp_path) as library:
        col = await library.create_collection("acme", "notes")
        assert await texts(library, col, "cats") == [], "nothing was ingested, so there is no file"
        await put(library, col, "Cats sleep a lot.", media_type="text/plain")
        assert await settled(library, col) == {"ready": 1}
        for file in (tmp_path / "k").glob(f"{col.id}.*"):
            file.unlink()
        with pytest.raises(DatabaseError, match="deleted"):  # while open
            await texts(library, col, "cats")
    async with opened(tmp_path) as library:  # and after a restart
        with pytest.raises(DatabaseError, match="missing"):
            await texts(library, col, "cats")
        assert not list((tmp_path / "k").glob(f"{col.id}.*"))
        await library.remove_collection(col)
