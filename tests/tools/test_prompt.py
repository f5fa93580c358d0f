"""Tools in prompts: through the template if it supports them, explained in the system prompt if not."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from penstock.gateway.generation.tokenized_model import RemoteText
from penstock.gateway.generation.tool_choice import for_template
from penstock.text.chat_template import ChatTemplate
from penstock.tools.events import gather
from penstock.tools.formats import FORMATS
from penstock.tools.parser import ToolCallParser
from penstock.tools.prompt import as_observations, explained, instructions, native, shown_as_text, written
from penstock.tools.toolbox import Tool
from tests.text.test_thoughts import model as text_model

CITY = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
TOOLS = [Tool("get_weather", "Weather of a city", CITY), Tool("clock")]
KNOWING = """
{%- if tools %}{% for tool in tools %}{{ tool | tojson }}{% endfor %}{% endif %}
{%- for message in messages %}
{%- if message.tool_calls %}{% for call in message.tool_calls %}
{%- if call.id | length != 9 %}{{ raise_exception("ids have nine characters") }}{% endif %}
<call {{ call.id }} {{ call.function.name }} {{ call.function.arguments | tojson }}>{% endfor %}
{%- elif message.role == "tool" %}<result {{ message.tool_call_id }} {{ message.name }} {{ message.content }}>
{%- else %}<{{ message.role }} {{ message.content }}>{% endif %}
{%- endfor %}"""


def call(id: str, name: str, arguments: str) -> dict[str, Any]:
    return {"id": id, "type": "function", "function": {"name": name, "arguments": arguments}}


HISTORY: list[dict[str, Any]] = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "Rome?"},
    {
        "role": "assistant",
        "content": "",
        "tool_calls": [call("call_1", "get_weather", '{"city": "Röm"}'), call("call_2", "clock", '{"cut')],
    },
    {"role": "tool", "tool_call_id": "call_1", "content": "sunny"},
    {"role": "tool", "tool_call_id": "call_2", "content": "noon"},
]


def test_a_template_that_knows_tools_is_found_out() -> None:
    assert ChatTemplate(KNOWING, {}).knows_tools
    assert not ChatTemplate("{% for message in messages %}{{ message.tools }}{% endfor %}", {}).knows_tools
    assert ChatTemplate({"default": "x", "tool_use": KNOWING}, {}).knows_tools


def test_it_gets_arguments_as_objects_ids_it_takes_and_names_of_results() -> None:
    form = FORMATS["mistral"]
    described = [tool.described() for tool in TOOLS]
    rendered = ChatTemplate(KNOWING, {}).render(native(HISTORY, form), tools=described)
    first, second = form.known_id("call_1"), form.known_id("call_2")
    assert f'<call {first} get_weather {{"city": "Röm"}}>' in rendered
    assert f'<call {second} clock "{{\\"cut">' in rendered
    assert f"<result {first} get_weather sunny><result {second} clock noon>" in rendered
    assert json.dumps(described[0]) in rendered
    assert HISTORY[2]["tool_calls"][0]["function"]["arguments"] == '{"city": "Röm"}', "the caller's messages stay"


def test_other_templates_get_text() -> None:
    prepared = explained(HISTORY, TOOLS, FORMATS["hermes"])
    assert [message["role"] for message in prepared] == ["system", "user", "assistant", "user"]
    system, _, assistant, results = (message["content"] for message in prepared)
    assert system.startswith("Be brief.\n\n") and '"get_weather"' in system and "<tool_call>" in system
    assert '{"name": "get_weather", "arguments": {"city": "Röm"}}' in assistant
    assert results == "<tool_response>\nsunny\n</tool_response>\n<tool_response>\nnoon\n</tool_response>"
    assert all(set(message) == {"role", "content"} for message in prepared)
    without_system = explained(HISTORY[1:2], TOOLS, FORMATS["hermes"])
    assert [message["role"] for message in without_system] == ["system", "user"]
    assert explained(HISTORY[:2], [], FORMATS["hermes"]) == HISTORY[:2]


def test_calls_that_become_text_keep_the_thought_before_them() -> None:
    thinking = [{**message, "reasoning_content": "Hm."} if "tool_calls" in message else message for message in HISTORY]
    form = FORMATS["hermes"]
    said = [message for message in explained(thinking, TOOLS, form) if message["role"] == "assistant"]
    assert [message["reasoning_content"] for message in said] == ["Hm."]
    said = [m for m in explained(thinking, TOOLS, form, "{{ m.thinking }}") if m["role"] == "assistant"]
    assert [message["thinking"] for message in said] == ["Hm."], "under the name that the template knows"


@pytest.mark.parametrize("form", FORMATS.values(), ids=FORMATS)
def test_what_models_are_told_to_write_is_what_is_read(form: Any) -> None:
    calls = [call("a", "get_weather", '{"city": "Rome"}'), call("b", "clock", "{}")]
    parser = ToolCallParser(form, ["get_weather", "clock", "function_name"])
    message = gather(parser.push(written(calls, form)) + parser.flush())
    assert message.text == ""
    assert [(found.name, json.loads(found.arguments)) for found in message.calls] == [
        ("get_weather", {"city": "Rome"}),
        ("clock", {}),
    ]
    assert written([call("", "function_name", '{"argument_name": "value"}')], form) in instructions(TOOLS, form)


def test_calls_that_a_template_leaves_out_become_text() -> None:
    """LFM2's template shows functions and results only."""
    arguments = '{"city": "R\u00f6m \\"x\\"", "days": [1, null, true], "more": {"a": 1.5}}'
    calls = [call("a", "get_weather", arguments), call("b", "clock", "{}")]
    message = {"role": "assistant", "content": "So. ", "tool_calls": calls}
    (shown,) = shown_as_text([message], FORMATS["lfm2"])
    python = 'get_weather(city="R\u00f6m \\"x\\"", days=[1, None, True], more={"a": 1.5}), clock()'
    assert shown == {"role": "assistant", "content": f"So. <|tool_call_start|>[{python}]<|tool_call_end|>"}
    parser = ToolCallParser(FORMATS["lfm2"], ["get_weather", "clock"])
    read = gather(parser.push(shown["content"]) + parser.flush())
    assert [json.loads(found.arguments) for found in read.calls] == [json.loads(arguments), {}]
    odd = [call("a", "get_weather", '{"no-name": 1}')]  # no keyword in Python
    assert written(odd, FORMATS["lfm2"]) == (
        '<|tool_call_start|>[{"name": "get_weather", "arguments": {"no-name": 1}}]<|tool_call_end|>'
    )


def test_calls_and_results_as_glm_4_takes_them() -> None:
    history = [HISTORY[1], {**HISTORY[2], "content": "I look."}, *HISTORY[3:], {"role": "assistant", "content": ""}]
    assert as_observations(history) == [
        HISTORY[1],
        {"role": "assistant", "content": "I look."},
        {"role": "assistant", "metadata": "get_weather", "content": '{"city": "Röm"}'},
        {"role": "assistant", "metadata": "clock", "content": '{"cut'},
        {"role": "observation", "content": "sunny"},
        {"role": "observation", "content": "noon"},
        {"role": "assistant", "content": ""},
    ]
    assert len(as_observations([HISTORY[2]])) == 2, "no empty message before the calls"


GLM_4 = (
    "{% if tools %}# \u53ef\u7528\u5de5\u5177{{ tools | tojson }}{% endif %}{% for m in messages %}"
    "{% if m.role in ('user', 'observation', 'system') %}<{{ m.role }}>{{ m.content }}"
    "{% elif m.role == 'assistant' %}<assistant>{{ m.metadata or '' }}\n{{ m.content }}{% endif %}{% endfor %}"
)
GRANITE = (
    "{% if tools %}Begin calls with <|tool_call|>: {{ tools | tojson }}{% endif %}{% for m in messages %}"
    "<{{ m.role }}>{{ m.content }}{% endfor %}"
)


@pytest.mark.parametrize(
    ("template", "shown"),
    [
        (GLM_4, '<assistant>get_weather\n{"city": "Röm"}<assistant>clock\n{}<observation>sunny<observation>noon'),
        (
            GRANITE,
            '<assistant><|tool_call|>[{"name": "get_weather", "arguments": {"city": "Röm"}}, {"name": "clock", '
            '"arguments": {}}]<tool>sunny<tool>noon',
        ),
    ],
    ids=["glm4", "granite"],
)
def test_families_whose_templates_know_no_calls(tmp_path: Path, template: str, shown: str) -> None:
    model = RemoteText("tiny", text_model(tmp_path, template=template), None)
    calls = [call("call_1", "get_weather", '{"city": "Röm"}'), call("call_2", "clock", "{}")]
    history = [*HISTORY[:2], {**HISTORY[2], "tool_calls": calls}, *HISTORY[3:]]
    messages, tools = for_template(history, tuple(TOOLS), model)
    assert model.text.render_chat(messages, tools=tools).endswith(shown)


ITEMS = (
    "{{ tools }}{% for m in messages %}{% for c in m.tool_calls or [] %}<{{ c.function.name }}{% for key, value in "
    "c.function.arguments | items %} {{ key }}={{ value }}{% endfor %}>{% else %}{{ m.content }}{% endfor %}"
    "{% endfor %}"
)


@pytest.mark.parametrize(
    ("sent", "shown"),
    [
        ('{"city": "Oslo"}', "<get_weather city=Oslo>"),
        ("", "<get_weather>"),
        (" null", "<get_weather>"),
        ('{"cut', '<get_weather arguments={"cut>'),
        ("[1]", "<get_weather arguments=[1]>"),
    ],
)
def test_arguments_that_are_no_object_for_templates_that_look_into_them(tmp_path: Path, sent: str, shown: str) -> None:
    model = RemoteText("tiny", text_model(tmp_path, template=ITEMS), None, "qwen3_coder")
    history = [HISTORY[1], {**HISTORY[2], "tool_calls": [call("call_1", "get_weather", sent)]}, HISTORY[3]]
    messages, tools = for_template(history, tuple(TOOLS), model)
    assert model.text.render_chat(messages, tools=tools).endswith(f"Rome?{shown}sunny")


def test_calls_without_arguments_are_written_as_such() -> None:
    for name in ("hermes", "deepseek_v31", "glm4", "olmo3"):
        form = FORMATS[name]
        parser = ToolCallParser(form, ["clock"])
        message = written([call("call_1", "clock", "")], form)
        assert [one.arguments for one in gather(parser.push(message) + parser.flush()).calls] == ["{}"]


def test_a_template_that_takes_functions_as_text() -> None:
    template = ChatTemplate(
        "functools[ {{ functions }} {{ datetime }} {% for m in messages %}{{ m.content }}{% endfor %}", {}
    )
    assert template.knows_tools
    shown = template.render([{"role": "user", "content": "Hi"}], tools=[tool.described() for tool in TOOLS])
    head, _, tail = shown.removeprefix("functools[ ").rpartition("]")
    assert [one["name"] for one in json.loads(f"{head}]")] == ["get_weather", "clock"] and tail.endswith("Hi")
    assert template.render([{"role": "user", "content": "Hi"}]).startswith("functools[ [] ")
    told = template.render([{"role": "user", "content": "Hi"}], template_kwargs={"functions": "f", "datetime": "now"})
    assert told == "functools[ f now Hi"
