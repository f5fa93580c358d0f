"""`response` objects, whole or as the events that build them.

One state machine serves both: pieces of the generation open, extend and close output items. Each step is an event; an
answer that is not streamed is the state after the last piece.
"""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Iterator, Mapping
from typing import Any, Literal

import msgspec

from penstock.gateway.api.openai.responses.input_items import add_call
from penstock.gateway.api.openai.responses.item_ids import output_id
from penstock.gateway.api.openai.responses.output_calls import CallWriter, Event, call_writer
from penstock.gateway.api.openai.responses.replay import encode_event
from penstock.gateway.api.openai.responses.schemas import SEALED, ResponsesRequest
from penstock.gateway.api.openai.responses.tools import OfferedTools
from penstock.gateway.api.sealed_text import sealed
from penstock.gateway.app.exchange import encode_json
from penstock.gateway.generation.base import Generation
from penstock.gateway.generation.choice import CONTENT_FILTER, TIME_LIMIT, Piece
from penstock.gateway.generation.logprobs import logprob_entries
from penstock.gateway.generation.sampling import first_given
from penstock.gateway.generation.schemas import ChatMessage, served_tier
from penstock.gateway.generation.tool_schemas import (
    FunctionCall,
    ToolCall,
)
from penstock.gateway.generation.turn import TurnRecorder
from penstock.gateway.server_tools.steps import StepsRenderer
from penstock.protocol.errors import ApiError

QUEUED_EVENTS = 2
"""`response.created` and `response.queued`, with which the stream of a response in the background begins."""
_CUT = {"length": "max_output_tokens", CONTENT_FILTER: CONTENT_FILTER}
"""Finish reasons of an incomplete response, in the words of this API."""
StoreResponse = Callable[[str, bytes, list[ChatMessage]], Awaitable[None]]
"""Stores a response: its id, the object, the messages of the assistant."""


class ResponseRenderer(StepsRenderer):
    """See `Renderer`. `store` is given when the response is to be stored."""

    def __init__(
        self,
        request: ResponsesRequest,
        tools: OfferedTools,
        generation: Generation,
        recorder: TurnRecorder,
        store: StoreResponse | None,
        *,
        background: str | None = None,
        first_event: int | None = None,
    ) -> None:
        """`background`: the id of a response in the background, empty before it has one; the first events, up to
        `response.queued`, are not the renderer's then. `first_event`: the sequence number of its first event, in a
        run that is not the first."""
        self._tools = tools
        self._call: CallWriter | None = None
        """Of the open item, if it is a call."""
        self._calls: dict[str, CallWriter] = {}
        """By the id of their item."""
        self._generation = generation
        self._recorder = recorder
        self._store = store
        self._background = background is not None
        if first_event is None:
            first_event = 0 if background is None else QUEUED_EVENTS
        self._sequence = first_event - 1
        self._id = (background or "").removeprefix("resp_") or generation.id
        self._output: list[dict[str, Any]] = []
        self._open: dict[str, Any] | None = None
        self._parts: list[str] = []
        """Text of the open message."""
        self._logprobs: list[dict[str, Any]] = []
        """Of the open message."""
        self._annotations: list[dict[str, Any]] = []
        """Of the open message."""
        self._top = request.top_logprobs or 0
        self._sealed = SEALED in (request.include or ())
        self._hidden = request.reasoning is not None and bool(request.reasoning.exclude)
        self._last: Piece | None = None
        self._body = b""
        self._head = {
            **_head(request, generation, stored=store is not None or self._background),
            "id": f"resp_{self._id}",
            "background": self._background,
        }
        if recorder.report:
            self._head["conversation"] = recorder.report
        if generation.sources is not None:
            self._head["rag"] = generation.sources.report()

    def opening(self) -> bytes:
        response = self._object("in_progress")
        begun: list[Event] = [("response.in_progress", {"response": response})]
        return self._encode(begun if self._background else [("response.created", {"response": response}), *begun])

    def event(self, piece: Piece) -> bytes:
        return self._encode(self._steps(piece))

    def tool_event(self, event: dict[str, Any]) -> bytes:
        return b""  # the client runs all tools

    def closing(self) -> bytes:
        response = self._finished()
        self._body = encode_json(response)
        return self._encode([(f"response.{response['status']}", {"response": response})])

    def whole(self, pieces: list[list[Piece]]) -> bytes:
        for piece in pieces[0]:
            for _ in self._steps(piece):
                pass
        self._body = encode_json(self._finished())
        return self._body

    def failure(self, error: ApiError) -> bytes:
        problem = error.body()["error"]
        response = self._object("failed")
        response["error"] = {"code": problem["code"] or "server_error", "message": problem["message"]}
        self._body = encode_json(response)
        return self._encode(
            [
                ("error", {name: problem[name] for name in ("code", "message", "param")}),
                ("response.failed", {"response": response}),
            ]
        )

    @property
    def body(self) -> bytes:
        """The response as it ended."""
        return self._body

    async def before_end(self) -> None:
        await self._recorder.store()
        if self._store is not None:
            await self._store(self._head["id"], self._body, self.messages())

    def _steps(self, piece: Piece) -> Iterator[Event]:
        self._recorder.add(piece)
        if piece.reasoning and not self._hidden:
            yield from self._think(piece.reasoning)
        speaking = self._open is not None and self._open["type"] == "message"
        if piece.text or (piece.tokens and speaking):
            if not speaking:
                yield from self._close("completed")
                yield from self._open_message()
            logprobs = logprob_entries(self._generation.text, piece.tokens, self._top)
            self._parts.append(piece.text)
            self._logprobs += logprobs
            yield (
                "response.output_text.delta",
                {**self._place(), "content_index": 0, "delta": piece.text, "logprobs": logprobs},
            )
            yield from self._cite(piece)
        for call in piece.calls or ():
            if call.id is not None:
                yield from self._close("completed")
                writer = call_writer(self._tools.called(call.name), call.id)
                writer.item = {"id": self._item_id(writer.prefix), **writer.item, "status": "in_progress"}
                yield self._add(writer.item)
                self._call = self._calls[writer.item["id"]] = writer
            elif self._call is not None:
                for name, fields in self._call.push(call.arguments):
                    yield name, {**self._place(), **fields}
        if piece.finish_reason is not None:
            self._last = piece
            cut = piece.finish_reason in _CUT
            thinking = self._open is not None and self._open["type"] == "reasoning"
            if all(item["type"] == "reasoning" for item in self._output) and not (cut and thinking):
                yield from self._close("completed")
                yield from self._open_message()
            yield from self._close("incomplete" if cut else "completed")

    def _open_message(self) -> Iterator[Event]:
        item = {"type": "message", "role": "assistant", "content": [], "status": "in_progress"}
        yield self._add({"id": self._item_id("msg"), **item})
        yield "response.content_part.added", {**self._place(), "content_index": 0, "part": _part("", [], [])}

    def _think(self, text: str) -> Iterator[Event]:
        if self._open is None or self._open["type"] != "reasoning":
            yield from self._close("completed")
            item = {"type": "reasoning", "summary": [], "content": [], "status": "in_progress"}
            yield self._add({"id": self._item_id("rs"), **item})
            part = {"type": "reasoning_text", "text": ""}
            yield "response.content_part.added", {**self._place(), "content_index": 0, "part": part}
        self._parts.append(text)
        yield "response.reasoning_text.delta", {**self._place(), "content_index": 0, "delta": text}

    def _cite(self, piece: Piece) -> Iterator[Event]:
        sources = self._generation.sources
        if sources is None:
            return
        for citation in piece.citations:
            annotation = sources.annotation(citation, flat=True)
            place = {**self._place(), "content_index": 0, "annotation_index": len(self._annotations)}
            self._annotations.append(annotation)
            yield "response.output_text.annotation.added", {**place, "annotation": annotation}

    def _item_id(self, kind: str) -> str:
        return output_id(kind, self._id, len(self._output))

    def _add(self, item: dict[str, Any]) -> Event:
        self._open = item
        self._parts.clear()
        self._logprobs, self._annotations = [], []
        self._output.append(item)
        return "response.output_item.added", {"output_index": len(self._output) - 1, "item": item}

    def _close(self, status: Literal["completed", "incomplete"]) -> Iterator[Event]:
        """Close the open item, if there is one."""
        item, text = self._open, "".join(self._parts)
        if item is None:
            return
        place = self._place()
        if item["type"] == "message":
            part = _part(text, self._logprobs, self._annotations)
            item["content"] = [part]
            yield "response.output_text.done", {**place, "content_index": 0, "text": text, "logprobs": self._logprobs}
            yield "response.content_part.done", {**place, "content_index": 0, "part": part}
        elif item["type"] == "reasoning":
            item["content"] = [{"type": "reasoning_text", "text": text}]
            if self._sealed:
                item["encrypted_content"] = sealed(text)
            yield "response.reasoning_text.done", {**place, "content_index": 0, "text": text}
            yield "response.content_part.done", {**place, "content_index": 0, "part": item["content"][0]}
        else:
            assert self._call is not None
            for name, fields in self._call.finish():
                yield name, {**place, **fields}
            self._call = None
        item["status"] = status
        self._open = None
        yield "response.output_item.done", {"output_index": place["output_index"], "item": item}

    def _place(self) -> dict[str, Any]:
        assert self._open is not None
        return {"item_id": self._open["id"], "output_index": len(self._output) - 1}

    def _encode(self, events: Iterator[Event] | list[Event]) -> bytes:
        # Each event is encoded at once: it shows its item as it is at that moment.
        return b"".join(map(self._event, events))

    def _event(self, event: Event) -> bytes:
        self._sequence += 1
        return encode_event(event, self._sequence)

    def _finished(self) -> dict[str, Any]:
        assert self._last is not None
        cut = _CUT.get(self._last.finish_reason or "")
        response = self._object("incomplete" if cut else "completed")
        if cut:
            response["incomplete_details"] = {"reason": cut}
            if self._last.stop_reason == TIME_LIMIT:
                response["incomplete_details"]["stop_reason"] = TIME_LIMIT
        else:
            response["completed_at"] = int(time.time())
        response["usage"] = self._usage()
        return response

    def _usage(self) -> dict[str, Any]:
        return usage_of(self._generation.usage(), self._generation.cached_tokens)

    def _object(self, status: str) -> dict[str, Any]:
        return {**self._head, "status": status, "output": self._output}

    def messages(self) -> list[ChatMessage]:
        """The output as the next turn's conversation has it."""
        said: list[ChatMessage] = []
        thought: str | None = None
        for item in self._output:
            if item["type"] == "message":  # behind an answer, its thought is no part of a conversation
                said.append(ChatMessage(role="assistant", content=item["content"][0]["text"]))
                thought = None
            elif item["type"] == "reasoning":
                thought = item["content"][0]["text"]
            else:
                call = self._calls[item["id"]]
                function = FunctionCall(name=call.name, arguments=call.arguments or "{}")
                add_call(said, ToolCall(id=item["call_id"], function=function), thought)
                thought = None
        return said or [ChatMessage(role="assistant", content="")]  # it was cut off inside the thought


def usage_of(usage: Mapping[str, object], cached_tokens: int) -> dict[str, Any]:
    """What was used, in the words of this API."""
    return {
        "input_tokens": usage["prompt_tokens"],
        "input_tokens_details": {"cached_tokens": cached_tokens, "cache_write_tokens": 0},
        "output_tokens": usage["completion_tokens"],
        "output_tokens_details": usage["completion_tokens_details"],
        "total_tokens": usage["total_tokens"],
    }


def _part(text: str, logprobs: list[dict[str, Any]], annotations: list[dict[str, Any]]) -> dict[str, Any]:
    return {"type": "output_text", "text": text, "annotations": annotations, "logprobs": logprobs}


def _head(request: ResponsesRequest, generation: Generation, *, stored: bool) -> dict[str, Any]:
    """The fields that do not change while the response is generated."""
    wanted = None if request.text is None else request.text.format
    return {
        "object": "response",
        "created_at": int(time.time()),
        "completed_at": None,
        "status": "in_progress",
        "error": None,
        "incomplete_details": None,
        "instructions": request.instructions,
        "max_output_tokens": request.max_output_tokens,
        "max_tool_calls": request.max_tool_calls,
        "model": generation.model.name,
        "output": [],
        "parallel_tool_calls": request.parallel_tool_calls is not False,
        "previous_response_id": request.previous_response_id,
        "prompt_cache_key": request.prompt_cache_key,
        "reasoning": {
            "effort": request.reasoning_effort or (request.reasoning and request.reasoning.effort),
            "summary": None,
        },
        "safety_identifier": request.safety_identifier,
        "service_tier": served_tier(request.service_tier),
        "store": stored,
        "temperature": first_given(request.temperature, generation.model.sampling.temperature, 1.0),
        "text": {"format": {"type": "text"} if wanted is None else msgspec.to_builtins(wanted)},
        "tool_choice": msgspec.to_builtins(request.tool_choice or "auto"),
        "tools": [msgspec.json.decode(tool) for tool in request.tools or ()],
        "top_logprobs": request.top_logprobs or 0,
        "top_p": first_given(request.top_p, generation.model.sampling.top_p, 1.0),
        "truncation": request.truncation or "disabled",
        "usage": None,
        "user": request.user,
        "metadata": request.metadata or {},
    }
