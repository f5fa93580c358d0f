"""Chat messages, checked and flattened for the chat template."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from types import MappingProxyType
from typing import Any

import msgspec

from penstock.gateway.app.decoding import given, not_supported, part_not_supported
from penstock.gateway.app.unknown_fields import UnknownFields
from penstock.gateway.generation.older_functions import CallHistory
from penstock.gateway.generation.schemas import MESSAGE_UNSUPPORTED, ChatMessage, ChatRequest, TokenizeRequest
from penstock.protocol.errors import InvalidRequest

Message = dict[str, Any]
"""A message as chat templates take it: `role`, `content` as text, and what belongs to calls."""

TEXT_PARTS = ("text", "refusal")
"""Types of content parts whose text is part of a message."""


def template_messages(
    messages: list[ChatMessage], earlier_calls: Mapping[str, str] = MappingProxyType({})
) -> list[Message]:
    """`earlier_calls`: functions called before these messages, by the id of the call, which results may answer too."""
    flat = []
    calls = CallHistory(earlier_calls)
    for i, message in enumerate(messages):
        at = f"messages[{i}]"
        if message.role == "tool":
            _check_result(message, at, calls)
        elif message.tool_calls:
            for call in message.tool_calls:
                calls.add(call.id, call.function.name)
        said = _template_message(message, at)
        if message.function_call is not None:
            said["tool_calls"] = calls.called(message)
        elif message.role == "function":
            said |= {"role": "tool", "tool_call_id": calls.result_of(said["name"])}
        flat.append(said)
    return flat


def call_names(messages: Iterable[Message]) -> dict[str, str]:
    """The functions that messages call, by the id of the call."""
    return {call["id"]: call["function"]["name"] for message in messages for call in message.get("tool_calls") or ()}


def message_text(message: ChatMessage, index: int) -> str:
    """The text of one message."""
    return str(_template_message(message, f"messages[{index}]")["content"])


def _check_result(message: ChatMessage, at: str, calls: CallHistory) -> None:
    param = f"{at}.tool_call_id"
    if message.tool_call_id is None:
        raise InvalidRequest(f"Missing required parameter: `{param}`.", param=param, code="missing_parameter")
    if message.tool_call_id not in calls:
        raise InvalidRequest(
            f"`{param}` answers no call: no `tool_calls` before it has the id {message.tool_call_id!r}.", param=param
        )
    calls.answered(message.tool_call_id)


def _template_message(message: ChatMessage, at: str) -> dict[str, Any]:
    if message.role == "function" and not message.name:
        raise InvalidRequest(f"Missing required parameter: `{at}.name`.", param=f"{at}.name", code="missing_parameter")
    if message.function_call is not None and (message.role != "assistant" or message.tool_calls):
        raise InvalidRequest(
            "`function_call` goes with the role `assistant`, and without `tool_calls`.", param=f"{at}.function_call"
        )
    if message.tool_calls and message.role != "assistant":
        raise InvalidRequest("Only the assistant makes `tool_calls`.", param=f"{at}.tool_calls")
    if message.tool_call_id is not None and message.role != "tool":
        raise InvalidRequest("`tool_call_id` goes with the role `tool`.", param=f"{at}.tool_call_id")
    for name, why in MESSAGE_UNSUPPORTED.items():
        if given(getattr(message, name)):
            raise not_supported(f"{at}.{name}", why)
    # The annotations of an assistant message are its citations, which the model need not see again.
    if given(message.annotations) and message.role != "assistant":
        raise not_supported(f"{at}.annotations")
    content = message.content
    if content is None:
        if message.role == "assistant" and message.refusal is not None:
            content = message.refusal
        elif message.role == "function" or (message.role == "assistant" and _says_otherwise(message)):
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
        _check_one_thought(message, at)
        flat["reasoning_content"] = thought
    return flat


def _says_otherwise(message: ChatMessage) -> bool:
    """Whether a message of the assistant has something else than text."""
    return bool(message.tool_calls or message.function_call or thought_of(message))


THOUGHT_NAMES = ("reasoning_content", "reasoning", "thinking")


def thought_of(message: ChatMessage) -> str | None:
    """What the assistant thought before a message."""
    return message.reasoning_content or message.reasoning or message.thinking


def _check_one_thought(message: ChatMessage, at: str) -> None:
    """Clients send back what we answer, the same thought under several names; different ones cannot all be it."""
    given = {name: thought for name in THOUGHT_NAMES if (thought := getattr(message, name))}
    first, *others = given
    for name in others:
        if given[name] != given[first]:
            raise InvalidRequest(f"`{at}.{first}` and `{at}.{name}` differ; send one of them.", param=f"{at}.{name}")


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


OF_RESPONSES = frozenset(("input_text", "output_text"))
"""What `/v1/responses` calls parts with text."""


def _part(part: dict[str, Any], at: str) -> str:
    kind = part.get("type")
    if kind not in TEXT_PARTS:
        if not isinstance(kind, str):
            raise InvalidRequest(f"`{at}.type` must be a string.", param=f"{at}.type")
        instead = "send a part of type `text`" if kind in OF_RESPONSES else ""
        raise part_not_supported(kind, f"{at}.type", instead)
    unknown = sorted(part.keys() - {"type", kind})
    if unknown:
        name = f"{at}.{unknown[0]}"[:128]
        raise InvalidRequest(f"Unknown parameter: `{name}`.", param=name, code="unknown_parameter")
    text = part.get(kind)
    if not isinstance(text, str):
        raise InvalidRequest(f"`{at}.{kind}` must be a string.", param=f"{at}.{kind}")
    return text
