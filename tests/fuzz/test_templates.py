"""Mutated chat templates and conversations: each rendering is short and small and ends in text or a known error."""

from __future__ import annotations

import json
import random
import resource
from collections.abc import Sequence

import pytest

from penstock.errors import CheckpointError
from penstock.text.chat_template import OUTPUT, ChatTemplate, ChatTemplateError, flatten
from tests.fuzz.harness import DURATIONS, QUICK_S, fuzz, mutate_bytes, mutate_json
from tests.text.test_chat_template import TEMPLATES
from tests.text.test_template_bounds import HOSTILE

CHATML = """{%- for message in messages %}
{{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>' + '\\n' }}
{%- endfor %}{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"""
REASONING = """{%- set ns = namespace(multi_step_tool=true, last_query_index=messages|length - 1) %}
{%- for message in messages[::-1] %}
    {%- set index = (messages|length - 1) - loop.index0 %}
    {%- if ns.multi_step_tool and message.role == "user" and not message.content.startswith('<tool_response>') %}
        {%- set ns.multi_step_tool = false %}{%- set ns.last_query_index = index %}
    {%- endif %}
{%- endfor %}
{%- for message in messages %}
    {%- set content = message.content if message.content is string else '' %}
    {%- if message.role == "assistant" %}
        {%- set reasoning = '' %}
        {%- if '</think>' in content %}
            {%- set reasoning = content.split('</think>')[0].rstrip('\\n').split('<think>')[-1].lstrip('\\n') %}
            {%- set content = content.split('</think>')[-1].lstrip('\\n') %}
        {%- endif %}
        {{- '<|im_start|>assistant\\n<think>\\n' + reasoning.strip('\\n') + '\\n</think>\\n\\n' + content }}
        {%- for call in message.tool_calls or [] %}
            {{- '<tool_call>' ~ call.function.name ~ ' ' ~ (call.function.arguments | tojson(indent=2)) }}
        {%- endfor %}
    {%- else %}{{- '<|im_start|>' + message.role + '\\n' + content }}{%- endif %}{{- '<|im_end|>\\n' }}
{%- endfor %}"""
INSTRUCT = """{{ bos_token }}{% for message in messages %}
{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}
{{ raise_exception('Conversation roles must alternate user/assistant/...') }}{% endif %}
{% if message['role'] == 'user' %}{{ '[INST] ' + message['content'] | trim + ' [/INST]' }}
{% else %}{{ ' ' + message['content'] | trim + eos_token }}{% endif %}{% endfor %}"""
MACROS = """{%- macro kind(spec, depth=0) -%}
{%- if spec.type == 'object' -%}{ {%- for name, inner in (spec.properties or {}).items() | sort -%}
{{ name }}: {{ kind(inner, depth + 1) }}{{ ', ' if not loop.last }}{%- endfor -%} }
{%- elif spec.type == 'array' -%}Array<{{ kind(spec['items'], depth + 1) if spec['items'] else 'any' }}>
{%- else -%}{{ spec.type | default('any', true) }}{%- endif -%}{%- endmacro -%}
{{ strftime_now('%d %b %Y') }}{% for tool in tools or [] %}
{{ tool.function.name | upper | center(30) }}{{ kind(tool.function.parameters) | indent(4) }}
{% endfor %}{% for role, group in messages | groupby('role') %}{{ role }}: {{ group | map(attribute='content') |
join(', ') | replace('a', 'bb') | truncate(80) }}{% endfor %}{{ '%s has %05d' | format(messages[0].role, 7) }}
{{ '{0:>8}'.format(messages | length) }}{% for m in messages recursive %}{{ m.role }}{% endfor %}"""
CHAT = json.dumps(
    {
        "messages": [
            {"role": "system", "content": "Be brief."},
            {"role": "user", "content": "Weather in <b>Bern</b>?"},
            {
                "role": "assistant",
                "content": "<think>hm</think>",
                "tool_calls": [{"id": "1", "function": {"name": "weather", "arguments": {"city": "Bern"}}}],
            },
            {"role": "tool", "content": [{"type": "text", "text": "rain"}], "tool_call_id": "1"},
        ],
        "tools": [
            {
                "type": "function",
                "function": {
                    "name": "weather",
                    "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
                },
            }
        ],
    }
)
GROWTH_MIB = 600
PIECES = [piece.encode() for piece in HOSTILE.values() if len(piece) < 400]


def render(data: bytes) -> None:
    """`data`: a template, a zero byte, and the JSON of a conversation."""
    source, _, chat = data.partition(b"\0")
    try:
        described = json.loads(chat)
        messages, tools = described["messages"], described.get("tools")
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        described = json.loads(CHAT)
        messages, tools = described["messages"], described["tools"]
    if not isinstance(messages, list) or not all(isinstance(message, dict) for message in messages):
        return  # the request's schema refuses these
    if tools is not None and not (isinstance(tools, list) and all(isinstance(tool, dict) for tool in tools)):
        return
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    try:
        template = ChatTemplate(source.decode("utf-8", "replace"), {"bos_token": "<s>", "eos_token": "</s>"})
        text = template.render(flatten(messages), tools=tools)
        assert isinstance(text, str) and len(text) <= OUTPUT
    except (ChatTemplateError, CheckpointError) as error:
        assert len(str(error)) < 1000
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < GROWTH_MIB * 1024


def mutate(data: bytes, rng: random.Random, pool: Sequence[bytes]) -> bytes:
    source, _, chat = data.partition(b"\0")
    match rng.randrange(6):
        case 0:
            chat = mutate_json(chat, rng, [CHAT.encode()])
        case 1:
            at = rng.randrange(len(source) + 1)
            source = source[:at] + rng.choice(PIECES) + source[at:]
        case 2:
            words = source.split(b" ")
            at, other = rng.randrange(len(words)), rng.choice(pool).partition(b"\0")[0].split(b" ")
            words[at : at + rng.randint(0, 3)] = other[(begin := rng.randrange(len(other))) : begin + rng.randint(1, 8)]
            source = b" ".join(words)
        case 3:
            for old, new in ((b"messages", b"range(99999)"), (b"+", b"*"), (b"1", b"999999999"), (b"|", b"~")):
                if rng.random() < 0.4:
                    source = source.replace(old, new, rng.randint(1, 3))
        case _:
            source = mutate_bytes(source, rng, [seed.partition(b"\0")[0] for seed in pool])
    return source + b"\0" + chat


@pytest.mark.parametrize("seconds", DURATIONS)
def test_templates(seconds: float) -> None:
    good = [CHATML, REASONING, INSTRUCT, MACROS, *TEMPLATES.values()]
    # In the quick suite each hostile template has a test of its own; here there is time for their pieces only.
    hostile = [] if seconds == QUICK_S else HOSTILE.values()
    seeds = [f"{template}\0{CHAT}".encode() for template in [*good, *hostile]]
    report = fuzz("templates", render, seeds, seconds=seconds, quick=40, limit_s=4.0, mutate=mutate)
    assert report.inputs >= len(seeds)


@pytest.mark.parametrize("template", [CHATML, REASONING, MACROS], ids=["chatml", "reasoning", "macros"])
def test_the_seeds_render(template: str) -> None:
    described = json.loads(CHAT)
    text = ChatTemplate(template, {"bos_token": "<s>", "eos_token": "</s>"}).render(
        flatten(described["messages"]), tools=described["tools"]
    )
    assert "Bern" in text
