"""The tools of a response as functions that a model can call, and its calls as the items that the client expects.

Every tool that the client runs is offered: functions, free-text tools, and the built-in `local_shell`, `shell` and
`apply_patch`. Tools in a namespace get qualified names. `file_search` is run here. Other tools that a server would have
to run are left out, and named in `x-penstock-ignored`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Literal

import msgspec
from msgspec import Raw, Struct

from penstock.gateway.api.openai.responses.schemas import (
    ChosenTool,
    CustomTool,
    FileSearchTool,
    FunctionTool,
    GrammarText,
    NamespaceTool,
)
from penstock.gateway.app.decoding import decode
from penstock.gateway.app.exchange import Exchange
from penstock.gateway.generation.request_decoder import RequestDecoder, ignore_advice
from penstock.gateway.generation.tool_schemas import (
    AllowedTools,
    FunctionDefinition,
    FunctionName,
    NamedTool,
    OfferedFunction,
    ToolDefinition,
    free_text_function,
)
from penstock.gateway.rag.vector_stores.file_search import DESCRIPTION, PARAMETERS
from penstock.gateway.rag.vector_stores.file_search import NAME as FILE_SEARCH
from penstock.protocol.errors import InvalidRequest
from penstock.tools import free_text

Kind = Literal["function", "custom", "local_shell", "shell", "apply_patch", "file_search"]
MOST_TOOLS = 512
"""Of one request, those in namespaces included."""


class _Type(Struct):
    type: str


_type = msgspec.json.Decoder(_Type)
_function = RequestDecoder(FunctionTool)
_custom = RequestDecoder(CustomTool)
_namespace = RequestDecoder(NamespaceTool)
_file_search = RequestDecoder(FileSearchTool)

_STRINGS = {"type": "array", "items": {"type": "string"}}
_MILLISECONDS = {"type": "integer", "description": "Time limit in milliseconds."}
_BUILT_IN: dict[Kind, tuple[str, dict[str, Any], list[str]]] = {
    "local_shell": (
        "Runs a command on the user's machine and returns what it prints.",
        {
            "command": {**_STRINGS, "description": "The program and its arguments."},
            "working_directory": {"type": "string"},
            "env": {"type": "object", "additionalProperties": {"type": "string"}},
            "timeout_ms": _MILLISECONDS,
        },
        ["command"],
    ),
    "shell": (
        "Runs shell commands on the user's machine and returns what they print.",
        {"commands": _STRINGS, "timeout_ms": _MILLISECONDS, "max_output_length": {"type": "integer"}},
        ["commands"],
    ),
    "apply_patch": (
        "Creates, changes or deletes one file of the user.",
        {
            "type": {"type": "string", "enum": ["create_file", "update_file", "delete_file"]},
            "path": {"type": "string"},
            "diff": {"type": "string", "description": "A V4A diff: context, `-` and `+` lines; not for delete_file."},
        },
        ["type", "path"],
    ),
}
"""Tools of the API itself that the client runs: description, properties and required properties of their calls."""


class Offered(Struct, frozen=True):
    """A tool as the client knows it, and the function that the model sees."""

    kind: Kind
    name: str
    namespace: str | None
    function: FunctionDefinition


class OfferedTools:
    """The tools of one request."""

    def __init__(self, exchange: Exchange, tools: Sequence[Raw] | None) -> None:
        self._exchange = exchange
        self._offered: dict[str, Offered] = {}
        self.file_search: FileSearchTool | None = None
        self.file_search_at = ""
        """Where it is in the request."""
        self.add(tools or (), "tools")

    def add(self, tools: Sequence[Raw], at: str) -> None:
        """Decode more tools; `at` is where they are in the request."""
        for index, raw in enumerate(tools):
            self._add(raw, f"{at}[{index}]", None)

    def _add(self, raw: Raw, at: str, group: NamespaceTool | None) -> None:
        exchange, kind = self._exchange, decode(_type, raw, at).type
        if kind == "function":
            function = _function(exchange, raw, at)
            if (function.parameters or {}).get("type", "object") != "object":
                raise InvalidRequest(f"`{at}.parameters` must describe an object.", param=f"{at}.parameters")
            self._offer("function", function.name, _described(function.description, group), at, group, function)
        elif kind == "custom":
            custom = _custom(exchange, raw, at)
            self._offer("custom", custom.name, _described(custom.description, group), at, group, custom)
        elif kind == "namespace" and group is None:
            group = _namespace(exchange, raw, at)
            for index, inner in enumerate(group.tools):
                self._add(inner, f"{at}.tools[{index}]", group)
        elif kind in _BUILT_IN and group is None:
            self._offer(kind, kind, _BUILT_IN[kind][0], at, None, None)
        elif kind == FILE_SEARCH and group is None:
            self._offer("file_search", FILE_SEARCH, DESCRIPTION, at, None, None)
            self.file_search, self.file_search_at = _file_search(exchange, raw, at), at
        else:
            ignore_advice(exchange, f"tools.{kind[:64]}")

    def _offer(
        self,
        kind: Kind,
        name: str,
        description: str | None,
        at: str,
        group: NamespaceTool | None,
        given: FunctionTool | CustomTool | None,
    ) -> None:
        namespace = None if group is None else group.name
        full = qualified(name, namespace)
        if full in self._offered:
            raise InvalidRequest(f"Two tools are called `{full}`.", param=f"{at}.name")
        if len(self._offered) >= MOST_TOOLS:
            raise InvalidRequest(f"There are more than {MOST_TOOLS} tools.", param="tools")
        if isinstance(given, FunctionTool):
            function = FunctionDefinition(
                name=full, description=description, parameters=given.parameters, strict=given.strict
            )
        elif isinstance(given, CustomTool):
            wanted = given.format
            syntax: free_text.Syntax = wanted.syntax if isinstance(wanted, GrammarText) else "text"
            grammar = wanted.definition if isinstance(wanted, GrammarText) else ""
            function = free_text_function(full, description, syntax, grammar)
        elif kind == FILE_SEARCH:
            function = FunctionDefinition(name=full, description=description, parameters=PARAMETERS)
        else:
            _, properties, required = _BUILT_IN[kind]
            schema = {"type": "object", "properties": properties, "required": required, "additionalProperties": False}
            function = FunctionDefinition(name=full, description=description, parameters=schema)
        self._offered[full] = Offered(kind, name, namespace, function)

    def definitions(self) -> list[ToolDefinition] | None:
        """As chat completions have them."""
        found = [ToolDefinition(type="function", function=tool.function) for tool in self._offered.values()]
        return found or None

    def called(self, name: str | None) -> Offered:
        """The tool that the model called."""
        return self._offered.get(name or "") or Offered(
            "function", name or "", None, FunctionDefinition(name="unknown")
        )

    def choice(
        self, chosen: Literal["none", "auto", "required"] | ChosenTool | None
    ) -> Literal["none", "auto", "required"] | NamedTool | None:
        """`tool_choice` as chat completions have it."""
        if not isinstance(chosen, ChosenTool):
            return None if not self._offered and chosen in ("auto", "none") else chosen
        if chosen.type != "allowed_tools":
            return NamedTool(type="function", function=FunctionName(self._name(chosen)))
        if chosen.tools is None or chosen.mode is None:
            missing = "tool_choice.tools" if chosen.tools is None else "tool_choice.mode"
            raise InvalidRequest(f"Missing required parameter: `{missing}`.", param=missing, code="missing_parameter")
        names = [name for tool in chosen.tools for name in self._names(tool)]
        if not names:
            raise InvalidRequest("`tool_choice` allows only tools that are not run here.", param="tool_choice")
        tools = [OfferedFunction(type="function", function=FunctionName(name)) for name in dict.fromkeys(names)]
        return NamedTool(type="allowed_tools", allowed_tools=AllowedTools(mode=chosen.mode, tools=tools))

    def _names(self, chosen: ChosenTool) -> Iterable[str]:
        """The functions behind an entry of `allowed_tools`; none for what is not run here."""
        if chosen.type == "namespace":
            return [name for name, tool in self._offered.items() if tool.namespace == chosen.name]
        run_here = chosen.type == FILE_SEARCH and self.file_search is not None
        return [self._name(chosen)] if run_here or chosen.type in ("function", "custom", *_BUILT_IN) else []

    def _name(self, chosen: ChosenTool) -> str:
        if chosen.type in _BUILT_IN or (chosen.type == FILE_SEARCH and self.file_search is not None):
            return chosen.type
        if chosen.type not in ("function", "custom"):
            raise InvalidRequest(
                f"`tool_choice` asks for `{chosen.type}`, which this server does not run.",
                param="tool_choice",
                code="unsupported_parameter",
            )
        if chosen.name is None:
            raise InvalidRequest(
                "Missing required parameter: `tool_choice.name`.", param="tool_choice.name", code="missing_parameter"
            )
        return qualified(chosen.name, chosen.namespace)


def qualified(name: str, namespace: str | None) -> str:
    """The name that the model sees."""
    return name if namespace is None else f"{namespace}__{name}"


def _described(description: str | None, group: NamespaceTool | None) -> str | None:
    about = None if group is None else group.description
    return " ".join(filter(None, (about, description))) or None
