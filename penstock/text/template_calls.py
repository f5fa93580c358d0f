"""How a chat template shows function calls of the history, found out by trying it.

Most templates take the arguments of a call as an object; some, such as DeepSeek's, join them to other text, so they
must be text. Some show calls only in messages without content, or with a null.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from msgspec import Struct, structs

from penstock.text.chat_template import ChatTemplateError


class CallStyle(Struct, frozen=True):
    """How messages with calls are given to a template."""

    arguments_as_text: bool = False
    without_content: bool = False
    """Empty content is left out, as a null."""
    alone: bool = False
    """Calls are lost in a message that has text, too; they get one of their own."""
    shown: bool = True
    """Whether the template shows calls and results at all."""
    only_objects: bool = False
    """It fails where the arguments of a call are no object, as those of a truncated call."""


OBJECTS = CallStyle()
_STYLES = (
    OBJECTS,
    CallStyle(arguments_as_text=True),
    CallStyle(without_content=True),
    CallStyle(arguments_as_text=True, without_content=True),
)
_ID, _NAME, _KEY, _VALUE, _RESULT = "call00001", "probe", "probe-key", "probe-value", "probe-result"
_CUT = "probe-cut"
_QUESTION = {"role": "user", "content": "question"}
_ANSWER = {"role": "assistant", "content": "some-text"}
_RETURNED = {"role": "tool", "name": _NAME, "tool_call_id": _ID, "content": _RESULT}


def probe_calls(ids: Sequence[str], style: CallStyle, arguments: Any = None) -> dict[str, Any]:
    """A message with calls of the function `probe`."""
    if arguments is None:
        arguments = '{"probe-key": "probe-value"}' if style.arguments_as_text else {_KEY: _VALUE}
    calls = [{"id": id, "type": "function", "function": {"name": _NAME, "arguments": arguments}} for id in ids]
    return {"role": "assistant", "content": None if style.without_content else "", "tool_calls": calls}


def call_style(render: Callable[[Sequence[Mapping[str, Any]]], str]) -> CallStyle:
    """The style in which the template behind `render` shows calls."""

    def rendered(*messages: Mapping[str, Any]) -> str:
        try:
            return render(messages)
        except ChatTemplateError:
            return ""

    def shown(*messages: Mapping[str, Any]) -> str:
        """The conversation, if the call in it is there, and its result behind it."""
        text = rendered(*messages)
        complete = text.find(_RESULT) > text.find(_VALUE) > text.find(_NAME) >= 0
        return text if complete and f"'{_KEY}'" not in text else ""

    found: dict[CallStyle, str] = {}
    for style in _STYLES:
        if text := shown(_QUESTION, probe_calls([_ID], style), _RETURNED):
            found[style] = text
            if style == OBJECTS:
                break
    if not found:
        return CallStyle(shown=False)
    best = min(found, key=lambda style: len(found[style]))
    call = probe_calls([_ID], best)
    alone = not shown(_QUESTION, call | {"content": "some-text"}, _RETURNED) and bool(
        shown(_QUESTION, _ANSWER, call, _RETURNED, _ANSWER, _QUESTION)
    )
    only_objects = not best.arguments_as_text and _CUT not in rendered(
        _QUESTION, probe_calls([_ID], best, _CUT), _RETURNED
    )
    return structs.replace(best, alone=alone, only_objects=only_objects)
