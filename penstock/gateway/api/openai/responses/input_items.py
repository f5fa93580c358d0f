"""Input items as chat messages. A call joins the assistant's message before it, as in chat completions, so that the
same conversation has the same prompt in both APIs."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from penstock.gateway.api.openai.responses.schemas import (
    LOGPROBS,
    CallItem,
    CallOutputItem,
    InputText,
    MessageItem,
    OutputText,
    Refusal,
    ResponsesRequest,
)
from penstock.gateway.app.decoding import decode
from penstock.gateway.app.exchange import Exchange
from penstock.gateway.generation.request_decoder import RequestDecoder
from penstock.gateway.generation.schemas import ChatMessage, ChatRequest, FunctionCall, ToolCall
from penstock.protocol.errors import InvalidRequest


class _Kind(msgspec.Struct):
    type: str | None = None


_kind = msgspec.json.Decoder(_Kind)
_message = RequestDecoder(MessageItem)
_call = RequestDecoder(CallItem)
_output = RequestDecoder(CallOutputItem)
_KINDS = "message, function_call, function_call_output"


def chat_request(request: ResponsesRequest, conversation: list[ChatMessage]) -> ChatRequest:
    """The request as a chat request. Instructions are for this answer only, and not part of the conversation."""
    messages = conversation
    if request.instructions is not None:
        messages = [ChatMessage(role="system", content=request.instructions), *conversation]
    return ChatRequest(
        model=request.model,
        messages=messages,
        temperature=request.temperature,
        top_p=request.top_p,
        tools=None if request.tools is None else [tool.definition() for tool in request.tools],
        tool_choice=request.choice(),
        parallel_tool_calls=request.parallel_tool_calls,
        response_format=None if request.text is None else request.text.response_format(),
        service_tier=request.service_tier,
        logprobs=LOGPROBS in (request.include or ()),
        top_logprobs=request.top_logprobs,
        rag=request.rag,
    )


def conversation_of(
    exchange: Exchange, given: str | Sequence[msgspec.Raw], earlier: Sequence[ChatMessage]
) -> list[ChatMessage]:
    """The earlier conversation and what `input` adds to it."""
    messages = list(earlier)
    if isinstance(given, str):
        return [*messages, ChatMessage(role="user", content=given)]
    known = {call.id for message in earlier for call in message.tool_calls or ()}
    calls = set(known)
    for index, raw in enumerate(given):
        at = f"input[{index}]"
        kind = decode(_kind, raw, at).type or "message"
        if kind == "message":
            message = _message(exchange, raw, at)
            messages.append(ChatMessage(role=message.role, content=_text(message.content)))
        elif kind == "function_call":
            call = _call(exchange, raw, at)
            if call.call_id in known:  # sent again before its result
                continue
            calls.add(call.call_id)
            add_call(
                messages, ToolCall(id=call.call_id, function=FunctionCall(name=call.name, arguments=call.arguments))
            )
        elif kind == "function_call_output":
            result = _output(exchange, raw, at)
            if result.call_id not in calls:
                raise InvalidRequest(
                    f"`{at}.call_id` answers no call: no `function_call` before it has the id {result.call_id!r}.",
                    param=f"{at}.call_id",
                )
            messages.append(ChatMessage(role="tool", tool_call_id=result.call_id, content=_text(result.output)))
        else:
            raise InvalidRequest(
                f"Items of type `{kind[:64]}` are not supported; there are {_KINDS}.",
                param=f"{at}.type",
                code="unsupported_parameter",
            )
    return messages


def add_call(messages: list[ChatMessage], call: ToolCall) -> None:
    """Add a call to the last message of the assistant, or as a new one."""
    if not messages or messages[-1].role != "assistant":
        messages.append(ChatMessage(role="assistant"))
    last = messages[-1]
    messages[-1] = msgspec.structs.replace(last, tool_calls=[*(last.tool_calls or ()), call])


def _text(content: str | Sequence[InputText | OutputText | Refusal]) -> str:
    if isinstance(content, str):
        return content
    return "".join(part.refusal if isinstance(part, Refusal) else part.text for part in content)
