"""The tool `file_search`: what a model asks for is searched in vector stores, and the answer cites what was found.

Passages are numbered through all searches of one answer, so that `[2]` means one of them only.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any

from penstock.gateway.app.exchange import Exchange
from penstock.gateway.generation.schemas import QUERY_CHARACTERS
from penstock.gateway.rag.library import KnowledgeLibrary
from penstock.gateway.rag.retrieval import place_body
from penstock.gateway.rag.vector_stores.attachment import find_store
from penstock.gateway.rag.vector_stores.search import Hit, StoreSearch, search_stores
from penstock.knowledge.citations import Citation, Citer
from penstock.knowledge.entities import Collection
from penstock.knowledge.passage_prompt import FOUND, Count, Source, framed, neutral

MOST_QUERIES = 8
"""Of one call."""
DEFAULT_RESULTS = 10
NAME = "file_search"
DESCRIPTION = (
    "Searches the user's files and returns numbered passages. Call it before you answer a question that the files may "
    "answer."
)
PARAMETERS: dict[str, Any] = {
    "type": "object",
    "properties": {
        "queries": {
            "type": "array",
            "items": {"type": "string"},
            "description": "What to search for: one or more questions or phrases, each complete by itself.",
        }
    },
    "required": ["queries"],
    "additionalProperties": False,
}


class FileSearches:
    """Opens the searches of requests."""

    def __init__(self, knowledge: KnowledgeLibrary) -> None:
        self._knowledge = knowledge

    async def open(self, exchange: Exchange, stores: Sequence[str], wanted: StoreSearch, at: str) -> FileSearch:
        """404 where a store does not exist for the caller."""
        search = FileSearch(self._knowledge, exchange, list(dict.fromkeys(stores)), wanted)
        await search.stores(f"{at}.vector_store_ids")
        return search


class FileSearch:
    """The searches of one answer, and the sources they found; see `generation.sources.Sources`."""

    def __init__(
        self, knowledge: KnowledgeLibrary, exchange: Exchange, stores: Sequence[str], wanted: StoreSearch
    ) -> None:
        self._knowledge = knowledge
        self._exchange = exchange
        self._ids = stores
        self._wanted = wanted
        self._sources: list[Source] = []
        self._queries: list[str] = []
        self._numbering = asyncio.Lock()
        self.found: dict[str, list[Hit]] = {}
        """What the model was shown, by the id of the call."""

    async def stores(self, param: str | None = None) -> list[Collection]:
        """As they are now: a model may take long before it asks."""
        return [await find_store(self._knowledge, self._exchange.caller, id, param=param) for id in self._ids]

    @property
    def has_sources(self) -> bool:
        return bool(self._sources)

    async def run(self, call: str, queries: Sequence[str], count: Count, room: int) -> str:
        """Search; returns passages for the model, at most `room` tokens of them."""
        self._knowledge.permit(self._exchange)
        hits = await search_stores(self._knowledge, await self.stores(), queries, self._wanted)
        most = min(room, self._knowledge.config.context_tokens)
        by_passage = {id(hit.passage): hit for hit in hits}  # chunks of one file in two stores are equal
        async with self._numbering:  # calls run side by side
            context = await asyncio.to_thread(
                framed, [hit.passage for hit in hits], count, most, first=len(self._sources) + 1
            )
            self._sources += context.sources
        self._queries += queries
        self.found[call] = [by_passage[id(source.passage)] for source in context.sources]
        if hits and not context.sources:
            return "Error: there is no room left for sources in the context window. Answer without them."
        return f"{FOUND}\n\n{context.text}" if context.sources else "Nothing was found in the user's files."

    def results(self, call: str) -> list[dict[str, Any]]:
        """What a call found, as clients see it."""
        return [{**hit.body(), "text": hit.passage.stored.chunk.text} for hit in self.found.get(call, ())]

    # --- as sources of an answer

    def citer(self, *, attribute: bool) -> Citer | None:
        return Citer(self._sources, attribute=attribute, question="\n".join(self._queries))

    def in_prompt(self, messages: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
        return list(messages)  # results of calls are there already

    def texts(self) -> dict[int, str]:
        return {source.number: source.text for source in self._sources}

    def report(self) -> dict[str, Any]:
        return {"sources": [{"n": source.number, **place_body(source.passage)} for source in self._sources]}

    def annotation(self, citation: Citation, *, flat: bool = False) -> dict[str, Any]:
        document = citation.source.passage.document
        return {
            "type": "file_citation",
            "index": citation.start,
            "file_id": document.id,
            "filename": document.name,
            "end_index": citation.end,
            "n": citation.source.number,
            "origin": citation.origin,
            **place_body(citation.source.passage),
        }


def queries_of(arguments: Mapping[str, Any]) -> list[str]:
    """What a call asks for; empty where it asks for nothing."""
    given = arguments.get("queries", arguments.get("query"))
    texts = [given] if isinstance(given, str) else given if isinstance(given, list) else []
    asked = [text.strip()[:QUERY_CHARACTERS] for text in texts if isinstance(text, str) and text.strip()]
    return list(dict.fromkeys(asked))[:MOST_QUERIES]


def recalled(results: Sequence[Mapping[str, Any]]) -> str:
    """Results that a client sends back, as the model reads them."""
    quoted = (
        f"{' '.join(neutral(str(one.get('filename') or 'file')).split())}\n<source>\n"
        f"{neutral(str(one.get('text') or ''))}\n</source>"
        for one in results
    )
    return "\n\n".join(quoted) or "Nothing was found in the user's files."
