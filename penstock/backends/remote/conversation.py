"""Reads the neutral messages of a request, for dialects that write conversations in another form."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import msgspec

from penstock.protocol.errors import InvalidRequest


def text_of(content: Any) -> str:
    """The text of a message; its other parts, such as images, are refused."""
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    found = []
    for part in content:
        if not isinstance(part, Mapping) or part.get("type") not in ("text", "input_text", "refusal"):
            kind = part.get("type") if isinstance(part, Mapping) else type(part).__name__
            raise InvalidRequest(f"Content of type `{kind}` cannot be sent to this model.", param="messages")
        found.append(part.get("text") or part.get("refusal") or "")
    return "".join(found)


def instructions(messages: Iterable[Mapping[str, Any]]) -> list[str]:
    """What system and developer messages say."""
    found = (text_of(message.get("content")) for message in messages if message["role"] in ("system", "developer"))
    return [text for text in found if text]


def turns(messages: Iterable[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """All other messages."""
    return [message for message in messages if message["role"] not in ("system", "developer")]


def arguments_of(call: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments of a call that a model made earlier, as an object."""
    text = call["function"].get("arguments") or "{}"
    if isinstance(text, Mapping):
        return dict(text)
    try:
        found = msgspec.json.decode(text)
    except (msgspec.MsgspecError, UnicodeDecodeError):
        found = None
    if not isinstance(found, dict):
        raise InvalidRequest(
            f"The arguments of the call `{call.get('id', '')}` must be a JSON object for this model.", param="messages"
        )
    return found


def tool_names(messages: Iterable[Mapping[str, Any]]) -> dict[str, str]:
    """The tool that each call id is of."""
    return {call["id"]: call["function"]["name"] for message in messages for call in message.get("tool_calls") or ()}


def offered(body: Mapping[str, Any]) -> tuple[list[Mapping[str, Any]], Any]:
    """The tools that may be called, and the choice among them: `none`, `auto`, `required` or the name in a list. Where
    only some of the tools are allowed, only those are offered."""
    tools: list[Mapping[str, Any]] = [tool["function"] for tool in body.get("tools") or ()]
    choice = body.get("tool_choice") or "auto"
    if isinstance(choice, Mapping):
        if choice.get("type") == "allowed_tools":
            allowed = choice["allowed_tools"]
            names = {tool["function"]["name"] for tool in allowed["tools"]}
            return [tool for tool in tools if tool["name"] in names], allowed["mode"]
        return tools, [choice["function"]["name"]]
    return tools, choice


def limit_of(body: Mapping[str, Any]) -> int | None:
    """The most tokens of an answer."""
    found = body.get("max_completion_tokens", body.get("max_tokens"))
    return None if found is None else int(found)


def stops_of(body: Mapping[str, Any]) -> list[str]:
    stops = body.get("stop") or []
    return [stops] if isinstance(stops, str) else list(stops)


def prompt_of(body: Mapping[str, Any]) -> str:
    """The prompt of a completion, which must be one text."""
    prompt: str | Sequence[Any] = body["prompt"]
    if isinstance(prompt, str):
        return prompt
    if len(prompt) == 1 and isinstance(prompt[0], str):
        return prompt[0]
    raise InvalidRequest("This model takes one text as the prompt, no token ids.", param="prompt")
