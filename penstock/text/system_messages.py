"""Where a chat template takes system messages, and how a conversation is made to fit that.

Agents put instructions into the middle of a conversation. Templates take them anywhere, only at the beginning, or not
at all; where one does not, its text joins a message of the user beside it, so that the model still reads it in place.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

from penstock.text.chat_template import ChatTemplateError

Places = Literal["anywhere", "first", "none"]
Message = dict[str, Any]
_MARK = "instruction-to-find"
_TALK = (
    {"role": "user", "content": "question"},
    {"role": "assistant", "content": "answer"},
    {"role": "user", "content": "question"},
)
_SYSTEM = {"role": "system", "content": _MARK}


def places(render: Callable[[Sequence[Mapping[str, Any]]], str]) -> Places:
    """Where the template behind `render` takes system messages."""

    def shows(messages: Sequence[Mapping[str, Any]]) -> bool:
        try:
            return _MARK in render(messages)
        except ChatTemplateError:
            return False

    if shows((*_TALK, _SYSTEM)) and shows((*_TALK[:2], _SYSTEM, _TALK[2])):
        return "anywhere"
    return "first" if shows((_SYSTEM, *_TALK)) else "none"


def placed(messages: list[Message], allowed: Callable[[], Places]) -> list[Message]:
    """The conversation with system messages only where they are allowed."""
    if not any(message["role"] == "system" for message in messages[1:]):
        if not messages or messages[0]["role"] != "system" or allowed() != "none":
            return messages
    elif allowed() == "anywhere":
        return messages
    kept = 1 if allowed() == "first" and messages[0]["role"] == "system" else 0
    fitted = messages[:kept]
    waiting: list[str] = []
    """Instructions that the next message of the user will begin with."""
    for message in messages[kept:]:
        if message["role"] == "system":
            if fitted[kept:] and fitted[-1]["role"] in ("user", "tool") and not waiting:
                fitted[-1] = {**fitted[-1], "content": _joined(fitted[-1]["content"], message["content"])}
            else:
                waiting.append(message["content"])
        elif waiting and message["role"] == "user":
            fitted.append({**message, "content": _joined(*waiting, message["content"])})
            waiting = []
        else:
            if waiting:
                fitted.append({"role": "user", "content": _joined(*waiting)})
                waiting = []
            fitted.append(message)
    if waiting:
        fitted.append({"role": "user", "content": _joined(*waiting)})
    return fitted


def _joined(*texts: str) -> str:
    return "\n\n".join(filter(None, texts))
