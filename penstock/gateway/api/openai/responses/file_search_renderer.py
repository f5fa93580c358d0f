"""`response` objects with `file_search_call` items and the events of searches."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import msgspec

from penstock.gateway.api.openai.responses.output_calls import Event
from penstock.gateway.api.openai.responses.renderer import ResponseRenderer, StoreResponse, usage_of
from penstock.gateway.api.openai.responses.schemas import SEARCH_RESULTS, ResponsesRequest
from penstock.gateway.api.openai.responses.tools import OfferedTools
from penstock.gateway.generation.base import Generation
from penstock.gateway.generation.schemas import ChatMessage
from penstock.gateway.generation.turn import TurnRecorder
from penstock.gateway.rag.vector_stores.file_search import FileSearch, queries_of
from penstock.gateway.server_tools.steps import StepTotals

_arguments = msgspec.json.Decoder(dict[str, Any])


class FileSearchRenderer(ResponseRenderer):
    """See `ResponseRenderer`. `said`: grows with the messages of the steps; what is stored are those."""

    def __init__(
        self,
        request: ResponsesRequest,
        tools: OfferedTools,
        generation: Generation,
        recorder: TurnRecorder,
        store: StoreResponse | None,
        search: FileSearch,
        totals: StepTotals,
        said: Sequence[dict[str, Any]],
        *,
        background: str | None = None,
        first_event: int | None = None,
    ) -> None:
        super().__init__(request, tools, generation, recorder, store, background=background, first_event=first_event)
        self._search = search
        self._totals = totals
        self._said = said
        self._with_results = SEARCH_RESULTS in (request.include or ())
        self._searching: dict[str, tuple[dict[str, Any], int]] = {}
        """Items of calls that run, and their places, by the ids of the calls."""

    def follow(self, generation: Generation) -> None:
        self._generation = generation

    def tool_event(self, event: dict[str, Any]) -> bytes:
        return self._encode(self._begun(event) if event["type"] == "tool_call" else self._done(event))

    async def before_end(self) -> None:
        """The recorder has been told already."""
        if self._store is not None:
            await self._store(self._head["id"], self._body, self.messages())

    async def keep(self) -> None:
        await self.before_end()

    def messages(self) -> list[ChatMessage]:
        return msgspec.convert(self._said, list[ChatMessage]) or super().messages()

    def _usage(self) -> dict[str, Any]:
        return usage_of(self._totals.usage(), self._totals.cached_tokens)

    def _begun(self, event: dict[str, Any]) -> Iterator[Event]:
        yield from self._close("completed")
        item = {
            "id": self._item_id("fs"),
            "type": "file_search_call",
            "status": "in_progress",
            "queries": _queries(event["arguments"]),
            "results": None,
        }
        yield self._add(item)
        self._open = None  # it ends when its search does, whatever is written meanwhile
        self._searching[event["id"]] = item, len(self._output) - 1
        place = {"output_index": len(self._output) - 1, "item_id": item["id"]}
        yield "response.file_search_call.in_progress", place
        item["status"] = "searching"
        yield "response.file_search_call.searching", place

    def _done(self, event: dict[str, Any]) -> Iterator[Event]:
        item, index = self._searching.pop(event["id"])
        item["status"] = "completed" if event["ok"] else "failed"
        if self._with_results:
            item["results"] = self._search.results(event["id"])
        yield "response.file_search_call.completed", {"output_index": index, "item_id": item["id"]}
        yield "response.output_item.done", {"output_index": index, "item": item}


def _queries(arguments: str) -> list[str]:
    try:
        return queries_of(_arguments.decode(arguments or "{}"))
    except (msgspec.DecodeError, RecursionError):
        return []
