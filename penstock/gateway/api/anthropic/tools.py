"""`tools` and `tool_choice` of the Messages API as chat completions have them.

A tool is the client's own; or one that the client runs and whose schema the API defines (`bash_…`, `text_editor_…`,
`memory_…`), which is described here; or one that Anthropic's servers would run, which is refused, because an answer
without its results would be another answer.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

from penstock.gateway.api.anthropic.history import History
from penstock.gateway.api.anthropic.schemas import (
    AnyChoice,
    AutoChoice,
    Conversation,
    NamedChoice,
    NoChoice,
    ToolParam,
)
from penstock.gateway.app.exchange import encode_json
from penstock.gateway.generation.tool_schemas import (
    FunctionDefinition,
    FunctionName,
    NamedTool,
    ToolDefinition,
)
from penstock.protocol.errors import InvalidRequest

Choice = Literal["none", "auto", "required"] | NamedTool
TOOL_SEARCH = "tool_search_tool_"
"""Begins the types of tools with which a server finds tools; here all of them are given at once instead."""


def tools_of(request: Conversation, history: History) -> list[ToolDefinition] | None:
    """The tools that may be called. One with `defer_loading` may be, once the result of a search has named it."""
    if not request.tools:
        return None
    searched = any((tool.type or "").startswith(TOOL_SEARCH) for tool in request.tools)
    named = request.tool_choice.name if isinstance(request.tool_choice, NamedChoice) else None
    given = []
    for index, tool in enumerate(request.tools):
        if (tool.type or "").startswith(TOOL_SEARCH):
            history.ignored["tools.type"] = None
            continue
        if tool.eager_input_streaming is False:
            history.ignored["tools.eager_input_streaming"] = None  # it is always streamed as it is written
        function = _function(tool, f"tools[{index}]")
        if not tool.defer_loading or searched or function.name in history.referenced or function.name == named:
            given.append(ToolDefinition(type="function", function=function))
    return given or None


def choice_of(request: Conversation, tools: Sequence[ToolDefinition] | None) -> tuple[Choice | None, bool | None]:
    """`tool_choice`, and whether several calls may be made. Without tools, "as you like" and "none" say nothing."""
    choice = request.tool_choice
    if isinstance(choice, NoChoice):
        return ("none" if tools else None), None
    if choice is None or (isinstance(choice, AutoChoice) and not tools):
        return None, None
    parallel = False if choice.disable_parallel_tool_use else None
    match choice:
        case AutoChoice():
            return "auto", parallel
        case AnyChoice():
            return "required", parallel
        case NamedChoice(name=name):
            return NamedTool(type="function", function=FunctionName(name)), parallel


def _function(tool: ToolParam, at: str) -> FunctionDefinition:
    kind = tool.type or "custom"
    if kind == "custom":
        for field in ("name", "input_schema"):
            if getattr(tool, field) is None:
                raise InvalidRequest(
                    f"Missing required parameter: `{at}.{field}`.", param=f"{at}.{field}", code="missing_parameter"
                )
        assert tool.name is not None
        return FunctionDefinition(
            name=tool.name, description=_described(tool), parameters=tool.input_schema, strict=tool.strict
        )
    for family, (name, description, schema) in _DEFINED.items():
        if kind.startswith(family):
            return FunctionDefinition(name=tool.name or name, description=description, parameters=schema)
    raise InvalidRequest(
        f"`{at}.type`: nothing here runs tools of the type `{kind}`; leave it out, or give a tool of your own with an "
        "`input_schema`.",
        param=f"{at}.type",
        code="unsupported_parameter",
    )


def _described(tool: ToolParam) -> str | None:
    """The description, with the examples of inputs."""
    if not tool.input_examples:
        return tool.description
    examples = "\n".join(encode_json(example).decode() for example in tool.input_examples)
    return "\n\n".join(filter(None, (tool.description, f"Examples of its input:\n{examples}")))


def _schema(required: Sequence[str], **properties: Any) -> dict[str, Any]:
    return {"type": "object", "properties": properties, "required": list(required)}


def _text(description: str) -> dict[str, Any]:
    return {"type": "string", "description": description}


_PATH = _text("The path of the file or folder.")
_RANGE = {
    "type": "array",
    "items": {"type": "integer"},
    "minItems": 2,
    "maxItems": 2,
    "description": "With `view`: the first and the last line to show, counted from 1; -1 is the end of the file.",
}
_EDITS: dict[str, Any] = {
    "file_text": _text("With `create`: the content of the new file."),
    "old_str": _text("With `str_replace`: the text to replace, which occurs exactly once."),
    "new_str": _text("With `str_replace`: the text to put there."),
    "insert_line": {"type": "integer", "description": "With `insert`: the line after which to insert; 0: at the top."},
    "insert_text": _text("With `insert`: the text to insert."),
    "view_range": _RANGE,
}
_DEFINED: dict[str, tuple[str, str, dict[str, Any]]] = {
    "bash_": (
        "bash",
        "Run a command in a shell that stays open between calls, and return what it prints.",
        _schema(
            (),
            command=_text("The command to run; required unless the shell is restarted."),
            restart={"type": "boolean", "description": "True: start the shell anew instead."},
        ),
    ),
    "text_editor_": (
        "str_replace_based_edit_tool",
        "View, create and edit text files.",
        _schema(
            ("command", "path"),
            command={"type": "string", "enum": ["view", "create", "str_replace", "insert"]},
            path=_PATH,
            **_EDITS,
        ),
    ),
    "memory_": (
        "memory",
        "Keep notes in files under /memories, which outlive this conversation: look there before a task, and write "
        "down what will be needed later.",
        _schema(
            ("command",),
            command={"type": "string", "enum": ["view", "create", "str_replace", "insert", "delete", "rename"]},
            path=_PATH,
            old_path=_text("With `rename`: the path so far."),
            new_path=_text("With `rename`: the new path."),
            **_EDITS,
        ),
    ),
}
"""Tools that clients run, by the beginning of their type: usual name, description and schema."""
