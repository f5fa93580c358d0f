"""Tools in the bodies of chat completions: functions, tools that take free text (`custom`), choices among them, calls.

Invariant: once decoded, everything is a function. A custom tool is a function with the one argument `input`, and so are
its calls, so that prompts, grammars, conversations and other servers need to know nothing else. `FreeTextFunction`
tells the answer's renderer which calls to show as custom ones.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal, TypeVar

from msgspec import UNSET, Meta, Struct, UnsetType

from penstock.tools import free_text

Name = Annotated[str, Meta(min_length=1, max_length=256)]
T = TypeVar("T")
_ABSENT: Any = UNSET
FunctionId = Annotated[str, Meta(pattern="^[a-zA-Z0-9_.-]{1,64}$")]


class FunctionDefinition(Struct, forbid_unknown_fields=True, kw_only=True):
    name: FunctionId
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class FreeTextFunction(FunctionDefinition, kw_only=True):
    """A function with one argument, `input`: how a tool that takes free text is offered to a model. Not part of any
    request; custom tools are translated to it."""

    syntax: free_text.Syntax = "text"
    grammar: str = ""
    """What the input has to match."""


def free_text_function(name: str, description: str | None, syntax: free_text.Syntax, grammar: str) -> FreeTextFunction:
    return FreeTextFunction(
        name=name,
        description=description,
        parameters=free_text.parameters(syntax, grammar),
        syntax=syntax,
        grammar=grammar,
    )


class AnyText(Struct, forbid_unknown_fields=True, tag_field="type", tag="text"):
    """Any text."""


class TextGrammar(Struct, forbid_unknown_fields=True, kw_only=True):
    syntax: Literal["lark", "regex"]
    definition: Annotated[str, Meta(min_length=1)]


class GrammarText(Struct, forbid_unknown_fields=True, tag_field="type", tag="grammar"):
    """Text of a grammar."""

    grammar: TextGrammar


class CustomDefinition(Struct, forbid_unknown_fields=True, kw_only=True):
    """A tool that takes free text."""

    name: FunctionId
    description: str | None = None
    format: AnyText | GrammarText | None = None

    def function(self) -> FreeTextFunction:
        if isinstance(self.format, GrammarText):
            grammar = self.format.grammar
            return free_text_function(self.name, self.description, grammar.syntax, grammar.definition)
        return free_text_function(self.name, self.description, "text", "")


class ToolDefinition(Struct, forbid_unknown_fields=True, kw_only=True):
    type: Literal["function", "custom"]
    function: FunctionDefinition = _ABSENT
    custom: CustomDefinition | UnsetType = UNSET

    def __post_init__(self) -> None:
        if (custom := _custom(self.type, self.function, self.custom)) is not None:
            self.type, self.function, self.custom = "function", custom.function(), UNSET


Tools = Annotated[list[ToolDefinition], Meta(max_length=128)]


class FunctionName(Struct, forbid_unknown_fields=True):
    name: Name


class OfferedFunction(Struct, forbid_unknown_fields=True, kw_only=True):
    type: Literal["function", "custom"]
    function: FunctionName = _ABSENT
    custom: FunctionName | UnsetType = UNSET

    def __post_init__(self) -> None:
        if (custom := _custom(self.type, self.function, self.custom)) is not None:
            self.type, self.function, self.custom = "function", custom, UNSET


class AllowedTools(Struct, forbid_unknown_fields=True, kw_only=True):
    """Some of the offered tools: the prompt has all of them, and only these may be called."""

    mode: Literal["auto", "required"]
    tools: Annotated[list[OfferedFunction], Meta(min_length=1, max_length=128)]


class NamedTool(Struct, forbid_unknown_fields=True, kw_only=True):
    """The tool that must be called, or those that may be: what `type` says is given."""

    type: Literal["function", "custom", "allowed_tools"]
    function: FunctionName | None = None
    custom: FunctionName | UnsetType = UNSET
    allowed_tools: AllowedTools | None = None

    def __post_init__(self) -> None:
        if (custom := _custom(self.type, self.function, self.custom)) is not None:
            self.type, self.function, self.custom = "function", custom, UNSET


class FunctionCall(Struct, forbid_unknown_fields=True, kw_only=True):
    name: Name
    arguments: str


class CustomCall(Struct, forbid_unknown_fields=True, kw_only=True):
    name: Name
    input: str


class ToolCall(Struct, forbid_unknown_fields=True, kw_only=True):
    """A call the model made earlier in the conversation."""

    id: Name
    type: Literal["function", "custom"] = "function"
    function: FunctionCall = _ABSENT
    custom: CustomCall | UnsetType = UNSET

    def __post_init__(self) -> None:
        if (custom := _custom(self.type, self.function, self.custom)) is not None:
            called = FunctionCall(name=custom.name, arguments=free_text.arguments(custom.input))
            self.type, self.function, self.custom = "function", called, UNSET


def _custom(type: str, function: object, custom: T | UnsetType) -> T | None:
    """What is given where `type` is `custom`; None where it is not. Errors are worded as those of the decoder."""
    given, other = ("custom", "function") if type == "custom" else ("function", "custom")
    fields = {"function": function, "custom": custom}
    if fields[given] is UNSET:
        raise ValueError(f"Object missing required field `{given}`")
    if fields[other] not in (UNSET, None):
        raise ValueError(f"Object contains unknown field `{other}`")
    return None if type != "custom" or isinstance(custom, UnsetType) else custom
