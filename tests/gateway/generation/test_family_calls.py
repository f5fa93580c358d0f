"""Calls of DeepSeek, Kimi K2, Qwen3-Coder, LFM2 and others through the API: control tokens, histories, forced calls."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from penstock.engine.grammar.guidance import GuidanceCompiler
from penstock.text import TextModel, load_text
from penstock.text.vocabulary import vocabulary
from tests.gateway.conftest import Serving
from tests.gateway.generation.test_tool_choice import CLOCK, WEATHER, streamed
from tests.scripted import ScriptedEngine
from tests.text.test_own_templates import checkpoint
from tests.text.test_thoughts import model

TURNS = "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}<|end|>{% endfor %}"
DEEPSEEK_MARKS = tuple(
    f"<｜tool▁{name}｜>" for name in ("calls▁begin", "calls▁end", "call▁begin", "call▁end", "sep", "outputs▁begin")
)
DEEPSEEK = (
    "{% for m in messages %}{% if m.role == 'assistant' and m.content is none %}{% for c in m.tool_calls %}"
    "{% if loop.first %}<｜tool▁calls▁begin｜>{% endif %}{{ '<｜tool▁call▁begin｜>' + c.type + '<｜tool▁sep｜>'"
    " + c.function.name + '\\n```json\\n' + c.function.arguments + '\\n```<｜tool▁call▁end｜>' }}{% endfor %}"
    "<｜tool▁calls▁end｜>{% elif m.role == 'tool' %}<｜tool▁outputs▁begin｜>{{ m.content }}{% else %}"
    "<|{{ m.role }}|>{{ m.content }}{% endif %}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
KIMI_MARKS = tuple(
    f"<|tool_{name}|>"
    for name in ("calls_section_begin", "calls_section_end", "call_begin", "call_end", "call_argument_begin")
)
KIMI = (
    "{% if tools %}tool_declare {{ tools | tojson }}{% endif %}{% for m in messages %}<|{{ m.role }}|>"
    "{% if m.role == 'tool' %}## Return of {{ m.tool_call_id }}\n{% endif %}{{ m.content }}{% if m.tool_calls %}"
    "<|tool_calls_section_begin|>{% for c in m.tool_calls %}<|tool_call_begin|>{{ c.id }}<|tool_call_argument_begin|>"
    "{{ c.function.arguments | tojson }}<|tool_call_end|>{% endfor %}<|tool_calls_section_end|>{% endif %}<|end|>"
    "{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
QWEN = (
    "{% for t in tools or [] %}{{ t.function.name }}{% endfor %}{% for m in messages %}<|{{ m.role }}|>{{ m.content }}"
    "{% for c in m.tool_calls or [] %}<tool_call>\n<function={{ c.function.name }}>\n"
    "{% for key, value in c.function.arguments | items %}<parameter={{ key }}>\n{{ value }}\n</parameter>\n{% endfor %}"
    "</function>\n</tool_call>{% endfor %}<|end|>{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
LFM2_MARKS = ("<|tool_call_start|>", "<|tool_call_end|>", "<|tool_list_start|>", "<|tool_list_end|>")
LFM2 = (
    "{% if tools %}List of tools: <|tool_list_start|>{{ tools | tojson }}<|tool_list_end|>{% endif %}"
    + TURNS
    + "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
"""It shows functions and results, but not the calls between them."""
HUNYUAN = (
    "{% if tools %}Write <tool_calls>[...]</tool_calls> to call {{ tools | tojson }}{% endif %}{% for m in messages %}"
    "<|{{ m.role }}|>{{ m.content }}{% if m.tool_calls %}<tool_calls>[{% for c in m.tool_calls %}"
    """{{ '{"name": "' + c.function.name + '", "arguments": ' + c.function.arguments | tojson + '}' }}"""
    "{% if not loop.last %}, {% endif %}{% endfor %}]</tool_calls>{% endif %}<|extra_0|>{% endfor %}"
    "{% if enable_thinking is defined and not enable_thinking %}<think>\n\n</think>\n{% endif %}"
)
"""The answer stands in `<answer>`, with and without a thought."""
DSML = """<｜DSML｜function_calls>
<｜DSML｜invoke name="get_weather">
<｜DSML｜parameter name="city" string="true">7</｜DSML｜parameter>
</｜DSML｜invoke>
<｜DSML｜invoke name="clock">

</｜DSML｜invoke>
</｜DSML｜function_calls>"""
SAID = {
    "dsml": f"Ok.\n\n{DSML}",
    "hunyuan": '<answer>\nOk.<tool_calls>[{"name": "get_weather", "arguments": {"city": "7"}}, '
    '{"name": "clock", "arguments": {}}]</tool_calls>\n</answer>',
    "lfm2": 'Ok.<|tool_call_start|>[get_weather(city="7"), clock()]<|tool_call_end|>',
    "deepseek": "Ok.<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>get_weather\n```json\n"
    '{"city": "7"}\n```<｜tool▁call▁end｜>\n<｜tool▁call▁begin｜>function<｜tool▁sep｜>clock\n```json\n{}\n```'
    "<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
    "kimi": "Ok.<|tool_calls_section_begin|><|tool_call_begin|>functions.get_weather:0<|tool_call_argument_begin|>"
    '{"city": "7"}<|tool_call_end|><|tool_call_begin|>functions.clock:1<|tool_call_argument_begin|>{}<|tool_call_end|>'
    "<|tool_calls_section_end|>",
    "qwen": "Ok.\n<tool_call>\n<function=get_weather>\n<parameter=city>\n7\n</parameter>\n</function>\n</tool_call>\n"
    "<tool_call>\n<function=clock>\n</function>\n</tool_call>",
}
SHOWN = {
    "dsml": DSML,
    "hunyuan": '<tool_calls>[{"name": "get_weather", "arguments": {"city": "7"}}, {"name": "clock", "arguments": {}}]',
    "lfm2": '<|tool_call_start|>[get_weather(city="7"), clock()]<|tool_call_end|><|end|><|tool|>sunny<|end|>'
    "<|tool|>noon",
    "deepseek": "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>get_weather\n```json\n"
    '{"city": "7"}\n```'
    "<｜tool▁call▁end｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>clock\n```json\n{}\n```<｜tool▁call▁end｜>"
    "<｜tool▁calls▁end｜><|end|><｜tool▁outputs▁begin｜>sunny<|end|><｜tool▁outputs▁begin｜>noon<|end|>",
    "kimi": '<|tool_call_begin|>functions.get_weather:0<|tool_call_argument_begin|>{"city": "7"}<|tool_call_end|>'
    "<|tool_call_begin|>functions.clock:1<|tool_call_argument_begin|>{}<|tool_call_end|><|tool_calls_section_end|>"
    "<|end|><|tool|>## Return of functions.get_weather:0\nsunny<|end|><|tool|>## Return of functions.clock:1\nnoon",
    "qwen": "<tool_call>\n<function=get_weather>\n<parameter=city>\n7\n</parameter>\n</function>\n</tool_call>"
    "<tool_call>",
}


PLAIN = ("qwen", "hunyuan")
"""Families whose marks are no control tokens."""


@pytest.fixture(
    scope="module", params=["deepseek", "dsml", "kimi", "qwen", "lfm2", pytest.param("hunyuan", marks=pytest.mark.slow)]
)
def family(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, TextModel]:
    if request.param == "dsml":
        return request.param, checkpoint(tmp_path_factory.mktemp("dsml"), "deepseek_v32")
    marks, template = {
        "hunyuan": (("<think>", "</think>"), HUNYUAN),
        "deepseek": (DEEPSEEK_MARKS, DEEPSEEK),
        "kimi": (KIMI_MARKS, KIMI),
        "lfm2": (LFM2_MARKS, LFM2),
        "qwen": (("<tool_call>", "</tool_call>"), QWEN),
    }[request.param]
    return request.param, model(
        tmp_path_factory.mktemp(request.param), *marks, special=request.param not in PLAIN, template=template
    )


def scripted(text: TextModel, said: str) -> ScriptedEngine:
    answer = text.encode(said, add_special_tokens=False)
    return ScriptedEngine(text, lambda _: [*answer, text.eos_token_ids[0]], max_model_len=4096)


async def test_calls_whole_streamed_and_in_the_history(serving: Serving, family: tuple[str, TextModel]) -> None:
    name, text = family
    async with serving(scripted(text, SAID[name]), text=text) as gateway:
        choice = (await gateway.chat(tools=[WEATHER, CLOCK])).json()["choices"][0]
        message = choice["message"]
        assert choice["finish_reason"] == "tool_calls" and message["content"] == "Ok."
        assert [
            (call["function"]["name"], json.loads(call["function"]["arguments"])) for call in message["tool_calls"]
        ] == [
            ("get_weather", {"city": "7"}),
            ("clock", {}),
        ]
        content, calls, finish = streamed((await gateway.chat(tools=[WEATHER, CLOCK], stream=True)).text)
        assert (content, finish) == ("Ok.", "tool_calls")
        assert [call["arguments"] for call in calls] == [
            call["function"]["arguments"] for call in message["tool_calls"]
        ]
        first, second = message["tool_calls"]
        history = [
            {"role": "user", "content": "Well?"},
            {"role": "assistant", "content": None, "tool_calls": [first, second]},
            {"role": "tool", "tool_call_id": first["id"], "content": "sunny"},
            {"role": "tool", "tool_call_id": second["id"], "content": "noon"},
        ]
        reply = await gateway.chat(messages=history, tools=[WEATHER, CLOCK])
        assert reply.status_code == 200, reply.text
        prompt = text.decode(gateway.engine.seen[-1].prompt, skip_special=False)
        assert SHOWN[name] in prompt and "get_weather" in prompt.partition("Well?")[0]
        mark = "｜DSML｜" if name == "dsml" else SHOWN[name][:22].partition(">")[0] + ">"
        assert name in PLAIN or text.token_id(mark) in gateway.engine.seen[-1].prompt


async def test_forced_calls_are_written_with_the_control_tokens(
    serving: Serving, family: tuple[str, TextModel]
) -> None:
    name, text = family
    compiler = GuidanceCompiler(vocabulary(text), text.vocab_size)
    forced: dict[str, Any] = {
        "dsml": DSML,
        "hunyuan": SAID["hunyuan"].partition("Ok.")[2].removesuffix("\n</answer>"),
        "deepseek": SAID["deepseek"].removeprefix("Ok."),
        "kimi": SAID["kimi"].removeprefix("Ok."),
        "lfm2": '<|tool_call_start|>[{"name": "get_weather", "arguments": {"city": "7"}}, '
        '{"name": "clock", "arguments": {}}]<|tool_call_end|>',
        "qwen": '<tool_call>\n{"name": "get_weather", "arguments": {"city": "7"}}\n</tool_call>\n'
        '<tool_call>\n{"name": "clock", "arguments": {}}\n</tool_call>',
    }
    async with serving(scripted(text, forced[name]), text=text) as gateway:
        reply = await gateway.chat(tools=[WEATHER, CLOCK], tool_choice="required")
        assert reply.status_code == 200, reply.text
        message = reply.json()["choices"][0]["message"]
        assert message["content"] is None
        assert [call["function"]["name"] for call in message["tool_calls"]] == ["get_weather", "clock"]
        for tools in ([WEATHER, CLOCK], [{**WEATHER, "function": {**WEATHER["function"], "strict": True}}, CLOCK]):
            more = {} if tools[0] is not WEATHER else {"tool_choice": "required"}
            assert (await gateway.chat(tools=tools, **more)).status_code == 200
            grammar = gateway.engine.seen[-1].params.grammar
            free = "" if more else "Sure. "
            assert _takes(compiler, text, grammar, free + forced[name])
            wrong = forced[name].replace('"7"', "7").replace('"city" string', '"town" string')
            assert not _takes(compiler, text, grammar, free + wrong)
            assert not _takes(compiler, text, grammar, free + forced[name].replace("clock", "cook"))
        named = {"type": "function", "function": {"name": "clock"}}
        assert (await gateway.chat(tools=[WEATHER, CLOCK], tool_choice=named)).status_code == 200
        assert not _takes(compiler, text, gateway.engine.seen[-1].params.grammar, forced[name])


def _takes(compiler: GuidanceCompiler, text: TextModel, grammar: str, words: str) -> bool:
    from tests.tools.test_toolbox import Walk

    walk = Walk.__new__(Walk)
    walk.compiler, walk.text, walk.matcher = compiler, text, compiler.compile(grammar)
    return walk.takes(words)


async def test_dsml_streams_text_that_only_begins_like_a_call(serving: Serving, tmp_path: Path) -> None:
    text = checkpoint(tmp_path, "deepseek_v32")
    broken = DSML.replace('name="get_weather"', 'name="other"').partition("</｜DSML｜invoke>")[0]
    for said in (f"So.\n\n{broken}", "The mark ｜DSML｜ and 1 <｜DSML｜"):
        async with serving(scripted(text, said), text=text) as gateway:
            message = (await gateway.chat(tools=[WEATHER, CLOCK])).json()["choices"][0]["message"]
            assert message["content"] == said and not message.get("tool_calls")
            content, calls, finish = streamed((await gateway.chat(tools=[WEATHER, CLOCK], stream=True)).text)
            assert (content, calls, finish) == (said, [], "stop")


async def test_deepseek_v32_thinks_where_it_is_told_to(serving: Serving, tmp_path: Path) -> None:
    text = checkpoint(tmp_path, "deepseek_v32")
    async with serving(scripted(text, f"Hm.</think>Ok.\n\n{DSML}"), text=text) as gateway:
        for told in ({"chat_template_kwargs": {"thinking": True}}, {"enable_thinking": True}):
            message = (await gateway.chat(tools=[WEATHER, CLOCK], **told)).json()["choices"][0]["message"]
            assert (message["reasoning_content"], message["content"]) == ("Hm.", "Ok.")
            assert [call["function"]["name"] for call in message["tool_calls"]] == ["get_weather", "clock"]
            assert text.decode(gateway.engine.seen[-1].prompt, skip_special=False).endswith("<｜Assistant｜><think>")


async def test_hunyuan_unwraps_answers_however_it_thinks(serving: Serving, tmp_path: Path) -> None:
    text = model(tmp_path, template=HUNYUAN)
    for said, told, thought in (
        ("<think>\nHm.\n</think>\n<answer>\nYes </b>.\n</answer>", {}, "Hm."),
        ("<answer>\nYes </b>.\n</answer>", {"enable_thinking": False}, None),
        ("Yes </b>.", {"enable_thinking": False}, None),
        ("<answer>Yes </b>.", {}, None),
    ):
        async with serving(scripted(text, said), text=text) as gateway:
            message = (await gateway.chat(**told)).json()["choices"][0]["message"]
            assert (message.get("reasoning_content") or None, message["content"]) == (thought, "Yes </b>.")
            content, _, finish = streamed((await gateway.chat(stream=True, **told)).text)
            assert (content, finish) == ("Yes </b>.", "stop")


SOLAR_MARKS = ("begin", "content", "end", "think", "tool_calls", "calls", "flush")
SOLAR_MARKS += tuple(f"tool_call:{name}" for name in ("begin", "name", "args", "end"))
SOLAR = (
    "{% if tools %}<|begin|>system<|content|>{{ tools | tojson }}<|end|>{% endif %}{% for m in messages %}"
    "<|begin|>{{ m.role }}{% set message = m %}{% if message.reasoning %}<|think|>{{ message.reasoning }}<|end|>"
    "<|begin|>assistant{% endif %}{% if m.tool_calls %}<|tool_calls|>{% for c in m.tool_calls %}<|tool_call:begin|>"
    "{{ c.id }}<|tool_call:name|>{{ c.function.name }}<|tool_call:args|>{{ c.function.arguments | tojson }}"
    "<|tool_call:end|>{% endfor %}<|calls|>{% else %}<|content|>{{ m.content }}<|end|>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|begin|>assistant{% endif %}"
)


async def test_solar_open_thinks_answers_and_calls_in_messages_of_their_own(serving: Serving, tmp_path: Path) -> None:
    marks = [f"<|{name}|>" for name in SOLAR_MARKS]
    model(tmp_path, *marks, special=True, template=SOLAR)
    for file, ends in (("config.json", {"eos_token_id": None}), ("tokenizer_config.json", {"eos_token": "<|flush|>"})):
        (tmp_path / file).write_text(json.dumps(json.loads((tmp_path / file).read_text()) | ends))
    text = load_text(tmp_path)
    end, stop = text.token_id("<|end|>"), text.token_id("<|calls|>")
    assert end not in text.eos_token_ids and {stop, text.token_id("<|flush|>")} <= set(text.eos_token_ids)
    thought = "<|think|>Hm.<|end|><|begin|>assistant"
    calls = "".join(
        f"<|tool_call:begin|>a1b2c3d4e5<|tool_call:name|>{name}<|tool_call:args|>{arguments}<|tool_call:end|>"
        for name, arguments in (("get_weather", '{"city": "7"}'), ("clock", "{}"))
    )
    for said, content, names in (
        (f"{thought}<|content|>assistant<|end|>", "assistant", []),
        (f"{thought}<|tool_calls|>{calls}<|calls|>", None, ["get_weather", "clock"]),
        (
            f"{thought}<|content|>I look.<|end|><|begin|>assistant<|tool_calls|>{calls}<|calls|>",
            "I look.",
            ["get_weather", "clock"],
        ),
    ):
        async with serving(scripted(text, said), text=text) as gateway:
            message = (await gateway.chat(tools=[WEATHER, CLOCK])).json()["choices"][0]["message"]
            assert (message["reasoning_content"], message["content"]) == ("Hm.", content)
            assert [call["function"]["name"] for call in message.get("tool_calls") or []] == names
            said_again, again, _ = streamed((await gateway.chat(tools=[WEATHER, CLOCK], stream=True)).text)
            assert said_again == (content or "") and [call["name"] for call in again] == names
            history = [{"role": "user", "content": "Hi"}, message | {"role": "assistant"}]
            history += [
                {"role": "tool", "tool_call_id": call["id"], "content": "x"} for call in message.get("tool_calls") or []
            ]
            assert (await gateway.chat(messages=history, tools=[WEATHER, CLOCK])).status_code == 200
            prompt = text.decode(gateway.engine.seen[-1].prompt, skip_special=False)
            assert "<|begin|>assistant<|think|>Hm.<|end|><|begin|>assistant<|" in prompt
            forced = await gateway.chat(tools=[WEATHER, CLOCK], tool_choice="required")
            assert forced.status_code == 200
            grammar = gateway.engine.seen[-1].params.grammar
            compiler = GuidanceCompiler(vocabulary(text), text.vocab_size)
            assert _takes(compiler, text, grammar, f"<|tool_calls|>{calls}")
            assert not _takes(compiler, text, grammar, f"<|tool_calls|>{calls.replace('clock', 'cook')}")
