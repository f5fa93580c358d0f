"""Templates for checkpoints that have none: the prompts are those of the makers' own program."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from penstock.text import TextModel, load_text
from penstock.text.byte_tokenizer import write_tokenizer
from penstock.text.template_calls import OBJECTS
from penstock.text.thought_splitter import prompt_state
from penstock.text.thought_styles import STYLES, detect
from penstock.tools import formats

TOOLS = [
    {"type": "function", "function": {"name": "get_weather", "description": "é", "parameters": {"type": "object"}}},
    {"type": "function", "function": {"name": "now", "description": "", "parameters": {"type": "object"}}},
]  # fmt: skip
FUNCTIONS = """## Tools

You have access to a set of tools you can use to answer the user's question.
You can invoke functions by writing a "<｜DSML｜function_calls>" block like the following as part of your reply to the user:
<｜DSML｜function_calls>
<｜DSML｜invoke name="$FUNCTION_NAME">
<｜DSML｜parameter name="$PARAMETER_NAME" string="true|false">$PARAMETER_VALUE</｜DSML｜parameter>
...
</｜DSML｜invoke>
<｜DSML｜invoke name="$FUNCTION_NAME2">
...
</｜DSML｜invoke>
</｜DSML｜function_calls>

String and scalar parameters should be specified as is without any escaping or quotes, while lists and objects should use JSON format. The "string" attribute should be set to "true" for string type parameters and "false" for other types (numbers, booleans, arrays, objects).

If the thinking_mode is enabled, then after function results you should strongly consider outputting a thinking block. Here is an example:

<｜DSML｜function_calls>
...
</｜DSML｜function_calls>

<function_results>
...
</function_results>

<think>...thinking about results</think>

Here are the functions available in JSONSchema format:
<functions>
{"name": "get_weather", "description": "é", "parameters": {"type": "object"}}
{"name": "now", "description": "", "parameters": {"type": "object"}}
</functions>
"""  # noqa: E501
BOS, EOS = "<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>"
FIRST_CALLS = f"""Ok.

<｜DSML｜function_calls>
<｜DSML｜invoke name="get_weather">
<｜DSML｜parameter name="city" string="true">Rome "1"</｜DSML｜parameter>
<｜DSML｜parameter name="days" string="false">[1, "é"]</｜DSML｜parameter>
</｜DSML｜invoke>
<｜DSML｜invoke name="now">

</｜DSML｜invoke>
</｜DSML｜function_calls>{EOS}

<function_results>
<result>12 degrees</result>
<result>noon</result>
</function_results>

"""


def call(id: str, name: str, arguments: Any) -> dict[str, Any]:
    return {"id": id, "type": "function", "function": {"name": name, "arguments": arguments}}


CHAT: list[dict[str, Any]] = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "Weather?"},
    {
        "role": "assistant",
        "content": "Ok.",
        "reasoning_content": "Two calls.",
        "tool_calls": [call("1", "get_weather", {"city": 'Rome "1"', "days": [1, "é"]}), call("2", "now", {})],
    },
    {"role": "tool", "tool_call_id": "1", "content": "12 degrees"},
    {"role": "tool", "tool_call_id": "2", "content": "noon"},
]
ANSWER = {"role": "assistant", "content": "Mild.", "reasoning_content": "So: mild."}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> TextModel:
    folder = tmp_path_factory.mktemp("deepseek_v32")
    return checkpoint(folder, "deepseek_v32")


def checkpoint(folder: Path, model_type: str) -> TextModel:
    tokenizer = write_tokenizer(folder)
    tokenizer.add_special_tokens([BOS, EOS, "<｜User｜>", "<｜Assistant｜>", "｜DSML｜"])
    tokenizer.add_tokens(["<think>", "</think>"])
    tokenizer.save(str(folder / "tokenizer.json"))
    config = json.loads((folder / "config.json").read_text())
    config |= {"model_type": model_type, "vocab_size": tokenizer.get_vocab_size()}
    (folder / "config.json").write_text(json.dumps(config))
    settings = {"bos_token": BOS, "eos_token": EOS}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return load_text(folder)


def render(model: TextModel, messages: list[dict[str, Any]], thinking: bool, **options: Any) -> str:
    text = model.render_chat(messages, template_kwargs={"enable_thinking": thinking}, **options)
    ids = model.encode_chat(messages, template_kwargs={"enable_thinking": thinking}, **options)
    assert model.decode(ids, skip_special=False) == text
    return text


def test_prompts_of_deepseek_v32(model: TextModel) -> None:
    head = f"{BOS}Be brief.\n\n{FUNCTIONS}<｜User｜>Weather?<｜Assistant｜>"
    assert render(model, CHAT, False, tools=TOOLS) == f"{head}</think>{FIRST_CALLS}</think>"
    assert render(model, CHAT, True, tools=TOOLS) == f"{head}<think>Two calls.</think>{FIRST_CALLS}<think>"
    later = [*CHAT, ANSWER, {"role": "user", "content": "Sure?"}]
    for thinking, mark in ((False, "</think>"), (True, "<think>")):  # thoughts before the last question are left out
        tail = f"{FIRST_CALLS}</think>Mild.{EOS}<｜User｜>Sure?<｜Assistant｜>{mark}"
        assert render(model, later, thinking, tools=TOOLS) == f"{head}</think>{tail}"
    assert render(model, later, True, tools=TOOLS, add_generation_prompt=False).endswith("<｜User｜>Sure?")


def test_without_a_system_message_and_with_several(model: TextModel) -> None:
    asked = {"role": "user", "content": "Hi"}
    assert render(model, [asked], False) == f"{BOS}<｜User｜>Hi<｜Assistant｜></think>"
    assert render(model, [asked], True) == f"{BOS}<｜User｜>Hi<｜Assistant｜><think>"
    assert render(model, [asked], False, tools=TOOLS) == f"{BOS}\n\n{FUNCTIONS}<｜User｜>Hi<｜Assistant｜></think>"
    rule = {"role": "system", "content": "Rule."}
    assert render(model, [rule, asked, rule, asked], False) == (
        f"{BOS}Rule.<｜User｜>Hi<｜Assistant｜></think>Rule.<｜User｜>Hi<｜Assistant｜></think>"
    )
    begun = {"role": "assistant", "content": "Well"}
    assert render(model, [asked, begun], False, continue_final=True).endswith("<｜Assistant｜></think>Well")


def test_control_tokens_come_from_the_template_alone(model: TextModel) -> None:
    mark = model.token_id("｜DSML｜")
    said = [{"role": "user", "content": "｜DSML｜"}]
    assert mark is not None and mark not in model.encode_chat(said)
    assert mark in model.encode_chat(said, tools=TOOLS)


def test_what_it_says_about_calls_and_thoughts(model: TextModel) -> None:
    assert model.template_knows_tools and {"enable_thinking", "thinking"} <= model.template_names
    assert formats.detect(model.template_source).name == "deepseek_v32"
    assert detect(model.template_source) is STYLES["think"]
    assert model.call_style == OBJECTS
    assert model.accepted.system == "anywhere" and model.accepted.several_calls and model.accepted.text_after_results
    for thinking, state in ((True, "thinking"), (False, "answer")):
        ids = model.encode_chat(CHAT, tools=TOOLS, template_kwargs={"thinking": thinking})
        assert prompt_state(STYLES["think"], model, ids) == state


def test_a_template_of_the_checkpoint_goes_before_it(tmp_path: Path) -> None:
    (tmp_path / "chat_template.jinja").write_text("{{ messages[0].content }}")
    assert checkpoint(tmp_path, "deepseek_v32").template_source == "{{ messages[0].content }}"
    other = tmp_path / "other"
    other.mkdir()
    assert not checkpoint(other, "deepseek_v3").has_chat_template
