"""Chat messages, checked and flattened for the chat template."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import msgspec

from penstock.gateway.app.decoding import given, not_supported
from penstock.gateway.app.unknown_fields import UnknownFields
from penstock.gateway.generation.schemas import MESSAGE_UNSUPPORTED, ChatMessage, ChatRequest, TokenizeRequest
from penstock.protocol.errors import InvalidRequest

Message = dict[str, Any]
"""A message as chat templates take it: `role`, `content` as text, and what belongs to calls."""

TEXT_PARTS = ("text", "refusal")
"""Types of content parts whose text is part of a message."""


def template_messages(messages: list[ChatMessage], earlier_calls: Iterable[str] = ()) -> list[Message]:
    """`earlier_calls`: ids of calls made before these messages, which results may answer too."""
    flat = []
    calls = set(earlier_calls)
    for i, message in enumerate(messages):
        if message.role == "tool":
            _check_result(message, f"messages[{i}]", calls)
        elif message.tool_calls:
            calls.update(call.id for call in message.tool_calls)
        flat.append(_template_message(message, f"messages[{i}]"))
    return flat


def message_text(message: ChatMessage, index: int) -> str:
    """The text of one message."""
    return str(_template_message(message, f"messages[{index}]")["content"])


def _check_result(message: ChatMessage, at: str, calls: set[str]) -> None:
    param = f"{at}.tool_call_id"
    if message.tool_call_id is None:
        raise InvalidRequest(f"Missing required parameter: `{param}`.", param=param, code="missing_parameter")
    if message.tool_call_id not in calls:
        raise InvalidRequest(
            f"`{param}` answers no call: no `tool_calls` before it has the id {message.tool_call_id!r}.", param=param
        )


def _template_message(message: ChatMessage, at: str) -> dict[str, Any]:
    if message.role == "function":
        raise InvalidRequest(
            "Messages with the role `function` are not supported; use `tool`.",
            param=f"{at}.role",
            code="unsupported_parameter",
        )
    if message.tool_calls and message.role != "assistant":
        raise InvalidRequest("Only the assistant makes `tool_calls`.", param=f"{at}.tool_calls")
    if message.tool_call_id is not None and message.role != "tool":
        raise InvalidRequest("`tool_call_id` goes with the role `tool`.", param=f"{at}.tool_call_id")
    for name in MESSAGE_UNSUPPORTED:
        if given(getattr(message, name)):
            raise not_supported(f"{at}.{name}")
    # The annotations of an assistant message are its citations, which the model need not see again.
    if given(message.annotations) and message.role != "assistant":
        raise not_supported(f"{at}.annotations")
    content = message.content
    if content is None:
        if message.role == "assistant" and message.refusal is not None:
            content = message.refusal
        elif message.tool_calls or (message.role == "assistant" and thought_of(message)):
            content = ""
        else:
            raise InvalidRequest(f"Missing required parameter: `{at}.content`.", param=f"{at}.content")
    # `developer` is the newer name of `system`; templates know only `system`.
    role = "system" if message.role == "developer" else message.role
    flat: dict[str, Any] = {"role": role, "content": _text(content, at)}
    if message.name is not None:
        flat["name"] = message.name
    if message.tool_calls:
        flat["tool_calls"] = [msgspec.to_builtins(call) for call in message.tool_calls]
    if message.tool_call_id is not None:
        flat["tool_call_id"] = message.tool_call_id
    if thought := thought_of(message):
        if message.role != "assistant":
            raise InvalidRequest("Only the assistant has thoughts.", param=f"{at}.reasoning_content")
        flat["reasoning_content"] = thought
    return flat


def thought_of(message: ChatMessage) -> str | None:
    """What the assistant thought before a message."""
    return message.reasoning_content or message.reasoning or message.thinking


def _text(content: str | list[dict[str, Any]], at: str) -> str:
    if isinstance(content, str):
        return content
    if not content:
        raise InvalidRequest(f"`{at}.content` is an empty list.", param=f"{at}.content")
    return "".join(_part(part, f"{at}.content[{i}]") for i, part in enumerate(content))


def strip_parts(request: ChatRequest | TokenizeRequest, unknown: UnknownFields) -> None:
    """Takes fields that are not known out of the content parts of messages."""
    for message in request.messages or ():
        if isinstance(message.content, list):
            for part in message.content:
                if (kind := part.get("type")) in TEXT_PARTS:
                    for name in part.keys() - {"type", kind}:
                        unknown.add(f"messages.content.{name}", part.pop(name))


def _part(part: dict[str, Any], at: str) -> str:
    kind = part.get("type")
    if kind not in TEXT_PARTS:
        if not isinstance(kind, str):
            raise InvalidRequest(f"`{at}.type` must be a string.", param=f"{at}.type")
        raise InvalidRequest(
            f"Content parts of type `{kind[:64]}` are not supported yet; send text.",
            param=f"{at}.type",
            code="unsupported_parameter",
        )
    unknown = sorted(part.keys() - {"type", kind})
    if unknown:
        name = f"{at}.{unknown[0]}"[:128]
        raise InvalidRequest(f"Unknown parameter: `{name}`.", param=name, code="unknown_parameter")
    text = part.get(kind)
    if not isinstance(text, str):
        raise InvalidRequest(f"`{at}.{kind}` must be a string.", param=f"{at}.{kind}")
    return text
