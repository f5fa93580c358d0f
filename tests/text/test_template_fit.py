"""Conversations of agents, for templates that take them and for those that do not."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import pytest

from penstock.text.chat_template import ChatTemplate, ChatTemplateError
from penstock.text.template_calls import CallStyle, call_style
from penstock.text.template_fit import PROBE, Accepted, accepted, fitted
from penstock.tools.formats import FORMATS
from penstock.tools.prompt import native

EACH = "<{{ m.role }}>{{ m.content }}{% for c in m.tool_calls or [] %}{{ c.function.name }}{% endfor %}"
ANYTHING = "{% for m in messages %}" + EACH + "{% endfor %}"
FIRST = (
    "{% for m in messages %}{% if m.role == 'system' and not loop.first %}{{ raise_exception('system comes first') }}"
    "{% endif %}" + EACH + "{% endfor %}"
)
SILENT = "{% for m in messages %}{% if m.role != 'system' or loop.first %}" + EACH + "{% endif %}{% endfor %}"
LAST_COUNTS = (
    "{% set ns = namespace(s='') %}{% for m in messages %}{% if m.role == 'system' %}{% set ns.s = m.content %}"
    "{% endif %}{% endfor %}{{ ns.s }}{% for m in messages %}{% if m.role != 'system' %}"
    + EACH
    + "{% endif %}{% endfor %}"
)
BEFORE_THE_LAST = (
    "{% if messages[0].role == 'system' %}{% set s = messages[0].content %}{% set rest = messages[1:] %}{% else %}"
    "{% set s = '' %}{% set rest = messages %}{% endif %}{% for m in rest %}{% if m.role == 'system' %}"
    "{{ raise_exception('no') }}{% endif %}{% if loop.last and m.role == 'user' %}{{ s }}{% endif %}"
    + EACH
    + "{% endfor %}"
)
NOWHERE = "{% for m in messages %}{% if m.role != 'system' %}" + EACH + "{% endif %}{% endfor %}"
STRICT = (
    "{% set ns = namespace(before='') %}{% for m in messages %}"
    "{% if m.role == 'user' and ns.before in ('user', 'tool') %}{{ raise_exception('alternate') }}{% endif %}"
    "{% if m.tool_calls and m.tool_calls | length > 1 %}{{ raise_exception('one call at once') }}{% endif %}"
    "{% set ns.before = m.role %}" + EACH + "{% endfor %}"
)


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        (ANYTHING, Accepted()),
        (FIRST, Accepted(system="first")),
        (SILENT, Accepted(system="first")),
        (LAST_COUNTS, Accepted(system="first")),
        (BEFORE_THE_LAST, Accepted(system="first", system_with_results=False)),
        (NOWHERE, Accepted(system="none", system_with_results=False)),
        (STRICT, Accepted(several_calls=False, text_after_results=False, repeated_users=False)),
    ],
)
def test_what_a_template_takes(source: str, expected: Accepted) -> None:
    template = ChatTemplate(source, {})
    assert accepted(lambda messages: template.render(messages, tools=[PROBE])) == expected


def test_a_template_that_always_fails_is_left_alone() -> None:
    def render(messages: Sequence[Mapping[str, Any]]) -> str:
        raise ChatTemplateError("no")

    assert accepted(render) == Accepted(system="none")


ROLES = {"s": "system", "u": "user", "a": "assistant", "t": "tool"}


def conversation(short: str) -> list[dict[str, Any]]:
    """`a:text(1,2)`: the assistant's text and calls; `t:text(1)`: the result of call 1."""
    messages = []
    for one in short.split():
        text, _, ids = one[2:].rstrip(")").partition("(")
        message: dict[str, Any] = {"role": ROLES[one[0]], "content": text.replace("+", "\n\n")}
        if ids and one[0] == "t":
            message["tool_call_id"] = ids
        elif ids:
            message["tool_calls"] = [{"id": id, "function": {"name": "f"}} for id in ids.split(",")]
        messages.append(message)
    return messages


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
def test_instructions_join_the_user_s_text_where_they_are_not_taken(given: str, first: str, none: str) -> None:
    messages = conversation(given)
    assert fitted(messages, lambda: Accepted(system="first")) == conversation(first)
    assert fitted(messages, lambda: Accepted(system="none")) == conversation(none)
    assert fitted(messages, Accepted) == conversation(given) == messages


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ("u:q a:r(1,2) t:x(1) t:y(2) u:p", "u:q a:r(1) t:x(1) a:(2) t:y(2) u:p"),
        ("u:q a:r(1,2) t:y(2) t:x(1)", "u:q a:r(1) t:x(1) a:(2) t:y(2)"),
        ("u:q a:r(1,2) t:y(2) a:done", "u:q a:r(1) a:(2) t:y(2) a:done"),
        ("u:q a:r(1) t:x(1) a:(2,3) t:y(2) t:z(3)", "u:q a:r(1) t:x(1) a:(2) t:y(2) a:(3) t:z(3)"),
        ("u:q a:r(1) t:x(1) t:x(1)", "u:q a:r(1) t:x(1) t:x(1)"),
    ],
)
def test_calls_are_made_one_after_the_other(given: str, expected: str) -> None:
    assert fitted(conversation(given), lambda: Accepted(several_calls=False)) == conversation(expected)


def test_instructions_that_results_would_hide_join_the_user_s_text() -> None:
    takes = Accepted(system="first", system_with_results=False)
    assert fitted(conversation("s:A u:q"), lambda: takes) == conversation("s:A u:q")
    assert fitted(conversation("s:A u:q a:(1) t:x(1)"), lambda: takes) == conversation("u:A+q a:(1) t:x(1)")


def test_text_of_the_user_joins_what_is_before_it() -> None:
    given = conversation("u:q a:(1) t:x(1) u:p u:o a:r u:n u:m")
    assert fitted(given, lambda: Accepted(text_after_results=False)) == conversation("u:q a:(1) t:x+p+o(1) a:r u:n u:m")
    assert fitted(given, lambda: Accepted(repeated_users=False)) == conversation("u:q a:(1) t:x(1) u:p+o a:r u:n+m")
    both = Accepted(text_after_results=False, repeated_users=False)
    assert fitted(given, lambda: both) == conversation("u:q a:(1) t:x+p+o(1) a:r u:n+m")


def test_ordinary_conversations_are_not_looked_at() -> None:
    def asked() -> Accepted:
        raise AssertionError("there is nothing to decide")

    for short in ("", "u:q", "u:q a:r u:p"):
        messages = conversation(short)
        assert fitted(messages, asked) is messages


SAYS_CALLS = (
    "{% for m in messages %}{% if m.tool_calls %}{{ m.content }}{% for c in m.tool_calls %}{{ c.function.name }}: "
    "{{ ARGUMENTS }}{% endfor %}{% else %}<{{ m.role }}>{{ m.content }}{% endif %}{% endfor %}"
)
NULL_CONTENT = SAYS_CALLS.replace("if m.tool_calls", "if m.content is none").replace("{{ m.content }}", "", 1)
TEXT_FIRST = SAYS_CALLS.replace("if m.tool_calls", "if m.tool_calls and not m.content")


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        (SAYS_CALLS.replace("ARGUMENTS", "c.function.arguments | tojson"), CallStyle()),
        (SAYS_CALLS.replace("ARGUMENTS", "'' + c.function.arguments"), CallStyle(arguments_as_text=True)),
        (SAYS_CALLS.replace("ARGUMENTS", "c.function.arguments"), CallStyle(arguments_as_text=True)),
        (SAYS_CALLS.replace("ARGUMENTS", "c.function.arguments.values() | join"), CallStyle(only_objects=True)),
        (
            NULL_CONTENT.replace("{{ ARGUMENTS }}", ""),
            CallStyle(shown=False),
        ),
        (
            NULL_CONTENT.replace("ARGUMENTS", "'' + c.function.arguments"),
            CallStyle(arguments_as_text=True, without_content=True, alone=True),
        ),
        (TEXT_FIRST.replace("ARGUMENTS", "c.function.arguments | tojson"), CallStyle(alone=True)),
        ("{% for m in messages %}{{ m.content }}{% endfor %}", CallStyle(shown=False)),
    ],
)  # fmt: skip
def test_how_a_template_takes_calls(source: str, expected: CallStyle) -> None:
    template = ChatTemplate(source, {})
    assert call_style(template.render) == expected


def test_calls_beside_text_get_a_message_of_their_own_where_they_would_be_lost() -> None:
    call = {"id": "a", "type": "function", "function": {"name": "f", "arguments": '{"x": 1}'}}
    said = {"role": "assistant", "content": "Ok.", "reasoning_content": "Hm.", "tool_calls": [call]}
    first, second = native([said], FORMATS["deepseek_v3"], "reasoning_content", CallStyle(True, True, alone=True))
    assert first == {"role": "assistant", "content": "Ok.", "reasoning_content": "Hm."}
    assert second == {"role": "assistant", "content": None, "tool_calls": [call]}
