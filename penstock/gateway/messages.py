"""Chat messages, checked and flattened to what a chat template takes."""

from __future__ import annotations

from typing import Any

from penstock.gateway.decoding import given, not_supported
from penstock.gateway.schemas import MESSAGE_UNSUPPORTED, ChatMessage
from penstock.protocol.errors import InvalidRequest


def template_messages(messages: list[ChatMessage]) -> list[dict[str, Any]]:
    return [_template_message(message, f"messages[{i}]") for i, message in enumerate(messages)]


def _template_message(message: ChatMessage, at: str) -> dict[str, Any]:
    if message.role in ("tool", "function"):
        raise InvalidRequest(
            f"Messages with the role `{message.role}` are not supported yet.",
            param=f"{at}.role",
            code="unsupported_parameter",
        )
    for name in MESSAGE_UNSUPPORTED:
        if given(getattr(message, name)):
            raise not_supported(f"{at}.{name}")
    if given(message.annotations):
        raise not_supported(f"{at}.annotations")
    content = message.content
    if content is None:
        if message.role == "assistant" and message.refusal is not None:
            content = message.refusal
        else:
            raise InvalidRequest(f"Missing required parameter: `{at}.content`.", param=f"{at}.content")
    # `developer` is the newer name of the same thing; templates know only `system`.
    flat = {"role": "system" if message.role == "developer" else message.role, "content": _text(content, at)}
    if message.name is not None:
        flat["name"] = message.name
    return flat


def _text(content: str | list[dict[str, Any]], at: str) -> str:
    if isinstance(content, str):
        return content
    if not content:
        raise InvalidRequest(f"`{at}.content` is an empty list.", param=f"{at}.content")
    return "".join(_part(part, f"{at}.content[{i}]") for i, part in enumerate(content))


def _part(part: dict[str, Any], at: str) -> str:
    kind = part.get("type")
    if kind not in ("text", "refusal"):
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
