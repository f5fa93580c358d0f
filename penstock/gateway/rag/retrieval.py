"""`rag` on a conversation: search while the request waits for its engine, then put the sources before the question.

The search begins as soon as the messages have passed the content filter; the route, the grammar and the length of the
prompt without sources are worked out meanwhile. Sources go into this request's prompt only: what the client sent, and
what is stored of a conversation, stays as it was.
"""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import Awaitable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any, Literal, TypeVar

from penstock.gateway.app.exchange import Exchange
from penstock.gateway.generation.schemas import QUERY_CHARACTERS, RagRequest
from penstock.gateway.generation.sources import TextCheck
from penstock.gateway.rag.library import KnowledgeLibrary
from penstock.gateway.rag.schemas import SearchRequest
from penstock.identity import Caller
from penstock.knowledge.citations import Citation, Citer
from penstock.knowledge.entities import Chunk, Collection, KnowledgeError, Passage
from penstock.knowledge.passage_prompt import INSTRUCTIONS, Context, Count, framed, question
from penstock.knowledge.retrieval import Found
from penstock.knowledge.terms import STOP_WORDS, words
from penstock.protocol.errors import InvalidRequest, NotFound, ServiceUnavailable
from penstock.storage import DatabaseError

T = TypeVar("T")

_NAME = re.compile(r"[A-Za-z0-9._-]{1,128}")
SIZE_FRESH_S = 5.0
"""How long the size of a collection is taken as known."""
MOST_SIZES = 1024
"""Collections whose size is remembered."""
TELLING_WORDS = 3
"""A question with fewer (`and in Spain?`) is searched together with the one before it."""


@dataclass(frozen=True, slots=True)
class RetrievedSources:
    """What an answer was given to draw from; see `generation.sources.Sources`."""

    collection: Collection
    context: Context
    found: Found
    query: str
    citations: Literal["auto", "model", "none"]

    def citer(self, *, attribute: bool) -> Citer | None:
        if self.citations == "none":
            return None
        return Citer(self.context.sources, attribute=attribute and self.citations == "auto", question=self.query)

    def in_prompt(self, messages: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
        return with_sources(with_instructions(messages), self.context)

    def texts(self) -> dict[int, str]:
        return {source.number: source.text for source in self.context.sources}

    def report(self) -> dict[str, Any]:
        return {
            "collection": self.collection.id,
            "context_tokens": self.context.tokens,
            "sources": [
                {"n": source.number, **passage_body(source.passage), "shortened": source.shortened}
                for source in self.context.sources
            ],
            "timings_ms": {step: round(seconds * 1000, 2) for step, seconds in self.found.seconds.items()},
        }

    def annotation(self, citation: Citation, *, flat: bool = False) -> dict[str, Any]:
        document = citation.source.passage.document
        cited = {
            "start_index": citation.start,
            "end_index": citation.end,
            "title": document.name,
            "url": document.url or f"/v1/collections/{self.collection.id}/documents/{document.id}",
        }
        return {
            "type": "url_citation",
            **(cited if flat else {"url_citation": cited}),
            "n": citation.source.number,
            "origin": citation.origin,
            **place_body(citation.source.passage),
        }


@dataclass(frozen=True, slots=True)
class _Size:
    """Of a collection, when it was last asked for."""

    chunks: int
    tokens: int
    read_at: float


class CollectionSearch:
    """Searches the collections of a tenant."""

    def __init__(self, library: KnowledgeLibrary) -> None:
        self._library = library
        self._sizes: dict[str, _Size] = {}

    async def expected_tokens(self, caller: Caller, wanted: RagRequest) -> int:
        """As many chunks of the usual size as are kept, if there are so many."""
        collection = await find_collection(self._library, caller, wanted.collection, param="rag.collection")
        size, now = self._sizes.get(collection.id), time.monotonic()
        if size is None or size.read_at + SIZE_FRESH_S < now:
            _, chunks, tokens = await guard((await self._library.library()).catalogue.counts(collection.id))
            if len(self._sizes) >= MOST_SIZES:
                self._sizes.clear()
            size = self._sizes[collection.id] = _Size(chunks, tokens, now)
        config = self._library.config
        kept = min(wanted.top_k or config.passages, size.chunks)
        most = min(config.context_tokens, wanted.context_tokens or config.context_tokens)
        return min(kept * size.tokens // max(size.chunks, 1), most)

    def permit(self, exchange: Exchange) -> None:
        self._library.permit(exchange)

    def begin(self, caller: Caller, wanted: RagRequest, messages: Sequence[dict[str, Any]]) -> Retrieval:
        return Retrieval(self._library, caller, wanted, messages)


class Retrieval:
    """A search that runs while the rest of a request is prepared. It must be closed."""

    def __init__(
        self, library: KnowledgeLibrary, caller: Caller, wanted: RagRequest, messages: Sequence[dict[str, Any]]
    ) -> None:
        self._query = wanted.query or query_of(messages)
        self._wanted = wanted
        self._most = library.config.context_tokens
        self._task = asyncio.create_task(self._search(library, caller, self._query), name="retrieval of a request")

    def instructed(self, messages: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
        return with_instructions(messages)

    async def result(self, count: Count, room: int, check: TextCheck) -> RetrievedSources:
        collection, found = await self._task
        most = min(room, self._most, self._wanted.context_tokens or self._most)
        passages = [await _checked(passage, check) for passage in found.passages]
        context = await asyncio.to_thread(framed, passages, count, most)
        if passages and not context.sources:
            raise InvalidRequest(
                f"There is no room for sources in the context window ({max(most, 0)} tokens are left for them). "
                "Ask for fewer completion tokens, or send a shorter conversation.",
                param="rag",
                code="context_length_exceeded",
            )
        return RetrievedSources(collection, context, found, self._query, self._wanted.citations or "auto")

    async def close(self) -> None:
        self._task.cancel()
        with suppress(asyncio.CancelledError, Exception):  # `result` has raised it already
            await self._task

    async def _search(self, library: KnowledgeLibrary, caller: Caller, query: str) -> tuple[Collection, Found]:
        collection = await find_collection(library, caller, self._wanted.collection, param="rag.collection")
        return collection, await search(library, collection, query, self._wanted)


async def _checked(passage: Passage, check: TextCheck) -> Passage:
    """What a model may see of a passage."""
    stored, document = passage.stored, passage.document
    chunk = replace(
        stored.chunk,
        text=await check(stored.chunk.text),
        heading=await check(stored.chunk.heading) if stored.chunk.heading else "",
    )
    document = replace(document, name=await check(document.name))
    return replace(passage, stored=replace(stored, chunk=chunk), document=document)


async def search(
    knowledge: KnowledgeLibrary, collection: Collection, query: str, wanted: RagRequest | SearchRequest
) -> Found:
    keep = wanted.top_k or knowledge.config.passages
    library = await knowledge.library()
    await guard(library.use(collection))
    found = await guard(
        library.retriever.search(
            collection,
            query,
            mode=wanted.mode or "hybrid",
            candidates=max(wanted.candidates or knowledge.config.candidates, keep),
            keep=keep,
            rerank=wanted.rerank is not False,
        )
    )
    knowledge.metrics.searched(found.seconds)
    return found


async def find_collection(
    knowledge: KnowledgeLibrary, caller: Caller, name: str, *, param: str | None = None
) -> Collection:
    """A collection of the caller's tenant that exists for the caller, by id or name."""
    library = await knowledge.library()
    found = await guard(library.catalogue.collection(caller.tenant, name)) if _NAME.fullmatch(name) else None
    if found is None or not allowed(caller, found):
        raise NotFound(f"There is no collection `{name[:128]}`.", param=param, code="collection_not_found")
    return found


def allowed(caller: Caller, collection: Collection) -> bool:
    """Whether a collection exists for a caller."""
    return caller.access.allows("collection", collection.name, collection.tenant, (collection.id,))


async def guard(work: Awaitable[T]) -> T:
    try:
        return await work
    except KnowledgeError as error:
        raise InvalidRequest(str(error)) from error
    except DatabaseError as error:
        raise ServiceUnavailable("The store of collections cannot be reached at the moment.") from error


def query_of(messages: Sequence[dict[str, Any]]) -> str:
    """What the user asks: the last message, with the one before it where the last alone says too little."""
    asked = [message["content"][-QUERY_CHARACTERS:] for message in messages if message["role"] == "user"]
    if not asked:
        raise InvalidRequest("`rag` needs a message of the user, or `rag.query`.", param="rag")
    telling = {word for word in words(asked[-1]) if word not in STOP_WORDS}
    wanted = asked[-2:] if len(telling) < TELLING_WORDS else asked[-1:]
    return "\n".join(wanted)[-QUERY_CHARACTERS:]


def with_instructions(messages: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """The conversation with instructions on how to use sources, after the system prompt."""
    first, *rest = messages
    if first["role"] == "system":
        return [{**first, "content": f"{first['content']}\n\n{INSTRUCTIONS}"}, *rest]
    return [{"role": "system", "content": INSTRUCTIONS}, *messages]


def with_sources(messages: Sequence[dict[str, Any]], context: Context) -> list[dict[str, Any]]:
    """The conversation, with the sources in the last message of the user."""
    changed = list(messages)
    for index in reversed(range(len(changed))):
        if changed[index]["role"] == "user":
            changed[index] = {**changed[index], "content": question(context, changed[index]["content"])}
            break
    return changed


def passage_body(passage: Passage) -> dict[str, Any]:
    return {
        **place_body(passage),
        "heading": passage.stored.chunk.heading,
        "url": passage.document.url or None,
        "tokens": passage.stored.chunk.tokens,
        "score": round(passage.score, 6),
        "scores": {name: round(score, 6) for name, score in passage.scores.items()},
    }


def place_body(passage: Passage) -> dict[str, Any]:
    """Where a passage is: the chunk, its document, its place in the document's text."""
    return {
        "chunk_id": passage.stored.id,
        "document_id": passage.document.id,
        "document": passage.document.name,
        "position": position_body(passage.stored.chunk),
    }


def position_body(chunk: Chunk) -> dict[str, Any]:
    return {"ordinal": chunk.ordinal, "start": chunk.start, "end": chunk.end, "page": chunk.page}
