"""The facade of collections that the gateway's endpoints use.

Opened by URL: a folder of SQLite files, or a PostgreSQL database. Every method takes the tenant and finds nothing of
any other's.
"""

from __future__ import annotations

import hashlib
import uuid
from collections.abc import Mapping
from pathlib import Path

from penstock.knowledge.catalogue import Catalogue
from penstock.knowledge.chunks.base import ChunkStores
from penstock.knowledge.chunks.files import SQLiteStores
from penstock.knowledge.chunks.postgres import PostgresStores
from penstock.knowledge.embedder import Embedder
from penstock.knowledge.entities import (
    CHUNK_PREFIX,
    Collection,
    Document,
    KnowledgeError,
    StoredChunk,
    TooMany,
)
from penstock.knowledge.ingest import Ingestor, Meter
from penstock.knowledge.late_interaction import LateInteraction
from penstock.knowledge.limits import LibraryLimits
from penstock.knowledge.queue import IngestQueue
from penstock.knowledge.retrieval import Reranker, Retriever
from penstock.storage import Database, open_database

SQLITE = "sqlite:///"
CATALOGUE = "catalogue.db"


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
    ) -> None:
        self.limits = limits or LibraryLimits()
        self.catalogue = Catalogue(database)
        self.embedder = embedder
        self._database = database
        self._owned = True
        self.stores = stores
        self.queue = IngestQueue(database)
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
        library = cls(database, stores, embedder, reranker=reranker, limits=limits, meter=meter)
        library._owned = shared is None
        await library.catalogue.prepare()
        library._ingestor.start()
        return library

    async def close(self) -> None:
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
    ) -> Collection:
        if await self.catalogue.collection_count(tenant) >= self.limits.collections:
            raise TooMany(f"The limit of {self.limits.collections} collections is reached; delete one.")
        facts = await self.embedder.facts()
        if chunk_tokens > facts.window - 2:
            raise KnowledgeError(
                f"`{self.embedder.name}` has a window of {facts.window - 2} tokens; choose smaller chunks."
            )
        return await self.catalogue.add_collection(
            tenant,
            name,
            description=description,
            metadata=metadata or {},
            embedding_model=self.embedder.name,
            dimensions=facts.dimensions,
            chunk_tokens=chunk_tokens,
            overlap_tokens=overlap_tokens,
        )

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
        metadata: Mapping[str, str] | None = None,
    ) -> tuple[Document, bool]:
        """Stores a document; returns whether there is anything to ingest. Without an id, existing content is that
        document; with one, the document with that id is replaced."""
        digest = hashlib.sha256(body).hexdigest()
        said = metadata or {}
        if id is None:
            same = await self.catalogue.with_digest(collection.id, digest)
            if same is not None:
                return same, False
            id = f"doc_{uuid.uuid4().hex}"
            before = None
        else:
            before = await self.catalogue.document(collection.id, id)
        if before is not None and (before.digest, before.media_type) == (digest, media_type):
            if before.status != "failed":
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
        )
        if document.status == "duplicate":
            async with self.stores.use(collection) as store:
                await store.replace(id, [])  # its old chunks
        self._ingestor.wake()
        return document, document.status == "queued"

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

    async def _check_room(self, collection: Collection) -> None:
        if await self.catalogue.document_count(collection.id) >= self.limits.documents:
            raise TooMany(f"The collection has reached the limit of {self.limits.documents} documents.")
        if await self.catalogue.pending(collection.tenant) >= self.limits.waiting:
            raise TooMany(f"{self.limits.waiting} documents are waiting to be ingested; send more later.")
