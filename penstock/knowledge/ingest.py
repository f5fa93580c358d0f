"""Ingestion: turns documents into searchable chunks, in the background.

A fixed number of workers take documents from the queue in the database, round robin over tenants, so that one tenant's
ten thousand documents do not delay another's one. Each worker has a reader process of its own, and no tenant's
documents occupy all of them, so that one which takes long to read delays its own tenant's only. The queue survives a
crash; unfinished work is repeated. Memory is bounded by the number of workers, each with one document and a few
batches of vectors.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Protocol

from penstock.errors import PenstockError
from penstock.knowledge.chunks.base import ChunkStores, EmbeddedChunk
from penstock.knowledge.embedder import Embedded, Embedder
from penstock.knowledge.entities import SERVER_FAILED, Chunk, KnowledgeError, UnreadableDocument
from penstock.knowledge.late_interaction import pack
from penstock.knowledge.queue import LEASE_S, MOST_ATTEMPTS, Claim, IngestQueue
from penstock.knowledge.readers.process import ReaderProcess
from penstock.knowledge.readers.worker import Task
from penstock.storage import DatabaseError

log = logging.getLogger(__name__)

BATCH = 16
"""Chunks embedded by one call."""
POLL_S = 2.0
"""How often an idle gateway polls for documents that other gateways queued."""
RENEW_S = LEASE_S / 3
"""How often the claim of a document that is being read is renewed: a large one may take longer than the lease."""
PAUSE_S = 5.0
"""Pause after a failure that is not the document's fault."""


class Meter(Protocol):
    """Receives results, for metrics."""

    def ingested(self, status: str, chunks: int, tokens: int, seconds: float) -> None: ...


class Ingestor:
    """The ingestion workers of one gateway."""

    def __init__(
        self,
        queue: IngestQueue,
        stores: ChunkStores,
        embedder: Embedder,
        *,
        readers: int,
        most_chunks: int,
        meter: Meter | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._queue = queue
        self._stores = stores
        self._embedder = embedder
        self._readers = readers
        self._most_chunks = most_chunks
        self._meter = meter
        self._clock = clock
        self._processes = [ReaderProcess() for _ in range(readers)]
        self._reading: Counter[str] = Counter()
        """Documents that are being read, by tenant."""
        self._news = asyncio.Event()
        self._served: dict[str, float] = {}
        self._tasks: list[asyncio.Task[None]] = []

    def start(self) -> None:
        self._tasks = [
            asyncio.create_task(self._run(process), name=f"document reader {number}")
            for number, process in enumerate(self._processes)
        ]

    def wake(self) -> None:
        """Wakes the workers: a document was queued."""
        self._news.set()

    async def close(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for process in self._processes:
            await process.close()

    async def _run(self, process: ReaderProcess) -> None:
        while True:
            try:
                claim = await self._next()
                if claim is not None:
                    await self._ingest(claim, process)
                    continue
            except DatabaseError as error:
                log.warning("ingest queue cannot be read", extra={"why": str(error)})
                await asyncio.sleep(PAUSE_S)
            except Exception:  # without this worker fewer documents would be read, or none
                log.exception("a reader of documents failed, and goes on")
                await asyncio.sleep(PAUSE_S)
            self._news.clear()
            try:
                async with asyncio.timeout(POLL_S):
                    await self._news.wait()
            except TimeoutError:
                pass

    async def _next(self) -> Claim | None:
        """A document of the least recently served tenant."""
        waiting = await self._queue.waiting_tenants()
        self._served = {tenant: at for tenant, at in self._served.items() if tenant in waiting}
        most = max(1, self._readers - 1)
        for tenant in sorted(waiting, key=lambda name: self._served.get(name, 0.0)):
            if self._reading[tenant] >= most:
                continue  # the last reader is for the others
            self._served[tenant] = self._clock()
            self._reading[tenant] += 1
            claim = None
            try:
                claim = await self._queue.claim(tenant)
            finally:
                if claim is None:
                    self._read(tenant)
            if claim is not None:
                return claim
        return None

    def _read(self, tenant: str) -> None:
        """A document of a tenant is no longer being read."""
        self._reading[tenant] -= 1
        if not self._reading[tenant]:
            del self._reading[tenant]
        self._news.set()

    async def _ingest(self, claim: Claim, process: ReaderProcess) -> None:
        began, document = self._clock(), claim.document
        try:
            try:
                if claim.attempts > MOST_ATTEMPTS:
                    raise UnreadableDocument("The document crashed its reader several times.")
                chunks = await self._chunks(claim, process)
            finally:
                self._read(claim.collection.tenant)
            if chunks is None:
                return
            embedded = await self._embedded(claim, chunks)
            if embedded is None:
                return
            async with self._stores.use(claim.collection) as store:
                await store.replace(document.id, embedded)
                tokens = sum(chunk.tokens for chunk in chunks)
                kept = await self._queue.finish(document, chunks=len(chunks), tokens=tokens)
            if not kept:
                await self._forget(claim)
            self._told("ready", len(chunks), tokens, began)
        except KnowledgeError as error:
            await self._queue.fail(document, str(error))
            await self._forget(claim, failed=True)
            self._told("failed", 0, 0, began)
        except asyncio.CancelledError:
            await asyncio.shield(self._queue.release(document))
            raise
        except DatabaseError:
            raise  # the lease will expire
        except PenstockError as error:
            # The embedding engine is down or busy: the document is retried later.
            log.warning("document could not be embedded; retrying", extra={"document": document.id, "why": str(error)})
            await self._queue.release(document)
            await asyncio.sleep(PAUSE_S)
        except Exception:
            # A bug of ours: only this document fails, the others are still ingested.
            log.exception("document could not be ingested", extra={"document": document.id})
            await self._queue.fail(document, SERVER_FAILED)
            self._told("failed", 0, 0, began)

    async def _forget(self, claim: Claim, *, failed: bool = False) -> None:
        """Removes the chunks of a document that was deleted or cancelled during ingestion, or that failed."""
        if not await self._queue.collection_exists(claim.collection):
            await self._stores.drop(claim.collection)
        elif failed or not await self._queue.wanted(claim.document):
            async with self._stores.use(claim.collection) as store:
                await store.replace(claim.document.id, [])

    async def _chunks(self, claim: Claim, process: ReaderProcess) -> list[Chunk] | None:
        """The chunks of a document; None when it was replaced or deleted meanwhile."""
        document, collection = claim.document, claim.collection
        if collection.embedding_model != self._embedder.name:
            raise KnowledgeError(
                f"The collection is embedded with `{collection.embedding_model}`, which this server does not serve "
                f"for collections; it has `{self._embedder.name}`."
            )
        facts = await self._embedder.facts()  # the tokenizer is available only once the model is up
        task = Task(
            len(claim.body),
            document.media_type,
            claim.charset,
            document.name,
            facts.tokenizer,
            document.chunk_tokens or collection.chunk_tokens,
            document.overlap_tokens if document.chunk_tokens else collection.overlap_tokens,
            self._most_chunks,
        )
        reading = asyncio.create_task(process.read(task, claim.body), name="a document")
        try:
            while not (await asyncio.wait((reading,), timeout=RENEW_S))[0]:
                if not await self._queue.progress(document, chunks=0, done=0):
                    return None
        finally:
            reading.cancel()
            await asyncio.wait((reading,))
        chunks = reading.result()
        if not chunks:
            raise UnreadableDocument("The document contains headings but no text.")
        return chunks

    async def _embedded(self, claim: Claim, chunks: Sequence[Chunk]) -> list[EmbeddedChunk] | None:
        """The embedded chunks; None when the document was replaced or deleted meanwhile."""
        embedded: list[EmbeddedChunk] = []
        while len(embedded) < len(chunks):
            if not await self._queue.progress(claim.document, chunks=len(chunks), done=len(embedded)):
                return None
            batch = chunks[len(embedded) : len(embedded) + BATCH]
            texts = [one.embedded for one in batch]
            made = await self._embedder.embed(texts, bulk=True)
            packed = await asyncio.to_thread(self._packed, texts, made)
            embedded += (EmbeddedChunk(*parts) for parts in zip(batch, made.vectors, packed, strict=True))
        return embedded

    def _packed(self, texts: Sequence[str], made: Embedded) -> list[bytes]:
        rows = zip(self._embedder.tokens(texts), made.by_token, made.vectors, strict=True)
        return [pack(*row) for row in rows]

    def _told(self, status: str, chunks: int, tokens: int, began: float) -> None:
        if self._meter is not None:
            self._meter.ingested(status, chunks, tokens, self._clock() - began)
