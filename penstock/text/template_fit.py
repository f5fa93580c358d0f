"""What conversations a chat template takes, and how others are made to fit.

Templates refuse, or silently drop, what is ordinary for agents: instructions in the middle of a conversation, several
calls in one message, text of the user right after a result. What a template takes is found out by trying it. A
conversation that it does not take is changed as little as possible, and the model still reads everything in its place.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

from msgspec import Struct

from penstock.text.chat_template import ChatTemplateError
from penstock.text.template_calls import OBJECTS, CallStyle, probe_calls

Message = dict[str, Any]
Render = Callable[[Sequence[Mapping[str, Any]]], str]


class Accepted(Struct, frozen=True):
    """What a template takes."""

    system: Literal["anywhere", "first", "none"] = "anywhere"
    """Where it takes system messages, and shows them there."""
    system_with_results: bool = True
    """It shows the first system message also when the conversation ends with the result of a tool."""
    several_calls: bool = True
    """Several calls in one message of the assistant."""
    text_after_results: bool = True
    """A message of the user right after the result of a tool."""
    repeated_users: bool = True
    """Two messages of the user in a row."""


def accepted(render: Render, style: CallStyle = OBJECTS) -> Accepted:
    """What the template behind `render` takes; `render` offers it the function `probe`. `style`: how it takes calls."""

    def shown_for(*messages: Mapping[str, Any]) -> str:
        try:
            return render(messages)
        except ChatTemplateError:
            return ""

    def takes(*messages: Mapping[str, Any]) -> bool:
        """Whether it shows all of these texts, in this order."""
        shown = shown_for(*messages)
        at = 0
        for message in messages:
            if message["content"]:
                at = shown.find(message["content"], at)
                if at < 0:
                    return False
                at += len(message["content"])
        return True

    first, second, third = ({"role": "user", "content": f"question-{word}"} for word in ("one", "two", "three"))
    answer = {"role": "assistant", "content": "answer-one"}
    begin, middle = ({"role": "system", "content": f"instruction-{word}"} for word in ("one", "two"))
    if takes(begin, first, answer, second, middle) and takes(begin, first, answer, middle, second):
        system: Literal["anywhere", "first", "none"] = "anywhere"
    else:  # where it shows the first one is its maker's decision
        system = "first" if begin["content"] in shown_for(begin, first, answer, second) else "none"
    results = [{"role": "tool", "name": "probe", "tool_call_id": id, "content": f"result-{id}"} for id in _IDS]
    one, both = probe_calls(_IDS[:1], style), probe_calls(_IDS, style)
    called = takes(first, one, results[0])
    return Accepted(
        system=system,
        system_with_results=not called or begin["content"] in shown_for(begin, first, one, results[0]),
        several_calls=not called or takes(first, both, *results),
        text_after_results=not called or takes(first, one, results[0], second),
        repeated_users=not takes(first) or takes(first, answer, second, third),
    )


PROBE = {
    "type": "function",
    "function": {"name": "probe", "description": "", "parameters": {"type": "object", "properties": {}}},
}
_IDS = ("call00001", "call00002")


def fitted(messages: list[Message], taken: Callable[[], Accepted]) -> list[Message]:
    """The conversation as the template takes it; the same list where it is ordinary."""
    if _ordinary(messages):
        return messages
    takes = taken()
    if not takes.several_calls:
        messages = _one_call_each(messages)
    dropped = not takes.system_with_results and any(message["role"] == "tool" for message in messages)
    if takes.system != "anywhere" or dropped:
        messages = _without_system(messages, keep_first=takes.system != "none" and not dropped)
    if not takes.text_after_results or not takes.repeated_users:
        messages = _joined_turns(
            messages,
            ("tool",) * (not takes.text_after_results) + ("user",) * (not takes.repeated_users),
        )
    return messages


def _ordinary(messages: Sequence[Message]) -> bool:
    """Whether every template takes it: the user and the assistant in turn."""
    before = ""
    for message in messages:
        role = message["role"]
        if role == before or role not in ("user", "assistant") or "tool_calls" in message:
            return False
        before = role
    return True


def _one_call_each(messages: Sequence[Message]) -> list[Message]:
    """Every call in a message of its own, followed by its result."""
    split: list[Message] = []
    results: dict[str, Message] = {}
    for place, message in enumerate(messages):
        calls = message.get("tool_calls") or ()
        if message["role"] == "tool" and results.pop(message.get("tool_call_id", ""), None) is not None:
            continue  # it stands after its call already
        if len(calls) < 2:
            split.append(message)
            continue
        results = {}
        for following in messages[place + 1 :]:
            if following["role"] != "tool":
                break
            results[following.get("tool_call_id", "")] = following
        for number, call in enumerate(calls):
            split.append({**message, "content": message["content"] if not number else "", "tool_calls": [call]})
            if (result := results.get(call["id"])) is not None:
                split.append(result)
    return split


def _without_system(messages: Sequence[Message], *, keep_first: bool) -> list[Message]:
    """System messages become text of the user, in a message beside them where there is one."""
    kept = 1 if keep_first and messages[0]["role"] == "system" else 0
    fit = list(messages[:kept])
    waiting: list[str] = []
    """Instructions that the next message of the user will begin with."""
    for message in messages[kept:]:
        if message["role"] == "system":
            if fit[kept:] and fit[-1]["role"] in ("user", "tool") and not waiting:
                fit[-1] = {**fit[-1], "content": _joined(fit[-1]["content"], message["content"])}
            else:
                waiting.append(message["content"])
        elif waiting and message["role"] == "user":
            fit.append({**message, "content": _joined(*waiting, message["content"])})
            waiting = []
        else:
            if waiting:
                fit.append({"role": "user", "content": _joined(*waiting)})
                waiting = []
            fit.append(message)
    if waiting:
        fit.append({"role": "user", "content": _joined(*waiting)})
    return fit


def _joined_turns(messages: Sequence[Message], after: Sequence[str]) -> list[Message]:
    """A message of the user joins the one before, if that has one of these roles."""
    fit: list[Message] = []
    for message in messages:
        if fit and message["role"] == "user" and fit[-1]["role"] in after:
            fit[-1] = {**fit[-1], "content": _joined(fit[-1]["content"], message["content"])}
        else:
            fit.append(message)
    return fit


def _joined(*texts: str) -> str:
    return "\n\n".join(filter(None, texts))
