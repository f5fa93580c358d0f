"""Thoughts of models that run here, through every API: told from answers, counted, bounded, kept out of grammars."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import httpx
import pytest

from penstock.config.guardrails import GuardrailConfig
from penstock.engine.request import SamplingParams
from penstock.gateway.generation.thoughts import at_once
from penstock.routing.registry import ServedModel
from penstock.testing.in_process_backend import InProcessBackend
from penstock.text import TextModel
from tests.gateway.conftest import Running, Serving
from tests.scripted import ScriptedEngine
from tests.text.test_thoughts import model
from tests.tools.test_channels import CONTROL

TURNS = "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}<|end|>{% endfor %}"
OPENS = TURNS + "{% if add_generation_prompt %}<|assistant|><think>\n{% endif %}"
SWITCHED = (
    "{% for m in messages %}<|{{ m.role }}|>{% if m.reasoning_content and loop.last %}<think>{{ m.reasoning_content }}"
    "</think>{% endif %}{{ m.content }}<|end|>{% endfor %}{% if add_generation_prompt %}<|assistant|>"
    "{% if enable_thinking is defined and not enable_thinking %}<think>\n\n</think>\n\n{% endif %}{% endif %}"
)
EFFORT = TURNS + "{% if add_generation_prompt %}<|system|>{{ reasoning_effort }}<|assistant|><think>{% endif %}"
HARMONY = (
    "{% for m in messages %}<|start|>{{ m.role }}<|message|>{{ m.thinking }}{{ m.content }}<|end|>{% endfor %}"
    "{% for t in tools or [] %}{{ t.function.name }}{% endfor %}{{ reasoning_effort }}"
    "{% if add_generation_prompt %}<|start|>assistant{% endif %}{# <|channel|> #}"
)
SAID = "Let me see.\n</think>\n\nForty-two."


@pytest.fixture(scope="session")
def opens(tmp_path_factory: pytest.TempPathFactory) -> TextModel:
    return model(tmp_path_factory.mktemp("opens"), "<think>", "</think>", template=OPENS)


@pytest.fixture(scope="session")
def switched(tmp_path_factory: pytest.TempPathFactory) -> TextModel:
    return model(tmp_path_factory.mktemp("switched"), "<think>", "</think>", template=SWITCHED)


@pytest.fixture(scope="session")
def harmony(tmp_path_factory: pytest.TempPathFactory) -> TextModel:
    return model(tmp_path_factory.mktemp("harmony"), *CONTROL, special=True, template=HARMONY)


def scripted(text: TextModel, said: str) -> ScriptedEngine:
    answer = text.encode(said, add_special_tokens=False)
    return ScriptedEngine(text, lambda _: [*answer, text.eos_token_ids[0]], max_model_len=4096)


def prompt_of(running: Running, text: TextModel) -> str:
    return text.decode(running.engine.seen[-1].prompt, skip_special=False)


async def streamed(running: Running, path: str, **body: Any) -> list[dict[str, Any]]:
    reply = await running.client.post(path, json={"model": "tiny", "stream": True, **body})
    assert reply.status_code == 200, reply.text
    return [json.loads(data) for data in _data(reply.text) if data != "[DONE]"]


def _data(body: str) -> list[str]:
    return [line.removeprefix("data: ") for line in body.splitlines() if line.startswith("data: ")]


async def test_a_message_has_one_thought_under_any_of_its_names(serving: Serving, opens: TextModel) -> None:
    async with serving(scripted(opens, SAID), text=opens) as running:

        async def reply(**thoughts: str) -> httpx.Response:
            before = {"role": "assistant", "content": "Hi.", **thoughts}
            return await running.chat(messages=[before, {"role": "user", "content": "And?"}], max_tokens=3)

        assert (await reply(reasoning="a", reasoning_content="a", thinking="")).status_code == 200
        refused = await reply(reasoning="a", reasoning_content="b")
        error = refused.json()["error"]
        assert refused.status_code == 400 and error["param"] == "messages[0].reasoning"
        assert "`messages[0].reasoning_content` and `messages[0].reasoning` differ" in error["message"]


async def test_chat_completions_whole_and_streamed(serving: Serving, opens: TextModel) -> None:
    async with serving(scripted(opens, SAID), text=opens) as running:
        body = (await running.chat(n=2)).json()
        for choice in body["choices"]:
            assert choice["message"]["reasoning_content"] == choice["message"]["reasoning"] == "Let me see."
            assert choice["message"]["content"] == "Forty-two." and choice["finish_reason"] == "stop"
        tokens = len(opens.encode("Let me see.\n</think>", add_special_tokens=False))
        assert body["usage"]["completion_tokens_details"]["reasoning_tokens"] == 2 * tokens
        chunks = await streamed(
            running,
            "/v1/chat/completions",
            messages=[{"role": "user", "content": "hi"}],
            stream_options={"include_usage": True},
        )
        deltas = [chunk["choices"][0]["delta"] for chunk in chunks if chunk["choices"]]
        thoughts = [delta["reasoning_content"] for delta in deltas if "reasoning_content" in delta]
        assert "".join(thoughts) == "Let me see.", "in as many pieces as the gateway found time for"
        assert "".join(delta.get("content") or "" for delta in deltas) == "Forty-two."
        assert chunks[-1]["usage"]["completion_tokens_details"]["reasoning_tokens"] == tokens
        for hidden in ({"include_reasoning": False}, {"reasoning": {"exclude": True}}):
            message = (await running.chat(**hidden)).json()["choices"][0]["message"]
            assert message["content"] == "Forty-two." and "reasoning_content" not in message


async def test_stop_strings_and_logprobs_belong_to_the_answer(serving: Serving, opens: TextModel) -> None:
    async with serving(scripted(opens, SAID), text=opens) as running:
        choice = (await running.chat(stop=["see", "-"], logprobs=True)).json()["choices"][0]
        assert choice["message"]["reasoning_content"] == "Let me see."
        assert choice["message"]["content"] == "Forty" and choice["stop_reason"] == "-"
        assert "".join(token["token"] for token in choice["logprobs"]["content"]) == "Forty"
        cut = (await running.chat(max_tokens=5)).json()["choices"][0]
        assert cut["message"]["content"] == "" and cut["message"]["reasoning_content"] == "Let m"
        assert cut["finish_reason"] == "length"
        ids = (await running.chat(return_token_ids=True)).json()["choices"][0]["token_ids"]
        assert ids[:-1] == opens.encode(SAID, add_special_tokens=False)


async def test_white_space_inside_an_answer_has_logprobs(serving: Serving, tmp_path: Path) -> None:
    """Also where it is held back, because it may come before the end of the answer."""
    text = model(tmp_path, template=TURNS)
    said = "<think>Hm.</think>\n<answer>\nOne.\n\nTwo.\n</answer>"
    async with serving(scripted(text, said), text=text, served={"reasoning": "hunyuan"}) as running:
        choice = (await running.chat(logprobs=True)).json()["choices"][0]
        assert choice["message"]["content"] == "One.\n\nTwo."
        assert "".join(token["token"] for token in choice["logprobs"]["content"]) == "One.\n\nTwo."
    async with serving(scripted(text, "<answer> <thin air>"), text=text, served={"reasoning": "hunyuan"}) as running:
        choice = (await running.chat(logprobs=True)).json()["choices"][0]
        tokens = [token["token"] for token in choice["logprobs"]["content"]]
        assert "".join(tokens) == choice["message"]["content"] == "<thin air>"
    said = "<think>Hm.</think><answer>\né <</b></answer>\n日"
    async with serving(scripted(text, said), text=text, served={"reasoning": "hunyuan"}) as running:
        choice = (await running.chat(logprobs=True)).json()["choices"][0]
        spelled = bytes(byte for token in choice["logprobs"]["content"] for byte in token["bytes"])
        assert spelled.decode() == choice["message"]["content"] == "é <</b>日", "also characters of several tokens"
    async with serving(scripted(text, "<thin air>"), text=text, served={"reasoning": "think"}) as running:
        choice = (await running.chat(logprobs=True)).json()["choices"][0]
        tokens = [token["token"] for token in choice["logprobs"]["content"]]
        assert "".join(tokens) == choice["message"]["content"] == "<thin air>", "also what was held back at first"
    async with serving(
        scripted(text, "<think>Hm.</think>\n\nOne. \nTwo."), text=text, served={"reasoning": "think"}
    ) as running:
        choice = (await running.chat(logprobs=True)).json()["choices"][0]
        tokens = [token["token"] for token in choice["logprobs"]["content"]]
        assert "".join(tokens) == choice["message"]["content"] == "One. \nTwo.", "nothing of a mark that is text"


async def test_an_answer_may_end_inside_its_thought(serving: Serving, opens: TextModel, tmp_path: Path) -> None:
    """Also inside a character: what completes it is no further token."""
    async with serving(scripted(opens, "Let é"), text=opens) as running:
        body = (await running.chat(max_tokens=5)).json()
        assert body["choices"][0]["message"]["reasoning_content"] == "Let \N{REPLACEMENT CHARACTER}"
        assert body["usage"]["completion_tokens_details"]["reasoning_tokens"] == 5
    asked = {"model": "tiny", "input": "hi", "max_output_tokens": 16}
    store = f"sqlite:///{tmp_path / 'state.db'}"
    async with serving(scripted(opens, "I think and think."), text=opens, store_url=store) as running:
        whole = (await running.client.post("/v1/responses", json=asked)).json()
        last = (await streamed(running, "/v1/responses", input="hi", max_output_tokens=16))[-1]
        for response in (whole, last["response"]):
            assert response["status"] == "incomplete"
            (item,) = response["output"]
            assert (item["type"], item["status"]) == ("reasoning", "incomplete")
        following = {**asked, "previous_response_id": whole["id"]}
        assert (await running.client.post("/v1/responses", json=following)).status_code == 200


async def test_off_leaves_thoughts_in_the_text_and_a_style_can_be_named(serving: Serving, text: TextModel) -> None:
    said = "Hm.</think>Yes."
    async with serving(scripted(text, said), served={"reasoning": "off"}) as running:
        assert (await running.chat()).json()["choices"][0]["message"]["content"] == said
    async with serving(scripted(text, said), served={"reasoning": "deepseek_r1"}) as running:
        message = (await running.chat()).json()["choices"][0]["message"]
        assert (message["reasoning_content"], message["content"]) == ("Hm.", "Yes.")


async def test_budgets_by_every_name(serving: Serving, opens: TextModel) -> None:
    async with serving(scripted(opens, SAID), text=opens, served={"thinking_budget": 99}) as running:
        for asked, budget in (
            ({}, 99),
            ({"thinking_budget": 7}, 7),
            ({"thinking_token_budget": 7}, 7),
            ({"max_reasoning_tokens": 7}, 7),
            ({"thinking_budget_tokens": 7}, 7),
            ({"reasoning_budget": 7}, 7),
            ({"reasoning_budget": -1}, 99),
            ({"reasoning": {"max_tokens": 7}}, 7),
            ({"thinking": {"type": "enabled", "budget_tokens": 7}}, 7),
            ({"thinking": {"type": "disabled"}}, 0),
            ({"enable_thinking": False}, 0),
            ({"reasoning_effort": "none"}, 0),
            ({"reasoning_effort": "low"}, 1024),
            ({"reasoning": {"effort": "low", "max_tokens": 3}}, 3),
            ({"reasoning_effort": "high"}, None),
        ):
            reply = await running.chat(**asked)
            assert reply.status_code == 200 and "x-penstock-ignored" not in reply.headers, reply.text
            thought = running.engine.seen[-1].params.thought
            assert (None if thought is None else thought.budget) == budget, asked
        thought = running.engine.seen[-2].params.thought
        assert thought is not None and thought.begin == ()
        assert opens.decode(thought.close, skip_special=False) == "\n</think>\n\n"
        assert thought.end == ((opens.token_id("</think>"),),)
        for wrong, param in (
            ({"thinking_budget": 1, "reasoning": {"max_tokens": 2}}, "reasoning.max_tokens"),
            ({"reasoning_effort": "much"}, "reasoning_effort"),
            ({"reasoning_effort": "high", "enable_thinking": False}, "enable_thinking"),
            ({"reasoning": {"effort": "none", "enabled": True}}, "reasoning.enabled"),
            ({"thinking_budget": -1}, "thinking_budget"),
            ({"thinking": {"type": "perhaps"}}, "thinking.type"),
            ({"separate_reasoning": False}, "separate_reasoning"),
            ({"reasoning_format": "none"}, "reasoning_format"),
            ({"reasoning_budget": -2}, "reasoning_budget"),
        ):
            reply = await running.chat(**wrong)
            assert reply.status_code == 400 and reply.json()["error"]["param"] == param, reply.text


async def test_a_template_may_ask_for_the_budget(serving: Serving, tmp_path: Path) -> None:
    """Seed-OSS is told how much it may think, and closes the thought in the prompt if that is nothing."""
    seed = TURNS + (
        "{% if thinking_budget is not defined %}{% set thinking_budget = -1 %}{% endif %}"
        "{% if add_generation_prompt %}<|assistant|>{{ thinking_budget }}"
        "{% if thinking_budget == 0 %}<seed:think></seed:think>{% endif %}{% endif %}"
    )
    text = model(tmp_path, "<seed:think>", "</seed:think>", template=seed)
    for default, asked, shown, budget in (
        (None, {}, "-1", None),
        (None, {"reasoning_effort": "low"}, "1024", 1024),
        (None, {"reasoning": {"max_tokens": 7}}, "7", 7),
        (None, {"thinking_budget": 7, "chat_template_kwargs": {"thinking_budget": 9}}, "9", 7),
        (None, {"enable_thinking": False}, "0<seed:think></seed:think>", None),
        (99, {}, "99", 99),
    ):
        async with serving(scripted(text, "Yes."), text=text, served={"thinking_budget": default}) as running:
            reply = await running.chat(**asked)
            assert reply.json()["choices"][0]["message"]["content"] == "Yes."
            assert prompt_of(running, text).endswith(f"<|assistant|>{shown}")
            thought = running.engine.seen[-1].params.thought
            assert (None if thought is None else thought.budget) == budget


async def test_what_has_no_effect_is_named(serving: Serving, opens: TextModel, tmp_path: Path) -> None:
    async with serving(scripted(opens, SAID), text=opens) as running:
        for asked, named in (
            ({"reasoning": {"effort": "low", "summary": "auto"}}, "reasoning.summary"),
            ({"thinking": {"type": "enabled", "clear_thinking": False}}, "thinking.clear_thinking"),
            ({"separate_reasoning": True}, "separate_reasoning"),
        ):
            assert (await running.chat(**asked)).headers["x-penstock-ignored"] == named
        reply = await running.client.post(
            "/v1/responses", json={"model": "tiny", "input": "hi", "reasoning": {"summary": "auto"}}
        )
        assert reply.headers["x-penstock-ignored"] == "reasoning.summary"
    clears = model(tmp_path, "<think>", "</think>", template=f"{{{{ clear_thinking }}}}{OPENS}")
    async with serving(scripted(clears, SAID), text=clears) as running:
        reply = await running.chat(thinking={"type": "enabled", "clear_thinking": False})
        assert "x-penstock-ignored" not in reply.headers and prompt_of(running, clears).startswith("False")


async def test_templates_are_told(serving: Serving, switched: TextModel, tmp_path: Path) -> None:
    async with serving(scripted(switched, "<think>Hm.</think>Yes."), text=switched) as running:
        message = (await running.chat()).json()["choices"][0]["message"]
        assert (message["reasoning_content"], message["content"]) == ("Hm.", "Yes.")
        await running.chat(reasoning_effort="none")
        assert prompt_of(running, switched).endswith("</think>\n\n")
        assert running.engine.seen[-1].params.thought is None
        await running.chat(enable_thinking=False, chat_template_kwargs={"enable_thinking": True})
        assert prompt_of(running, switched).endswith("<|assistant|>")
        await running.chat(thinking_budget=5)
        thought = running.engine.seen[-1].params.thought
        assert thought is not None and (switched.token_id("<think>"),) in thought.begin
    effort = model(tmp_path, "<think>", "</think>", template=EFFORT)
    async with serving(scripted(effort, "Hm.</think>Yes."), text=effort) as running:
        await running.chat(reasoning={"effort": "medium"})
        assert "<|system|>medium<|assistant|>" in prompt_of(running, effort)
        assert running.engine.seen[-1].params.thought is None


async def test_history_goes_to_the_template(serving: Serving, switched: TextModel, text: TextModel) -> None:
    told = [
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": "b", "reasoning_content": "Hm."},
    ]
    async with serving(scripted(switched, "x"), text=switched) as running:
        await running.chat(messages=[*told, {"role": "user", "content": "c"}])
        assert "Hm." not in prompt_of(running, switched), "this template drops old thoughts"
        for name in ("reasoning", "thinking"):
            last = {"role": "assistant", "content": "b", name: "Hm."}
            await running.chat(messages=[told[0], last], continue_final_message=True)
            assert prompt_of(running, switched).endswith("<think>Hm.</think>b")
        reply = await running.chat(messages=[{"role": "user", "content": "a", "reasoning_content": "x"}])
        assert reply.status_code == 400
    async with serving(scripted(text, "x")) as running:
        reply = await running.chat(messages=[*told, {"role": "user", "content": "c"}], reasoning_effort="low")
        assert set(reply.headers["x-penstock-ignored"].split(", ")) == {
            "messages.reasoning_content",
            "reasoning_effort",
        }


async def test_a_grammar_waits_for_the_thought(serving: Serving, opens: TextModel, switched: TextModel) -> None:
    wanted = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "object"}}}
    async with serving(scripted(opens, 'Hm.</think>{"a": 1}'), text=opens) as running:
        message = (await running.chat(response_format=wanted)).json()["choices"][0]["message"]
        assert (message["reasoning_content"], message["content"]) == ("Hm.", '{"a": 1}')
        params = running.engine.seen[-1].params
        assert params.grammar and params.thought is not None and params.thought.budget is None
    async with serving(scripted(switched, '{"a": 1}'), text=switched) as running:
        message = (await running.chat(response_format=wanted)).json()["choices"][0]["message"]
        assert message["content"] == '{"a": 1}' and "reasoning_content" not in message
        thought = running.engine.seen[-1].params.thought
        assert thought is not None and thought.begin == ((switched.token_id("<think>"),),)
        await running.chat(response_format=wanted, enable_thinking=False)
        assert running.engine.seen[-1].params.thought is None


WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}


async def test_calls_after_thoughts(serving: Serving, opens: TextModel) -> None:
    said = 'I look.</think><tool_call>[{"name": "get_weather", "arguments": {"city": "Rome"}}]</tool_call>'
    async with serving(scripted(opens, said), text=opens, served={"tool_format": "smollm2"}) as running:
        choice = (await running.chat(tools=[WEATHER])).json()["choices"][0]
        assert choice["message"]["reasoning_content"] == "I look." and choice["finish_reason"] == "tool_calls"
        assert choice["message"]["tool_calls"][0]["function"] == {
            "name": "get_weather",
            "arguments": '{"city": "Rome"}',
        }


THINK = "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant"


async def test_gpt_oss(serving: Serving, harmony: TextModel) -> None:
    engine = scripted(harmony, f"{THINK}<|channel|>final<|message|>Yes.")
    async with serving(engine, text=harmony) as running:
        body = (await running.chat(reasoning_effort="minimal")).json()
        message = body["choices"][0]["message"]
        assert (message["reasoning_content"], message["content"]) == ("Hm.", "Yes.")
        assert body["usage"]["completion_tokens_details"]["reasoning_tokens"] == 14
        assert prompt_of(running, harmony).endswith("low<|start|>assistant")
        params = engine.seen[-1].params
        assert harmony.token_id("<|end|>") not in params.stop_token_ids and params.thought is None
        assert {harmony.token_id("<|call|>"), harmony.token_id("<|return|>")} <= set(params.stop_token_ids)
        await running.chat(thinking_budget=50)
        thought = engine.seen[-1].params.thought
        assert thought is not None and harmony.decode(thought.close, skip_special=False) == (
            "<|end|><|start|>assistant<|channel|>final<|message|>"
        )
        await running.chat(
            messages=[
                {"role": "user", "content": "a"},
                {"role": "assistant", "content": "b", "reasoning_content": "Because."},
                {"role": "user", "content": "c"},
            ]
        )
        assert "Because.b" in prompt_of(running, harmony)


async def test_calls_of_gpt_oss(serving: Serving, harmony: TextModel) -> None:
    call = '<|channel|>commentary to=functions.get_weather <|constrain|>json<|message|>{"city": "Rome"}'
    answer = harmony.encode(THINK + call + "<|call|>", add_special_tokens=False)
    async with serving(ScriptedEngine(harmony, lambda _: list(answer), max_model_len=4096), text=harmony) as running:
        for stream in (False, True):
            if stream:
                chunks = await streamed(
                    running, "/v1/chat/completions", messages=[{"role": "user", "content": "a"}], tools=[WEATHER]
                )
                deltas = [chunk["choices"][0]["delta"] for chunk in chunks]
                calls = [delta["tool_calls"][0] for delta in deltas if "tool_calls" in delta]
                assert "".join(part["function"]["arguments"] for part in calls) == '{"city": "Rome"}'
                assert chunks[-1]["choices"][0]["finish_reason"] == "tool_calls"
            else:
                choice = (await running.chat(tools=[WEATHER])).json()["choices"][0]
                assert choice["finish_reason"] == "tool_calls" and "stop_reason" not in choice
                assert choice["message"]["tool_calls"][0]["function"]["name"] == "get_weather"
                assert choice["message"]["reasoning_content"] == "Hm." and choice["message"]["content"] is None


async def test_messages(serving: Serving, opens: TextModel, switched: TextModel) -> None:
    asked = {"max_tokens": 200, "messages": [{"role": "user", "content": "hi"}]}
    async with serving(scripted(opens, SAID), text=opens) as running:

        async def create(**more: Any) -> dict[str, Any]:
            reply = await running.client.post("/v1/messages", json={"model": "tiny", **asked, **more})
            assert reply.status_code == 200 and "x-penstock-ignored" not in reply.headers, reply.text
            return dict(reply.json())

        body = await create(thinking={"type": "enabled", "budget_tokens": 64})
        thought, answer = body["content"]
        assert thought["thinking"] == "Let me see." and thought["signature"] and answer["text"] == "Forty-two."
        assert body["usage"]["output_tokens_details"]["thinking_tokens"] == 13
        assert running.engine.seen[-1].params.thought.budget == 64  # type: ignore[union-attr]
        hidden = (await create(thinking={"type": "adaptive", "display": "omitted"}))["content"][0]
        assert hidden["type"] == "thinking" and hidden["thinking"] == "" and hidden["signature"]
        await create(thinking={"type": "disabled"})
        assert running.engine.seen[-1].params.thought.budget == 0  # type: ignore[union-attr]
        await create(thinking={"type": "disabled"}, output_config={"effort": "high"})
        assert running.engine.seen[-1].params.thought.budget == 0  # type: ignore[union-attr]
        await create(output_config={"effort": "low"})
        assert running.engine.seen[-1].params.thought.budget == 1024  # type: ignore[union-attr]
        sent = await streamed(running, "/v1/messages", **asked)
        kinds = [event["delta"]["type"] for event in sent if event["type"] == "content_block_delta"]
        assert kinds[0] == "thinking_delta" and kinds[-1] == "text_delta" and kinds.count("signature_delta") == 1
        starts = [event["content_block"]["type"] for event in sent if event["type"] == "content_block_start"]
        assert starts == ["thinking", "text"]
    async with serving(scripted(switched, "x"), text=switched) as running:
        told = [
            *asked["messages"],
            {"role": "assistant", "content": [{"type": "thinking", "thinking": "Hm.", "signature": "s"},
                                              {"type": "text", "text": "So"}]},
        ]  # fmt: skip
        reply = await running.client.post("/v1/messages", json={"model": "tiny", "max_tokens": 9, "messages": told})
        assert reply.status_code == 200 and "x-penstock-ignored" not in reply.headers
        assert prompt_of(running, switched).endswith("<think>Hm.</think>So")


async def test_responses(serving: Serving, opens: TextModel, switched: TextModel) -> None:
    async with serving(scripted(opens, SAID), text=opens) as running:

        async def create(**more: Any) -> dict[str, Any]:
            reply = await running.client.post("/v1/responses", json={"model": "tiny", "input": "hi", **more})
            assert reply.status_code == 200 and "x-penstock-ignored" not in reply.headers, reply.text
            return dict(reply.json())

        body = await create(reasoning={"effort": "low"}, include=["reasoning.encrypted_content"])
        item, message = body["output"]
        assert item["type"] == "reasoning" and item["summary"] == [] and item["encrypted_content"]
        assert item["content"] == [{"type": "reasoning_text", "text": "Let me see."}]
        assert message["content"][0]["text"] == "Forty-two." and body["reasoning"]["effort"] == "low"
        assert body["usage"]["output_tokens_details"]["reasoning_tokens"] == 13
        assert running.engine.seen[-1].params.thought.budget == 1024  # type: ignore[union-attr]
        sent = await streamed(running, "/v1/responses", input="hi")
        kinds = list(dict.fromkeys(event["type"] for event in sent))
        assert kinds[2:7] == [
            "response.output_item.added",
            "response.content_part.added",
            "response.reasoning_text.delta",
            "response.reasoning_text.done",
            "response.content_part.done",
        ]
        assert "encrypted_content" not in sent[-1]["response"]["output"][0]
    async with serving(scripted(switched, "x"), text=switched) as running:
        sealed = {name: item[name] for name in ("type", "id", "summary", "encrypted_content")}
        for kept in (item, sealed):
            given = [{"role": "user", "content": "hi"}, kept, {"role": "assistant", "content": "So"}]
            await running.client.post("/v1/responses", json={"model": "tiny", "input": given})
            assert "<think>Let me see.</think>So" in prompt_of(running, switched)
        foreign = {"type": "reasoning", "summary": [], "encrypted_content": "gAAA"}
        reply = await running.client.post(
            "/v1/responses", json={"model": "tiny", "input": [foreign, {"role": "user", "content": "hi"}]}
        )
        assert reply.headers["x-penstock-ignored"] == "input.reasoning"


async def test_ollama(serving: Serving, opens: TextModel, text: TextModel) -> None:
    asked = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}], "stream": False}
    async with serving(scripted(opens, SAID), text=opens) as running:
        message = (await running.client.post("/api/chat", json={**asked, "think": True})).json()["message"]
        assert message["thinking"] == "Let me see." and message["content"] == "Forty-two."
        for think, budget in ((False, 0), ("low", 1024), ("high", None)):
            reply = await running.client.post("/api/chat", json={**asked, "think": think})
            assert reply.status_code == 200
            thought = running.engine.seen[-1].params.thought
            assert (None if thought is None else thought.budget) == budget
        generated = await running.client.post("/api/generate", json={"model": "tiny", "prompt": "x", "stream": False})
        assert generated.json()["thinking"] == "Let me see."
        raw = {"model": "tiny", "prompt": "x", "raw": True, "think": True}
        refused = await running.client.post("/api/generate", json=raw)
        assert refused.status_code == 400 and "`raw: true` is continued as it is" in refused.text, refused.text
        shown = (await running.client.post("/api/show", json={"model": "tiny"})).json()
        assert "thinking" in shown["capabilities"]
    async with serving(scripted(text, "x")) as running:
        reply = await running.client.post("/api/chat", json={**asked, "think": True})
        assert reply.status_code == 400 and "does not support thinking" in reply.text


async def test_the_answer_of_gpt_oss_has_a_grammar(serving: Serving, harmony: TextModel) -> None:
    call = '<|channel|>commentary to=functions.get_weather <|constrain|>json<|message|>{"city": "Rome"}'
    answer = harmony.encode(THINK + call + "<|call|>", add_special_tokens=False)
    async with serving(ScriptedEngine(harmony, lambda _: list(answer), max_model_len=4096), text=harmony) as running:
        choice = (await running.chat(tools=[WEATHER], tool_choice="required", thinking_budget=9)).json()["choices"][0]
        assert choice["finish_reason"] == "tool_calls" and choice["message"]["reasoning_content"] == "Hm."
        params = running.engine.seen[-1].params
        thought = params.thought
        assert thought is not None and "functions." in params.grammar and thought.budget == 9
        assert [
            harmony.decode(part, skip_special=False) for part in (thought.opening, thought.after, thought.close)
        ] == [
            "<|channel|>analysis<|message|>",
            "<|start|>assistant",
            "<|end|>",
        ]
        wanted = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "object"}}}
        await running.chat(response_format=wanted)
        assert "final" in running.engine.seen[-1].params.grammar


async def test_questions_of_the_gateway_are_answered_without_thoughts(
    opens: TextModel, switched: TextModel, harmony: TextModel, text: TextModel
) -> None:
    params = SamplingParams(max_tokens=9, stop_token_ids=(1,))
    for known, begun, ending in (
        (opens, "<|assistant|><think>\n", "</think>\n\n"),
        (switched, "x", "x"),
        (harmony, "<|start|>assistant", "<|channel|>final<|message|>"),
        (text, "x", "x"),
    ):
        served = ServedModel("tiny", known, InProcessBackend(scripted(known, "x")))
        prompt = known.encode(begun, add_special_tokens=False)
        tokens, (asked,), read = at_once(served, prompt, [params])
        assert known.decode(tokens, skip_special=False).endswith(ending)
        assert (read is None) == (known is text)
        assert asked.thought is None or (known is switched and asked.thought.budget == 0)


async def test_guardrails_check_thoughts_too(serving: Serving, opens: TextModel, harmony: TextModel) -> None:
    rules = (GuardrailConfig(name="numbers", stage="output", action="refuse", patterns=("5{3}",)),)
    for text, said in (
        (opens, "It is 555.</think>Yes."),
        (harmony, "<|channel|>analysis<|message|>It is 555.<|end|><|start|>assistant<|channel|>final<|message|>Yes."),
    ):
        async with serving(scripted(text, said), text=text, guardrails=rules) as running:
            choice = (await running.chat()).json()["choices"][0]
            assert choice["finish_reason"] == "content_filter" and choice["message"]["content"] == ""
            assert "555" not in json.dumps(choice)
    masked = (GuardrailConfig(name="numbers", stage="output", action="redact", patterns=("5{3}",)),)
    async with serving(scripted(opens, "It is 555.</think>Not 555."), text=opens, guardrails=masked) as running:
        message = (await running.chat()).json()["choices"][0]["message"]
        assert (
            "555" not in json.dumps(message) and message["reasoning_content"] and message["content"].startswith("Not")
        )
