"""The older form of tools in chat completions: `functions`, `function_call` and messages with the role `function`.

A request with `functions` becomes one with `tools`; calls and results in its history get the ids that they do not have.
`functions` stays on the request, so that the renderer shows calls as the client expects them. That form has room for
one call: of several, the first counts. Preventing others would take a grammar, which a model that writes calls in a
format of its own may not follow well.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from penstock.gateway.app.dialects import Renaming
from penstock.gateway.generation.schemas import ChatMessage, ChatRequest
from penstock.gateway.generation.tool_schemas import NamedTool, ToolDefinition
from penstock.protocol.errors import InvalidRequest

OLDER_NAMES: Renaming = (
    (r"tools\[(\d+)\]\.function\b", r"functions[\1]"),
    (r"tools\b", "functions"),
    (r"tool_choice\b", "function_call"),
)
"""What the parameters of tools are called in a request with `functions`."""


def with_tools(request: ChatRequest) -> ChatRequest:
    """The same request with `tools`; a 400 where it has both forms."""
    functions, call = request.functions, request.function_call
    if not functions:
        if call not in (None, "none"):
            raise InvalidRequest("`function_call` is only allowed with `functions`.", param="function_call")
        return request
    for name in ("tools", "tool_choice", "parallel_tool_calls"):
        if getattr(request, name) is not None:
            raise InvalidRequest(
                f"`{name}` cannot be used with `functions`, the older form of `tools`; send `tools` alone.", param=name
            )
    return msgspec.structs.replace(
        request,
        tools=[ToolDefinition(type="function", function=function) for function in functions],
        tool_choice=call if call is None or isinstance(call, str) else NamedTool(type="function", function=call),
        parallel_tool_calls=False,
    )


class CallHistory:
    """The calls of a conversation, by id, from its first message on."""

    def __init__(self, earlier: Mapping[str, str]) -> None:
        """`earlier`: names of functions that were called before, by the id of the call."""
        self._names = dict(earlier)
        self._open = dict(earlier)
        """Those without a result so far."""

    def __contains__(self, id: str) -> bool:
        return id in self._names

    def add(self, id: str, name: str) -> None:
        self._names[id] = self._open[id] = name

    def answered(self, id: str) -> None:
        self._open.pop(id, None)

    def called(self, message: ChatMessage) -> list[dict[str, Any]]:
        """`function_call` of a message as `tool_calls`."""
        call = message.function_call
        assert call is not None
        id = self._new_id()
        self.add(id, call.name)
        return [{"id": id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}]

    def result_of(self, name: str) -> str:
        """The id of the newest call of a function that has no result yet. A result without a call, which older
        clients may send, gets a new one."""
        id = next((id for id in reversed(self._open) if self._open[id] == name), None)
        if id is None:
            id = self._new_id()
            self._names[id] = name
        self.answered(id)
        return id

    def _new_id(self) -> str:
        number = len(self._names)
        while (id := f"call_function_{number}") in self._names:
            number += 1
        return id
