"""A request of the Messages API as a chat request. Translated once; the models of a fallback chain share the result."""

from __future__ import annotations

from msgspec import UNSET

from penstock.gateway.api.anthropic.history import History
from penstock.gateway.api.anthropic.schemas import UNSUPPORTED, Conversation, MessagesRequest
from penstock.gateway.api.anthropic.tools import choice_of, tools_of
from penstock.gateway.app.decoding import given, not_supported
from penstock.gateway.app.exchange import Exchange
from penstock.gateway.generation.request_decoder import ignore_advice
from penstock.gateway.generation.schemas import ChatRequest, JsonSchema, JsonSchemaFormat
from penstock.protocol.errors import InvalidRequest

NAMES = (
    (r"response_format.*", "output_config.format.schema"),
    (r"tools\[(\d+)\]\.function\.parameters", r"tools[\1].input_schema"),
    (r"tools\[(\d+)\]\.function\.", r"tools[\1]."),
    (r"parallel_tool_calls", "tool_choice.disable_parallel_tool_use"),
    (r"stop$", "stop_sequences"),
    (r"continue_final_message", "messages"),
)
"""Parameters that chat requests call differently; see `renamed`."""
THINKING = "enable_thinking"
"""The variable with which chat templates are told whether to think."""


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
    )
    if isinstance(request, MessagesRequest):
        chat.stop = request.stop_sequences
        chat.temperature, chat.top_k, chat.top_p = request.temperature, request.top_k, request.top_p
    for name in (*_advice(request), *history.ignored):
        ignore_advice(exchange, name)
    return chat


def thinking(exchange: Exchange, request: Conversation, template: str) -> dict[str, bool] | None:
    """What `thinking` says to a chat template that can be told; else it is advice that is not followed."""
    if request.thinking is None:
        return None
    if request.thinking.type in ("enabled", "disabled") and THINKING in template:
        return {THINKING: request.thinking.type == "enabled"}
    if request.thinking.type != "disabled":
        ignore_advice(exchange, "thinking")
    return None


def _advice(request: Conversation) -> list[str]:
    """Advisory parameters that are not followed."""
    names = []
    if request.context_management is not None:
        names.append("context_management")
    if request.output_config is not None and request.output_config.effort is not None:
        names.append("output_config.effort")
    if request.speed == "fast":
        names.append("speed")
    return names


def _format(request: Conversation) -> JsonSchemaFormat | None:
    wanted = None if request.output_config is None else request.output_config.format
    wanted = wanted or request.output_format
    return None if wanted is None else JsonSchemaFormat(JsonSchema(name="output", schema=wanted.schema))
