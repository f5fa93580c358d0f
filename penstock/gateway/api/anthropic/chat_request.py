"""A request of the Messages API as a chat request. Translated once; the models of a fallback chain share the result."""

from __future__ import annotations

from typing import cast, get_args

from msgspec import UNSET

from penstock.gateway.api.anthropic.history import History
from penstock.gateway.api.anthropic.schemas import UNSUPPORTED, Conversation, MessagesRequest
from penstock.gateway.api.anthropic.tools import choice_of, tools_of
from penstock.gateway.app.decoding import given, not_supported
from penstock.gateway.app.exchange import Exchange
from penstock.gateway.generation.request_decoder import ignore_advice
from penstock.gateway.generation.schemas import ChatRequest, Effort, JsonSchema, JsonSchemaFormat, ThinkingOptions
from penstock.protocol.errors import InvalidRequest

NAMES = (
    (r"response_format.*", "output_config.format.schema"),
    (r"tools\[(\d+)\]\.function\.parameters", r"tools[\1].input_schema"),
    (r"tools\[(\d+)\]\.function\.", r"tools[\1]."),
    (r"parallel_tool_calls", "tool_choice.disable_parallel_tool_use"),
    (r"stop$", "stop_sequences"),
    (r"continue_final_message", "messages"),
    (r"reasoning_effort", "output_config.effort"),
)
"""Parameters that chat requests call differently; see `renamed`."""
_IGNORED = {
    "reasoning_effort": "output_config.effort",
    "messages.reasoning_content": "messages.content.thinking",
}
"""The same for what is named as ignored."""
_EFFORTS = frozenset(get_args(Effort))


class ThreadsUnsupported(InvalidRequest):
    """`thread`: the server would keep the conversation. Clients send it whole instead when they read this code."""

    code = "thread_unsupported_request"

    def __init__(self) -> None:
        super().__init__(
            "`thread`: this server keeps no threads of messages; send the whole conversation.", param="thread"
        )


def chat_request(exchange: Exchange, request: Conversation) -> ChatRequest:
    """The request as a chat request; what of it has no effect is noted for the header. Raises errors that only this
    API knows."""
    if given(request.thread):
        raise ThreadsUnsupported
    for name, instead in UNSUPPORTED.items():
        if given(getattr(request, name, UNSET)):
            error = not_supported(name)
            error.message = f"{error.message} {instead}".strip()
            raise error
    history = History()
    history.add_system(request.system)
    for index, message in enumerate(request.messages):
        history.add(message, f"messages[{index}]")
    if not history.messages:
        raise InvalidRequest("`messages` say nothing.", param="messages")
    tools = tools_of(request, history)
    choice, parallel = choice_of(request, tools)
    chat = ChatRequest(
        model=request.model,
        messages=history.messages,
        tools=tools,
        tool_choice=choice,
        parallel_tool_calls=parallel,
        response_format=_format(request),
        continue_final_message=history.messages[-1].role == "assistant" or None,
        thinking=_thinking(request),
    )
    effort = None if request.output_config is None else request.output_config.effort
    if effort in _EFFORTS:
        chat.reasoning_effort = cast(Effort, effort)
    if isinstance(request, MessagesRequest):
        chat.stop = request.stop_sequences
        chat.temperature, chat.top_k, chat.top_p = request.temperature, request.top_k, request.top_p
    for name in (*_advice(request), *history.ignored):
        ignore_advice(exchange, name)
    return chat


def _thinking(request: Conversation) -> ThinkingOptions | None:
    asked = request.thinking
    if asked is None:
        return None
    return ThinkingOptions(
        type="adaptive" if asked.type == "between_tools" else asked.type, budget_tokens=asked.budget_tokens
    )


def rename_ignored(exchange: Exchange) -> None:
    """What a chat request ignored, in the words of this API."""
    exchange.ignored[:] = [_IGNORED.get(name, name) for name in exchange.ignored]


def _advice(request: Conversation) -> list[str]:
    """Advisory parameters that are not followed."""
    names = []
    if request.context_management is not None:
        names.append("context_management")
    effort = None if request.output_config is None else request.output_config.effort
    if effort is not None and effort not in _EFFORTS:
        names.append("output_config.effort")
    if request.speed == "fast":
        names.append("speed")
    return names


def _format(request: Conversation) -> JsonSchemaFormat | None:
    wanted = None if request.output_config is None else request.output_config.format
    wanted = wanted or request.output_format
    return None if wanted is None else JsonSchemaFormat(JsonSchema(name="output", schema=wanted.schema))
