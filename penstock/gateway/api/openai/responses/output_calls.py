"""The model's calls as output items: one writer per kind of tool makes the item and its events of the arguments."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from penstock.gateway.api.openai.responses.tools import Kind, Offered, qualified
from penstock.tools.free_text import InputReader

Event = tuple[str, dict[str, Any]]
_NO_ACTION: dict[Kind, dict[str, Any]] = {
    "local_shell": {"type": "exec", "command": [], "env": {}},
    "shell": {"commands": [], "timeout_ms": None, "max_output_length": None},
    "apply_patch": {"type": "update_file", "path": "", "diff": ""},
}
"""What a call of a built-in tool asks for, before its arguments are known."""


class CallWriter:
    """A function call while its arguments arrive."""

    prefix = "fc"
    """Of the item's id."""

    def __init__(self, tool: Offered, call_id: str) -> None:
        self.arguments = ""
        self.name = qualified(tool.name, tool.namespace)
        """As the model knows it."""
        self.item: dict[str, Any] = {"type": "function_call", "call_id": call_id, "name": tool.name, "arguments": ""}
        if tool.namespace is not None:
            self.item["namespace"] = tool.namespace

    def push(self, arguments: str) -> Iterator[Event]:
        """More arguments; the events lack the place of the item."""
        self.arguments += arguments
        yield "response.function_call_arguments.delta", {"delta": arguments}

    def finish(self) -> Iterator[Event]:
        self.item["arguments"] = self.arguments
        yield "response.function_call_arguments.done", {"name": self.item["name"], "arguments": self.arguments}


class CustomCallWriter(CallWriter):
    """A call of a tool that takes free text."""

    prefix = "ctc"

    def __init__(self, tool: Offered, call_id: str) -> None:
        super().__init__(tool, call_id)
        self._reader = InputReader()
        del self.item["arguments"]
        self.item |= {"type": "custom_tool_call", "input": ""}

    def push(self, arguments: str) -> Iterator[Event]:
        self.arguments += arguments
        yield from self._said(self._reader.push(arguments))

    def finish(self) -> Iterator[Event]:
        yield from self._said(self._reader.finish())
        self.item["input"] = self._reader.text
        yield "response.custom_tool_call_input.done", {"input": self._reader.text}

    def _said(self, text: str) -> Iterator[Event]:
        if text:
            yield "response.custom_tool_call_input.delta", {"delta": text}


class BuiltInCallWriter(CallWriter):
    """A call of `local_shell`, `shell` or `apply_patch`; its item is complete when it is done."""

    def __init__(self, tool: Offered, call_id: str) -> None:
        super().__init__(tool, call_id)
        self.prefix = {"local_shell": "lsh", "shell": "sh", "apply_patch": "apc"}[tool.kind]
        self._field = "operation" if tool.kind == "apply_patch" else "action"
        self._action = _NO_ACTION[tool.kind]
        self.item = {"type": f"{tool.kind}_call", "call_id": call_id, self._field: self._action}

    def push(self, arguments: str) -> Iterator[Event]:
        self.arguments += arguments
        yield from ()

    def finish(self) -> Iterator[Event]:
        try:
            asked = json.loads(self.arguments)
        except (ValueError, RecursionError):  # cut off
            asked = {}
        self.item[self._field] = {**self._action, **(asked if isinstance(asked, dict) else {})}
        yield from ()


def call_writer(tool: Offered, call_id: str) -> CallWriter:
    if tool.kind == "function":
        return CallWriter(tool, call_id)
    return CustomCallWriter(tool, call_id) if tool.kind == "custom" else BuiltInCallWriter(tool, call_id)
