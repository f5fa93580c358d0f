"""The model's calls in chat completions: of functions with their arguments, of custom tools with their input; or, for
a request with `functions`, the one call that the older form has room for.

The model writes both as functions; the input of a custom tool is read out of the arguments while they arrive.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from penstock.gateway.generation.assistant_message import AssembledCall, merge_calls
from penstock.gateway.generation.choice import CallPiece
from penstock.gateway.generation.schemas import ChatRequest
from penstock.gateway.generation.tool_schemas import FreeTextFunction, ToolDefinition
from penstock.tools.free_text import InputReader


def calls_of(request: ChatRequest) -> ChatCalls:
    """In the form in which the request offers its functions."""
    return OlderCalls() if request.functions else ChatCalls(request.tools)


class ChatCalls:
    """The calls of one answer with all its choices."""

    def __init__(self, tools: Sequence[ToolDefinition] | None) -> None:
        self._custom = {tool.function.name for tool in tools or () if isinstance(tool.function, FreeTextFunction)}
        self._readers: dict[tuple[int, int], InputReader] = {}
        """Of custom calls that are under way, by choice and call."""

    def finish_reason(self, reason: str | None) -> str | None:
        return reason

    def whole(self, pieces: Iterable[CallPiece]) -> dict[str, Any]:
        """All calls, as fields of a message."""
        return {"tool_calls": [self._body(call) for call in merge_calls([], pieces)]}

    def deltas(self, choice: int, calls: Iterable[CallPiece], *, ended: bool) -> Iterator[dict[str, Any]]:
        """One for the beginning of a call and one for what follows of its arguments; each goes into a chunk of its own,
        because clients read the first entry of a chunk only. `ended`: no more calls of this choice follow."""
        for entry in self._entries(choice, calls, ended=ended):
            yield {"tool_calls": [entry]}

    def _entries(self, choice: int, calls: Iterable[CallPiece], *, ended: bool) -> Iterator[dict[str, Any]]:
        following: dict[str, Any] | None = None
        for call in calls:
            if call.id is not None:
                if following is not None:
                    yield following
                    following = None
                yield self._begun(choice, call.index, call.id, call.name)
                continue
            kind, field, text = self._said(choice, call)
            if following is not None and following["index"] == call.index:
                following[kind][field] += text
            else:
                if following is not None:
                    yield following
                following = {"index": call.index, kind: {field: text}} if kind == "function" or text else None
        if following is not None:
            yield following
        if ended and self._readers:
            yield from self._rest(choice)

    def _begun(self, choice: int, index: int, id: str, name: str | None) -> dict[str, Any]:
        if name in self._custom:
            self._readers[choice, index] = InputReader()
            return {"index": index, "id": id, "type": "custom", "custom": {"name": name, "input": ""}}
        return {"index": index, "id": id, "type": "function", "function": {"name": name, "arguments": ""}}

    def _said(self, choice: int, call: CallPiece) -> tuple[str, str, str]:
        reader = self._readers.get((choice, call.index))
        if reader is None:
            return "function", "arguments", call.arguments
        return "custom", "input", reader.push(call.arguments)

    def _rest(self, choice: int) -> Iterator[dict[str, Any]]:
        for place in [place for place in self._readers if place[0] == choice]:
            if left := self._readers.pop(place).finish():
                yield {"index": place[1], "custom": {"input": left}}

    def _body(self, call: AssembledCall) -> dict[str, Any]:
        if call.name not in self._custom:
            return call.body()
        reader = InputReader()
        reader.push(call.arguments)
        reader.finish()
        return {"id": call.id, "type": "custom", "custom": {"name": call.name, "input": reader.text}}


class OlderCalls(ChatCalls):
    """`function_call`, as answers to requests with `functions` show it: the first call of a message."""

    def __init__(self) -> None:
        super().__init__(None)

    def finish_reason(self, reason: str | None) -> str | None:
        return "function_call" if reason == "tool_calls" else reason

    def whole(self, pieces: Iterable[CallPiece]) -> dict[str, Any]:
        call = merge_calls([], pieces)[0]
        return {"function_call": {"name": call.name, "arguments": call.arguments}}

    def deltas(self, choice: int, calls: Iterable[CallPiece], *, ended: bool) -> Iterator[dict[str, Any]]:
        for entry in self._entries(choice, calls, ended=ended):
            if entry["index"] == 0:
                yield {"function_call": entry["function"]}
