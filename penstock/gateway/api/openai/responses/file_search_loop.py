"""Responses with the tool `file_search`: the model asks, the gateway searches, the model goes on. Calls of other tools
are the client's: with one of those the response ends, after what was to be searched beside it."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from contextlib import aclosing
from typing import Any

import msgspec

from penstock.config.context import ToolsConfig
from penstock.gateway.accounting.request_limits import Cap
from penstock.gateway.generation.assistant_message import AssembledCall
from penstock.gateway.generation.attempt import Attempt
from penstock.gateway.generation.base import Generation
from penstock.gateway.generation.chat_input import room_for_sources
from penstock.gateway.generation.choice import Piece
from penstock.gateway.generation.estimates import estimated_text
from penstock.gateway.generation.pipeline import GenerationPipeline
from penstock.gateway.generation.sampling import TokenLimit
from penstock.gateway.generation.schemas import ChatRequest, TextFormat
from penstock.gateway.generation.turn import Turn
from penstock.gateway.rag.vector_stores.file_search import NAME, FileSearch, queries_of
from penstock.gateway.server_tools.loop import Render, ToolLoop
from penstock.protocol.errors import ApiError, DataRuleForbids
from penstock.telemetry.logging import RequestRecord
from penstock.tools.execution import Outcome

UNKNOWN_WINDOW = 8192
"""Tokens assumed for a model whose window is not known."""


class SearchParts(msgspec.Struct, frozen=True):
    """What all loops work with; see `server_tools.loop.LoopParts`."""

    pipeline: GenerationPipeline
    config: ToolsConfig
    log_call: Callable[[RequestRecord], None]


class FileSearchLoop(ToolLoop):
    """The steps of one response. Each text is a message of its own."""

    one_text = False

    def __init__(
        self,
        parts: SearchParts,
        attempt: Attempt,
        request: ChatRequest,
        limit: TokenLimit,
        turn: Turn,
        render: Render,
        search: FileSearch,
        max_calls: int | None,
    ) -> None:
        super().__init__(parts, attempt, request, limit, turn, render)
        self._search = search
        self._calls_left = max_calls
        self._mine: set[int] = set()
        """Indexes of the calls of this step that the gateway runs."""

    async def whole(self) -> None:
        async with aclosing(self._steps()) as steps:
            async for found in steps:
                renderer, _ = self._answer
                if isinstance(found, dict):
                    renderer.tool_event(found)
                else:
                    for piece in found:
                        renderer.event(piece)
        renderer, recorder = self._answer
        if ended := self._limit_reached():
            self._exchange.extra_headers += ended.headers()
        body = renderer.whole([[]])
        await recorder.store(self._said)
        await renderer.keep()
        await self._exchange.reply(200, body)

    async def _prepared(self, number: int, *, last: bool) -> Generation:
        self._mine.clear()
        generation = await super()._prepared(number, last=last or self._calls_left == 0)
        if self._search.has_sources:
            # Nothing is added to text that has to be parsed, or whose tokens are shown one by one.
            wanted = self._request.response_format
            plain = (wanted is None or isinstance(wanted, TextFormat)) and not self._request.logprobs
            generation.cite(self._search, attribute=plain)
        return generation

    def _runs(self, name: str) -> bool:
        return name == NAME

    def _label(self, name: str) -> str:
        return name

    def _narrowed(self, request: ChatRequest, *, last: bool) -> ChatRequest:
        """Tools of the client stay to the end."""
        others = [tool for tool in request.tools or () if tool.function is None or tool.function.name != NAME]
        if not last or not others:
            return super()._narrowed(request, last=last)
        return msgspec.structs.replace(request, tools=others, tool_choice=None)

    def _refusal(self, cap: Cap) -> ApiError:
        return cap.refusal("`tools` has `file_search`", "rounds of tool calls", "tools")

    def _seen(self, piece: Piece) -> Piece | None:
        """Calls that the gateway runs are told as events."""
        shown = []
        for call in piece.calls or ():
            if call.id is not None and self._runs(call.name or ""):
                self._mine.add(call.index)
            if call.index not in self._mine:
                shown.append(call)
        # The end is shown when everything that was to be searched has been.
        ends = None if piece.finish_reason == "tool_calls" else piece.finish_reason
        if not (piece.text or piece.tokens or piece.reasoning or ends or shown):
            return None
        return dataclasses.replace(
            piece, calls=shown or None, finish_reason=ends, stop_reason=piece.stop_reason if ends else None
        )

    async def _outcome(self, call: AssembledCall, arguments: dict[str, Any], generation: Generation) -> Outcome:
        queries = queries_of(arguments)
        if not queries:
            return Outcome('Error: say what to search for, as {"queries": ["..."]}.', ok=False)
        if self._calls_left is not None:
            if self._calls_left <= 0:
                return Outcome("Error: no more calls are allowed (`max_tool_calls`).", ok=False)
            self._calls_left -= 1
        await self._pipeline.content_filter.mark(self._exchange, lambda: [call.arguments or ""])
        text = generation.text
        count = estimated_text if text is None else lambda said: len(text.encode(said, special=False))
        used = generation.prompt_tokens + generation.completion_tokens
        room = room_for_sources(generation.model.context_window or UNKNOWN_WINDOW, used, self._limit)
        try:
            found = await self._search.run(call.id, queries, count, room)
        except DataRuleForbids as error:
            return Outcome(f"Error: {error.message}", ok=False)
        except ApiError as error:
            # A store that was deleted or expired meanwhile, or an encoder that is down.
            return Outcome(f"Error: the search failed: {error.message}", ok=False)
        await self._pipeline.content_filter.mark(self._exchange, lambda: list(self._search.texts().values()))
        return Outcome(found, ok=not found.startswith("Error: "))
