"""System messages in the middle of a conversation, for templates that take them there and for those that do not."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import pytest

from penstock.text.chat_template import ChatTemplate, ChatTemplateError
from penstock.text.system_messages import Places, placed, places

EVERYWHERE = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"
FIRST = (
    "{% for m in messages %}{% if m.role == 'system' and not loop.first %}{{ raise_exception('system comes first') }}"
    "{% endif %}<{{ m.role }}>{{ m.content }}{% endfor %}"
)
SILENT = "{% for m in messages %}{% if m.role != 'system' or loop.first %}{{ m.content }}{% endif %}{% endfor %}"
NOWHERE = "{% for m in messages %}{% if m.role != 'system' %}<{{ m.role }}>{{ m.content }}{% endif %}{% endfor %}"


@pytest.mark.parametrize(
    ("source", "expected"), [(EVERYWHERE, "anywhere"), (FIRST, "first"), (SILENT, "first"), (NOWHERE, "none")]
)
def test_where_a_template_takes_them(source: str, expected: Places) -> None:
    template = ChatTemplate(source, {})

    def render(messages: Sequence[Mapping[str, Any]]) -> str:
        return template.render(messages)

    assert places(render) == expected


def test_a_template_that_fails_takes_none() -> None:
    def render(messages: Sequence[Mapping[str, Any]]) -> str:
        raise ChatTemplateError("no")

    assert places(render) == "none"


def short(messages: Sequence[Mapping[str, Any]]) -> str:
    return " ".join(f"{message['role'][0]}:{message['content'].replace(chr(10) * 2, '+')}" for message in messages)


@pytest.mark.parametrize(
    ("given", "first", "none"),
    [
        ("s:A u:q", "s:A u:q", "u:A+q"),
        ("u:q s:A", "u:q+A", "u:q+A"),
        ("s:A u:q s:B", "s:A u:q+B", "u:A+q+B"),
        ("s:A s:B u:q", "s:A u:B+q", "u:A+B+q"),
        ("s:A u:q a:r s:B u:p", "s:A u:q a:r u:B+p", "u:A+q a:r u:B+p"),
        ("u:q a:r t:x s:B a:y", "u:q a:r t:x+B a:y", "u:q a:r t:x+B a:y"),
        ("u:q a:r s:B a:y", "u:q a:r u:B a:y", "u:q a:r u:B a:y"),
        ("s:A", "s:A", "u:A"),
        ("u:q a:r s:B", "u:q a:r u:B", "u:q a:r u:B"),
        ("s:A a:r", "s:A a:r", "u:A a:r"),
    ],
)
def test_they_join_the_user_s_text_where_they_are_not_taken(given: str, first: str, none: str) -> None:
    roles = {"s": "system", "u": "user", "a": "assistant", "t": "tool"}
    messages = [{"role": roles[one[0]], "content": one[2:]} for one in given.split()]
    assert short(placed(messages, lambda: "first")) == first
    assert short(placed(messages, lambda: "none")) == none
    assert placed(messages, lambda: "anywhere") is messages
    assert short(messages) == given


def test_ordinary_conversations_are_not_looked_at() -> None:
    def asked() -> Places:
        raise AssertionError("there is nothing to decide")

    messages = [{"role": "user", "content": "q"}]
    assert placed(messages, asked) is messages and placed([], asked) == []
