"""A chat template is a program from elsewhere: whatever it does, a rendering is short, small and ends in a documented
error."""

from __future__ import annotations

import resource
import time

import pytest

from penstock.errors import CheckpointError
from penstock.text.chat_template import ChatTemplate, ChatTemplateError, TemplateTooHeavy

CHAT = [{"role": "user", "content": "hello"}, {"role": "assistant", "content": "there"}]

HOSTILE = {
    "nested ranges": "{% for a in range(90000) %}{% for b in range(90000) %}{% endfor %}{% endfor %}",
    "nested ranges with text": "{% for a in range(9999) %}{% for b in range(9999) %}x{% endfor %}{% endfor %}",
    "a long body": "{% for a in range(90000) %}" + "{% if a == 1 %}{{ a }}{% endif %}" * 500 + "{% endfor %}",
    "long text in a loop": "{% for a in range(90000) %}" + "x" * 50_000 + "{% endfor %}",
    "long text in a macro": "{% macro m() %}" + "x" * 50_000 + "{% endmacro %}{% for a in range(9000) %}"
    "{% set y = m() %}{% endfor %}",
    "recursive macro": "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(60) }}",
    "recursive loop": "{% for a in [[1, 2], [3, 4]] recursive %}{{ loop([[1, 2], [3, 4]]) if loop.depth < 90 }}"
    "{% endfor %}",
    "recursive block": "{% block b %}{{ self.b() }}{{ self.b() }}{% endblock %}",
    "repeated text": "{{ 'a' * 10 ** 9 }}",
    "repeated text in a set": "{% set x = 'a' * 10 ** 9 %}{{ x | length }}",
    "repeated list": "{% set x = [0] * 10 ** 9 %}",
    "power": "{{ 10 ** (10 ** 9) }}",
    "square": "{% set ns = namespace(x=3) %}{% for i in range(99) %}{% set ns.x = ns.x * ns.x %}{% endfor %}",
    "doubled": "{% set ns = namespace(x='a') %}{% for i in range(99) %}{% set ns.x = ns.x + ns.x %}{% endfor %}",
    "doubled with tilde": "{% set ns = namespace(x='a') %}{% for i in range(99) %}{% set ns.x = ns.x ~ ns.x %}"
    "{% endfor %}",
    "doubled in a block": "{% set ns = namespace(x='aaaa') %}{% for i in range(99) %}"
    "{% set ns.x %}{{ ns.x }}{{ ns.x }}{% endset %}{% endfor %}",
    "doubled by format": "{% set ns = namespace(x='a') %}{% for i in range(99) %}"
    "{% set ns.x = '%s%s' % (ns.x, ns.x) %}{% endfor %}",
    "doubled list": "{% set ns = namespace(x=[0]) %}{% for i in range(99) %}{% set ns.x = ns.x + ns.x %}{% endfor %}",
    "list in itself, printed": "{% set ns = namespace(x=[]) %}{% for i in range(60) %}{% set ns.x = [ns.x, ns.x] %}"
    "{% endfor %}{{ ns.x }}",
    "tuple in itself, as key": "{% set ns = namespace(x=(1,)) %}{% for i in range(60) %}{% set ns.x = (ns.x, ns.x) %}"
    "{% endfor %}{{ {}[ns.x] }}",
    "dict in itself, as json": "{% set ns = namespace(x={}) %}{% for i in range(60) %}"
    "{% set ns.x = {'a': ns.x, 'b': ns.x} %}{% endfor %}{{ ns.x | tojson }}",
    "namespaces in each other": "{% set ns = namespace(x=1) %}{% for i in range(60) %}"
    "{% set ns.x = namespace(a=ns.x, b=ns.x) %}{% endfor %}{{ (ns.x ~ '') * 10 ** 8 }}",
    "deep tuple": "{% set ns = namespace(x=(1,)) %}{% for i in range(90000) %}{% set ns.x = (ns.x,) %}{% endfor %}"
    "{{ {ns.x: 1} }}",
    "dict calls": "{% set ns = namespace(x=1) %}{% for i in range(60) %}{% set ns.x = dict(a=ns.x, b=ns.x) %}"
    "{% endfor %}{{ ns.x | string }}",
    "percent width": "{{ '%1000000000d' % 1 }}",
    "percent star": "{{ '%*d' % (1000000000, 1) }}",
    "percent filter": "{{ '%1000000000d' | format(1) }}",
    "odd text": "{{ '%1000000000d' is odd }}",
    "format width": "{{ '{:>1000000000}'.format('a') }}",
    "format nested": "{{ '{:{}}'.format('a', 1000000000) }}",
    "format map": "{{ '{a:1000000000}'.format_map({'a': 'b'}) }}",
    "format fields": "{% set x = 'a' * 999999 %}{{ ('{0}' * 9999).format(x) }}",
    "center": "{{ 'a' | center(1000000000) }}",
    "center method": "{{ 'a'.center(1000000000) }}",
    "ljust": "{{ 'a'.ljust(1000000000) }}",
    "zfill": "{{ 'a'.zfill(1000000000) }}",
    "tabs": "{{ '\\t'.expandtabs(1000000000) }}",
    "indent": "{{ 'a\\nb' | indent(1000000000) }}",
    "json indent": "{{ [1] | tojson(indent=1000000000) }}",
    "json separators": "{{ range(9999) | list | tojson(separators=('a' * 9999, 'b')) }}",
    "replace": "{% set x = 'a' * 99999 %}{{ x.replace('a', x) }}",
    "replace filter": "{% set x = 'a' * 99999 %}{{ x | replace('a', x) }}",
    "replace nothing": "{% set x = 'a' * 99999 %}{{ x.replace('', x) }}",
    "join": "{% set x = 'a' * 99999 %}{{ x | join(x) }}",
    "join method": "{% set x = 'a' * 99999 %}{{ x.join(x) }}",
    "join of a list of one": "{% set x = ['a' * 999999] * 9999 %}{{ x | join }}",
    "translate": "{{ ('a' * 99999).translate({97: 'b' * 99999}) }}",
    "bytes": "{{ (1).to_bytes(1000000000, 'big') }}",
    "batch": "{{ [1] | batch(1000000000, 0) | list }}",
    "slice": "{{ [1] | slice(1000000000, 0) | list }}",
    "sum of lists": "{{ ([[0] * 999] * 9999) | sum(start=[]) | length }}",
    "round": "{{ 1.5 | round(1000000000, 'ceil') }}",
    "round of text": "{{ 'abc' | round(9, 'ceil') }}",
    "lipsum": "{{ lipsum(1000000) }}",
    "striptags": "{{ ('<!--' * 99999) | striptags }}",
    "slices": "{% set x = 'a' * 4000000 %}{% for i in range(90000) %}{% set y = x[1:] %}{% endfor %}",
    "searches": "{% set x = 'a' * 4000000 %}{% for i in range(90000) %}{{ 'b' in x }}{% endfor %}",
    "comparisons": "{% set x = 'a' * 4000000 %}{% set y = 'a' * 4000000 %}{% for i in range(90000) %}{{ x == y }}"
    "{% endfor %}",
    "methods": "{% set x = 'a' * 4000000 %}{% for i in range(90000) %}{{ x.count('b') }}{% endfor %}",
    "filters": "{% set x = 'a' * 4000000 %}{% for i in range(90000) %}{% set y = x | upper %}{% endfor %}",
    "loop over mapped": "{% for a in range(90000) | map('string') %}{% for b in range(90000) | map('abs') %}"
    "{% endfor %}{% endfor %}",
    "sorted": "{% for a in range(90000) %}{% set y = range(90000) | sort %}{% endfor %}",
    "cycler": "{% set c = cycler('a' * 9999999) %}{% for a in range(90000) %}{{ c.next() }}{% endfor %}",
    "autoescaped": "{% autoescape true %}{% set x = '<' * 9999999 %}{% for a in range(999) %}{{ x }}{% endfor %}"
    "{% endautoescape %}",
    "date format": "{{ strftime_now('%Y' * 99999999) }}",
    "error text": "{{ raise_exception('a' * 999999999) }}",
}


@pytest.mark.parametrize("template", HOSTILE.values(), ids=HOSTILE.keys())
def test_a_hostile_template_ends_soon_in_little_memory(template: str) -> None:
    used = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    begun = time.thread_time()
    with pytest.raises((ChatTemplateError, CheckpointError)) as failed:
        ChatTemplate(template, {}).render(CHAT)
    assert time.thread_time() - begun < 20.0
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - used < 256 * 1024
    assert len(str(failed.value)) < 1000


def test_a_template_that_is_too_long_or_too_deep_is_refused_at_once() -> None:
    with pytest.raises(CheckpointError, match="characters; the limit is 262144"):
        ChatTemplate("x" * 300_000, {})
    for deep in ("{{ " + "(" * 5000 + "1" + ")" * 5000 + " }}", "{% if 1 %}" * 2000 + "{% endif %}" * 2000):
        with pytest.raises(CheckpointError, match="cannot be compiled"):
            ChatTemplate(deep, {})


def test_messages_cannot_blow_up_a_good_template() -> None:
    quadratic = "{% for a in messages %}{% for b in messages %}{{ b.role }}{% endfor %}{% endfor %}"
    assert len(ChatTemplate(quadratic, {}).render(CHAT * 20)) == 40 * 20 * 13
    with pytest.raises(TemplateTooHeavy):
        ChatTemplate(quadratic, {}).render(CHAT * 2000)


def test_a_long_conversation_renders() -> None:
    template = ChatTemplate(
        "{% for m in messages %}{{ '<|' + m.role + '|>' + m.content | trim + '<|end|>' }}{% endfor %}", {}
    )
    text = template.render([{"role": "user", "content": "word " * 200_000}] * 4 + CHAT * 2000)
    assert len(text) > 4_000_000
