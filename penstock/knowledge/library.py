"""The facade of collections that the gateway's endpoints use.

Opened by URL: a folder of SQLite files, or a PostgreSQL database. Every method takes the tenant and finds nothing of
any other's.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from penstock.errors import PenstockError
from penstock.knowledge.catalogue import Catalogue
from penstock.knowledge.chunks.base import ChunkStores
from penstock.knowledge.chunks.files import SQLiteStores
from penstock.knowledge.chunks.postgres import PostgresStores
from penstock.knowledge.document_batches import Batch, DocumentBatches
from penstock.knowledge.embedder import Embedder, EmbedderFacts
from penstock.knowledge.entities import (
    CHUNK_PREFIX,
    Attribute,
    Collection,
    Document,
    KnowledgeError,
    StoredChunk,
    TooMany,
)
from penstock.knowledge.filters import AttributeFilter, passing
from penstock.knowledge.ingest import Ingestor, Meter
from penstock.knowledge.late_interaction import LateInteraction
from penstock.knowledge.limits import LibraryLimits
from penstock.knowledge.pages import Listing
from penstock.knowledge.queue import IngestQueue
from penstock.knowledge.retrieval import Reranker, Retriever
from penstock.storage import Database, open_database

log = logging.getLogger(__name__)

SQLITE = "sqlite:///"
CATALOGUE = "catalogue.db"
SWEEP_S = 60.0
"""How often expired collections are looked for."""


class Library:
    """The collections of all tenants."""

    def __init__(
        self,
        database: Database,
        stores: ChunkStores,
        embedder: Embedder,
        *,
        reranker: Reranker | None = None,
        limits: LibraryLimits | None = None,
        meter: Meter | None = None,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self.limits = limits or LibraryLimits()
        self.catalogue = Catalogue(database, clock)
        self.embedder = embedder
        self._database = database
        self._owned = True
        self.stores = stores
        self.queue = IngestQueue(database)
        self.batches = DocumentBatches(database, clock)
        self.listing = Listing(database)
        self._clock = clock
        self._sweeper: asyncio.Task[None] | None = None
        self._ingestor = Ingestor(
            self.queue,
            stores,
            embedder,
            readers=self.limits.readers,
            most_chunks=self.limits.chunks,
            meter=meter,
        )
        self.retriever = Retriever(self.catalogue, stores, embedder, reranker or LateInteraction())

    @classmethod
    async def open(
        cls,
        url: str,
        embedder: Embedder,
        *,
        shared: Database | None = None,
        reranker: Reranker | None = None,
        limits: LibraryLimits | None = None,
        meter: Meter | None = None,
        clock: Callable[[], float] = time.time,
    ) -> Library:
        """Opens `sqlite:///FOLDER` or `postgresql://...` and starts ingestion. `shared`: an open PostgreSQL
        database, which stays open."""
        stores: SQLiteStores | PostgresStores
        if url.startswith(SQLITE):
            folder = Path(url.removeprefix(SQLITE))
            database = await open_database(f"{SQLITE}{folder / CATALOGUE}")
            stores = SQLiteStores(folder, expected=Catalogue(database).has_chunks)
        else:
            database = shared or await open_database(url)
            stores = PostgresStores(database)
            await stores.prepare()
        library = cls(database, stores, embedder, reranker=reranker, limits=limits, meter=meter, clock=clock)
        library._owned = shared is None
        await library.catalogue.prepare()
        library._ingestor.start()
        library._sweeper = asyncio.create_task(library._sweep(), name="expiry of collections")
        return library

    async def close(self) -> None:
        if self._sweeper is not None:
            self._sweeper.cancel()
            await asyncio.gather(self._sweeper, return_exceptions=True)
        await self._ingestor.close()
        await self.stores.close()
        if self._owned:
            await self._database.close()

    async def create_collection(
        self,
        tenant: str,
        name: str,
        *,
        description: str = "",
        metadata: Mapping[str, str] | None = None,
        chunk_tokens: int = 200,
        overlap_tokens: int = 32,
        title: str = "",
        expires_days: int = 0,
    ) -> Collection:
        if await self.catalogue.collection_count(tenant) >= self.limits.collections:
            raise TooMany(f"The limit of {self.limits.collections} collections is reached; delete one.")
        facts = await self._check_chunks(chunk_tokens)
        return await self.catalogue.add_collection(
            tenant,
            name,
            description=description,
            metadata=metadata or {},
            embedding_model=self.embedder.name,
            dimensions=facts.dimensions,
            chunk_tokens=chunk_tokens,
            overlap_tokens=overlap_tokens,
            title=title,
            expires_days=expires_days,
        )

    def expired(self, collection: Collection) -> bool:
        """Whether nobody used a collection for longer than it is to be kept."""
        return collection.expires_at is not None and collection.expires_at <= self._clock()

    async def use(self, collection: Collection) -> None:
        """A collection is about to be searched or written to; raises where it has expired."""
        if self.expired(collection):
            raise KnowledgeError(f"`{collection.id}` has expired: nobody used it for {collection.expires_days} days.")
        await self.catalogue.note_use(collection)

    async def remove_collection(self, collection: Collection) -> None:
        await self.catalogue.remove_collection(collection)
        await self.stores.drop(collection)

    async def put_document(
        self,
        collection: Collection,
        body: bytes,
        *,
        name: str,
        media_type: str,
        charset: str = "",
        id: str | None = None,
        url: str = "",
        metadata: Mapping[str, Attribute] | None = None,
        chunks: tuple[int, int] = (0, 0),
        distinct: bool = False,
    ) -> tuple[Document, bool]:
        """Stores a document; returns whether there is anything to ingest. Without an id, existing content is that
        document; with one, the document with that id is replaced. `chunks`: their size and overlap in tokens, if not
        those of the collection; `distinct`: whatever else has the same content."""
        await self.use(collection)
        if chunks[0]:
            await self._check_chunks(chunks[0])
        digest = (await asyncio.to_thread(hashlib.sha256, body)).hexdigest()
        said = metadata or {}
        if id is None:
            same = await self.catalogue.with_digest(collection.id, digest)
            if same is not None:
                return same, False
            id = f"doc_{uuid.uuid4().hex}"
            before = None
        else:
            before = await self.catalogue.document(collection.id, id)
        same_chunks = before is not None and (before.chunk_tokens, before.overlap_tokens) == chunks
        if before is not None and same_chunks and (before.digest, before.media_type) == (digest, media_type):
            if before.status not in ("failed", "cancelled"):
                await self.catalogue.describe_document(before, name=name, url=url, metadata=said)
                return await self.catalogue.document(collection.id, id) or before, False
        elif before is None:
            await self._check_room(collection)
        document = await self.catalogue.put_document(
            collection,
            id,
            name=name,
            url=url,
            media_type=media_type,
            charset=charset,
            digest=digest,
            metadata=said,
            body=body,
            chunk_tokens=chunks[0],
            overlap_tokens=chunks[1],
            distinct=distinct,
        )
        if document.status == "duplicate":
            async with self.stores.use(collection) as store:
                await store.replace(id, [])  # its old chunks
        self._ingestor.wake()
        return document, document.status == "queued"

    async def refuse_document(
        self, collection: Collection, id: str, *, name: str, metadata: Mapping[str, Attribute], error: str
    ) -> Document:
        """Records that a document cannot be ingested; what it had before is gone."""
        if await self.catalogue.document(collection.id, id) is None:
            await self._check_room(collection)
        document = await self.catalogue.put_document(
            collection,
            id,
            name=name,
            url="",
            media_type="application/octet-stream",
            charset="",
            digest="",
            metadata=metadata,
            body=b"",
            error=error,
        )
        await self._drop_chunks(collection, [id])
        return document

    async def cancel(self, collection: Collection, batch: Batch) -> None:
        """Ends the ingestion of documents of a batch that are not ingested yet."""
        await self.batches.cancel(batch)
        waiting = await self.catalogue.cancel_documents(collection.id, await self.batches.documents(batch))
        await self._drop_chunks(collection, waiting)

    async def matching_documents(self, collection: Collection, wanted: AttributeFilter) -> Sequence[str]:
        """The documents whose metadata a filter lets through."""
        found = await self.catalogue.attributes(collection.id)
        return await asyncio.to_thread(passing, found, wanted)

    async def forget_file(self, tenant: str, id: str) -> None:
        """Removes the documents that were made from a file."""
        for collection, document in await self.catalogue.copies(tenant, id):
            await self.remove_document(collection, document)

    async def remove_document(self, collection: Collection, document: Document) -> None:
        await self.catalogue.remove_document(document)
        async with self.stores.use(collection) as store:
            await store.replace(document.id, [])
        self._ingestor.wake()  # a duplicate may take its place

    async def chunk(self, collection: Collection, id: str) -> tuple[StoredChunk, Document] | None:
        """A chunk by the id in a citation."""
        digits = id.removeprefix(CHUNK_PREFIX)
        if not id.startswith(CHUNK_PREFIX) or not digits.isascii() or not digits.isdigit() or len(digits) > 18:
            return None
        async with self.stores.use(collection) as store:
            found = (await store.fetch([int(digits)])).get(int(digits))
        document = None if found is None else await self.catalogue.document(collection.id, found.document)
        return None if found is None or document is None else (found, document)

    async def chunks(self, collection: Collection, document: Document) -> list[StoredChunk]:
        async with self.stores.use(collection) as store:
            return await store.of_document(document.id)

    async def _drop_chunks(self, collection: Collection, documents: Sequence[str]) -> None:
        async with self.stores.use(collection) as store:
            for id in documents:
                await store.replace(id, [])

    async def _check_chunks(self, tokens: int) -> EmbedderFacts:
        facts = await self.embedder.facts()
        if tokens > facts.window - 2:
            raise KnowledgeError(
                f"`{self.embedder.name}` has a window of {facts.window - 2} tokens; choose smaller chunks."
            )
        return facts

    async def _sweep(self) -> None:
        """Deletes the documents of expired collections. Every gateway does; what is gone already is no harm."""
        while True:
            try:
                for collection in await self.catalogue.expired_collections():
                    if await self.catalogue.empty_expired(collection):
                        await self.stores.drop(collection)
                        log.info("collection expired", extra={"collection": collection.id})
            except PenstockError as error:
                log.warning("expired collections cannot be deleted", extra={"why": str(error)})
            except Exception:
                log.exception("expired collections cannot be deleted")  # a file that cannot be deleted, or a bug
            await asyncio.sleep(SWEEP_S)

    async def _check_room(self, collection: Collection) -> None:
        if await self.catalogue.document_count(collection.id) >= self.limits.documents:
            raise TooMany(f"The collection has reached the limit of {self.limits.documents} documents.")
        if await self.catalogue.pending(collection.tenant) >= self.limits.waiting:
            raise TooMany(f"{self.limits.waiting} documents are waiting to be ingested; send more later.")
