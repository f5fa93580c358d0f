"""Messages with blocks as chat messages. One message may become several: every tool result is one of its own."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from msgspec import UNSET

from penstock.gateway.api.anthropic.schemas import (
    UNSUPPORTED,
    AnyChoice,
    AutoChoice,
    Conversation,
    Message,
    MessagesRequest,
    NamedChoice,
    NoChoice,
    TextBlock,
    ToolResultBlock,
    ToolUseBlock,
)
from penstock.gateway.app.decoding import given, not_supported
from penstock.gateway.app.exchange import encode_json
from penstock.gateway.generation.schemas import (
    ChatMessage,
    ChatRequest,
    FunctionCall,
    FunctionDefinition,
    FunctionName,
    JsonSchema,
    JsonSchemaFormat,
    NamedTool,
    ToolCall,
    ToolDefinition,
)
from penstock.protocol.errors import InvalidRequest

NAMES = (
    (r"response_format.*", "output_config.format.schema"),
    (r"tools\[(\d+)\]\.function\.parameters", r"tools[\1].input_schema"),
    (r"tools\[(\d+)\]\.function\.", r"tools[\1]."),
    (r"parallel_tool_calls", "tool_choice.disable_parallel_tool_use"),
    (r"stop$", "stop_sequences"),
)
"""Parameters that chat requests call differently; see `renamed`."""


def chat_request(request: Conversation) -> ChatRequest:
    """The request as a chat request; raises errors that only this API knows."""
    for name in UNSUPPORTED:
        if given(getattr(request, name, UNSET)):
            raise not_supported(name)
    choice, parallel = _choice(request)
    chat = ChatRequest(
        model=request.model,
        messages=_messages(request),
        tools=_tools(request),
        tool_choice=choice,
        parallel_tool_calls=parallel,
        response_format=_format(request),
    )
    if isinstance(request, MessagesRequest):
        chat.stop = request.stop_sequences
        chat.temperature, chat.top_k, chat.top_p = request.temperature, request.top_k, request.top_p
    return chat


def _messages(request: Conversation) -> list[ChatMessage]:
    if request.messages[-1].role == "assistant":
        raise InvalidRequest(
            "The last message is the assistant's; continuing it is not supported. End with a message of the user.",
            param="messages",
            code="unsupported_parameter",
        )
    messages: list[ChatMessage] = []
    if request.system:
        messages.append(ChatMessage(role="system", content=_text(request.system, "\n\n")))
    calls: set[str] = set()
    for index, message in enumerate(request.messages):
        messages += _turn(message, f"messages[{index}]", calls)
    return messages


def _turn(message: Message, at: str, calls: set[str]) -> list[ChatMessage]:
    """The chat messages of one message. `calls`: ids of the tool uses so far, which results must answer."""
    if isinstance(message.content, str):
        return [ChatMessage(role=message.role, content=message.content)]
    turn: list[ChatMessage] = []
    texts: list[str] = []
    made: list[ToolCall] = []
    for index, block in enumerate(message.content):
        here = f"{at}.content[{index}]"
        if isinstance(block, TextBlock):
            texts.append(block.text)
        elif isinstance(block, ToolUseBlock):
            _belongs(message, "assistant", "tool_use", here)
            calls.add(block.id)
            function = FunctionCall(name=block.name, arguments=encode_json(block.input).decode())
            made.append(ToolCall(id=block.id, function=function))
        else:
            _belongs(message, "user", "tool_result", here)
            if block.tool_use_id not in calls:
                raise InvalidRequest(
                    f"`{here}.tool_use_id` answers no call: no `tool_use` before it has the id {block.tool_use_id!r}.",
                    param=f"{here}.tool_use_id",
                )
            turn.append(ChatMessage(role="tool", tool_call_id=block.tool_use_id, content=_result(block)))
    if texts or made:
        # Results come first: they answer the turn before, and the text refers to them.
        turn.append(ChatMessage(role=message.role, content="".join(texts), tool_calls=made or None))
    return turn


def _belongs(message: Message, role: str, kind: str, at: str) -> None:
    if message.role != role:
        raise InvalidRequest(f"`{kind}` blocks go into messages of the {role}.", param=f"{at}.type")


def _result(block: ToolResultBlock) -> str:
    text = _text(block.content or "", "")
    return f"Error: {text}" if block.is_error else text  # chat templates have no other place for it


def _text(content: str | Sequence[TextBlock], between: str) -> str:
    return content if isinstance(content, str) else between.join(block.text for block in content)


def _tools(request: Conversation) -> list[ToolDefinition] | None:
    if request.tools is None:
        return None
    return [
        ToolDefinition(
            type="function",
            function=FunctionDefinition(
                name=tool.name, description=tool.description, parameters=tool.input_schema, strict=tool.strict
            ),
        )
        for tool in request.tools
    ]


def _choice(request: Conversation) -> tuple[Literal["none", "auto", "required"] | NamedTool | None, bool | None]:
    """`tool_choice`, and whether several calls may be made, as chat completions have them."""
    choice = request.tool_choice
    if choice is None or isinstance(choice, NoChoice):
        return (None if choice is None else "none"), None
    parallel = False if choice.disable_parallel_tool_use else None
    match choice:
        case AutoChoice():
            return "auto", parallel
        case AnyChoice():
            return "required", parallel
        case NamedChoice(name=name):
            return NamedTool(type="function", function=FunctionName(name)), parallel


def _format(request: Conversation) -> JsonSchemaFormat | None:
    wanted = None if request.output_config is None else request.output_config.format
    return None if wanted is None else JsonSchemaFormat(JsonSchema(name="output", schema=wanted.schema))
