"""A small model that thinks, behind the official clients: a budget closes its thoughts, its answers follow a schema."""

from __future__ import annotations

import json
from pathlib import Path

import anthropic
import openai
import pytest
import torch

from penstock.engine.config import EngineConfig
from penstock.engine.core import Engine
from penstock.engine.loading.random_checkpoint import RandomCheckpoint
from penstock.testing.in_process_backend import InProcessBackend
from penstock.text import TextModel
from penstock.text.vocabulary import grammars_of
from tests.gateway.api.test_reasoning import HARMONY, OPENS, SAID, WEATHER, scripted
from tests.gateway.conftest import Serving
from tests.text.test_thoughts import model
from tests.tools.test_channels import CONTROL

SCHEMA = {
    "type": "object",
    "properties": {"yes": {"type": "boolean"}},
    "required": ["yes"],
    "additionalProperties": False,
}
MESSAGES = [{"role": "user", "content": "hi"}]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("thinker")


@pytest.fixture(scope="module")
def thinker(folder: Path) -> TextModel:
    return model(folder, "<think>", "</think>", template=OPENS)


def random_engine(folder: Path, text: TextModel) -> Engine:
    """A model without sense for the vocabulary in a folder."""
    shape = {
        "model_type": "llama",
        "vocab_size": text.vocab_size,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 16,
        "max_position_embeddings": 512,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "tie_word_embeddings": False,
    }
    config = EngineConfig(model="random", device="cpu", dtype="float32", threads=1, num_blocks=64, max_model_len=512)
    checkpoint = RandomCheckpoint(shape, device=torch.device("cpu"), dtype=torch.float32)
    return Engine.load(config, checkpoint=checkpoint, grammars=grammars_of(folder))


@pytest.fixture
def engine(folder: Path, thinker: TextModel) -> Engine:
    return random_engine(folder, thinker)


async def test_a_model_that_runs(serving: Serving, thinker: TextModel, engine: Engine) -> None:
    async with serving(text=thinker, backend=InProcessBackend(engine)) as running:  # type: ignore[arg-type]
        client = openai.AsyncOpenAI(base_url=f"http://127.0.0.1:{running.port}/v1", api_key="none", max_retries=0)
        whole = await client.chat.completions.create(
            model="tiny",
            messages=MESSAGES,  # type: ignore[arg-type]
            n=2,
            max_tokens=100,
            extra_body={"thinking_budget": 12},
            response_format={
                "type": "json_schema",
                "json_schema": {"name": "answer", "schema": SCHEMA, "strict": True},
            },
        )
        for choice in whole.choices:
            assert choice.message.content is not None and choice.finish_reason == "stop"
            assert set(json.loads(choice.message.content)) == {"yes"}
        assert whole.usage is not None and whole.usage.completion_tokens_details is not None
        closing = len(thinker.encode("\n</think>", add_special_tokens=False))
        assert 2 <= whole.usage.completion_tokens_details.reasoning_tokens <= 2 * (12 + closing)
        free = await client.responses.create(
            model="tiny", input="hi", max_output_tokens=40, extra_body={"thinking_budget": 0, "ignore_eos": True}
        )
        assert [item.type for item in free.output] == ["message"] and free.usage is not None
        assert free.usage.output_tokens_details.reasoning_tokens == closing
        parsed = await client.responses.create(
            model="tiny",
            input="hi",
            max_output_tokens=100,
            extra_body={"thinking_budget": 6},
            text={"format": {"type": "json_schema", "name": "answer", "schema": SCHEMA, "strict": True}},
        )
        assert set(json.loads(parsed.output_text)) == {"yes"}
        await client.close()


async def test_marks_that_are_text(serving: Serving, thinker: TextModel, engine: Engine) -> None:
    wanted = {"type": "json_schema", "json_schema": {"name": "answer", "schema": SCHEMA}}
    served = {"reasoning": "seed_oss"}
    async with serving(text=thinker, backend=InProcessBackend(engine), served=served) as running:  # type: ignore[arg-type]
        for budget in (None, 9):
            for seed in range(3):
                reply = await running.chat(response_format=wanted, thinking_budget=budget, max_tokens=200, seed=seed)
                choice = reply.json()["choices"][0]
                if choice["finish_reason"] == "stop":
                    assert set(json.loads(choice["message"]["content"])) == {"yes"}, choice
                else:
                    assert budget is None and choice["message"]["content"] == "", choice


@pytest.mark.parametrize("mark", ["end", "start", "channel", "message"])
async def test_a_thought_of_gpt_oss_that_does_not_end_properly(serving: Serving, tmp_path: Path, mark: str) -> None:
    """Whatever token ends it, the grammar of the answer begins, and the budget of the thought is over."""
    text = model(tmp_path, *CONTROL, special=True, template=HARMONY)
    often = {str(text.token_id(f"<|{name}|>")): 5 for name in (mark, "message")}
    backend = InProcessBackend(random_engine(tmp_path, text))
    async with serving(text=text, backend=backend) as running:  # type: ignore[arg-type]
        asked = {"guided_regex": "[0-9]{4}", "thinking_budget": 20, "logit_bias": often, "max_tokens": 80}
        reply = await running.chat(**asked, n=4, seed=1, temperature=1)
        for choice in reply.json()["choices"]:
            assert choice["finish_reason"] == "stop", choice
            assert len(choice["message"]["content"]) == 4 and choice["message"]["content"].isdecimal(), choice


async def test_the_clients_of_openai_and_anthropic(serving: Serving, thinker: TextModel) -> None:
    async with serving(scripted(thinker, SAID), text=thinker) as running:
        client = openai.AsyncOpenAI(base_url=f"http://127.0.0.1:{running.port}/v1", api_key="none", max_retries=0)
        stream = await client.chat.completions.create(model="tiny", messages=MESSAGES, stream=True)  # type: ignore[call-overload]
        thought = answer = ""
        async for chunk in stream:
            delta = chunk.choices[0].delta
            thought += getattr(delta, "reasoning_content", None) or ""
            answer += delta.content or ""
        assert (thought, answer) == ("Let me see.", "Forty-two.")
        async with client.responses.stream(model="tiny", input="hi", reasoning={"effort": "high"}) as events:
            kinds = [event.type async for event in events]
            final = await events.get_final_response()
        assert "response.reasoning_text.delta" in kinds and final.output_text == "Forty-two."
        (item, _) = final.output
        assert item.type == "reasoning" and item.content is not None and item.content[0].text == "Let me see."
        again = await client.responses.create(
            model="tiny",
            input=[
                {"role": "user", "content": "hi"},
                *(part.model_dump(exclude_none=True) for part in final.output),  # type: ignore[list-item]
                {"role": "user", "content": "and?"},
            ],
        )
        assert again.output_text == "Forty-two."
        await client.close()
        other = anthropic.AsyncAnthropic(base_url=f"http://127.0.0.1:{running.port}", api_key="none", max_retries=0)
        async with other.messages.stream(
            model="tiny",
            max_tokens=200,
            messages=MESSAGES,  # type: ignore[arg-type]
            thinking={"type": "enabled", "budget_tokens": 100},
        ) as sent:
            message = await sent.get_final_message()
        first, second = message.content
        assert first.type == "thinking" and first.thinking == "Let me see." and first.signature
        assert second.type == "text" and second.text == "Forty-two."
        details = message.usage.output_tokens_details
        assert details is not None and details.thinking_tokens == 13
        again_said = await other.messages.create(
            model="tiny",
            max_tokens=200,
            messages=[
                {"role": "user", "content": "hi"},
                {"role": "assistant", "content": message.content},  # type: ignore[typeddict-item]
                {"role": "user", "content": "and?"},
            ],
        )
        assert again_said.content[1].type == "text"
        await other.close()


CALLS = 'I look.</think><tool_call>[{"name": "get_weather", "arguments": {"city": "Rome"}}]</tool_call>'


async def test_calls_behind_thoughts_in_every_api(serving: Serving, thinker: TextModel) -> None:
    """And the next turn, with thought, call and result sent back as the clients hold them."""
    function = WEATHER["function"]
    assert isinstance(function, dict)
    async with serving(scripted(thinker, CALLS), text=thinker, served={"tool_format": "smollm2"}) as running:
        client = openai.AsyncOpenAI(base_url=f"http://127.0.0.1:{running.port}/v1", api_key="none", max_retries=0)
        async with client.chat.completions.stream(
            model="tiny",
            messages=MESSAGES,  # type: ignore[arg-type]
            tools=[WEATHER],  # type: ignore[list-item]
        ) as stream:
            chat = (await stream.get_final_completion()).choices[0]
        assert chat.finish_reason == "tool_calls" and chat.message.tool_calls is not None
        assert chat.message.model_extra is not None and chat.message.model_extra["reasoning_content"] == "I look."
        assert json.loads(chat.message.tool_calls[0].function.arguments) == {"city": "Rome"}
        result = {"role": "tool", "tool_call_id": chat.message.tool_calls[0].id, "content": "sunny"}
        again = await client.chat.completions.create(
            model="tiny",
            messages=[*MESSAGES, chat.message.model_dump(exclude_none=True), result],  # type: ignore[list-item]
            tools=[WEATHER],  # type: ignore[list-item]
        )
        assert again.choices[0].finish_reason == "tool_calls"
        tool = {"type": "function", "strict": False, **function}
        async with client.responses.stream(model="tiny", input="hi", tools=[tool]) as events:  # type: ignore[list-item]
            response = await events.get_final_response()
        thought, call = response.output
        assert thought.type == "reasoning" and call.type == "function_call"
        sent = [item.model_dump(exclude_none=True, exclude={"parsed_arguments"}) for item in response.output]
        output = {"type": "function_call_output", "call_id": call.call_id, "output": "sunny"}
        followed = await client.responses.create(
            model="tiny",
            input=[{"role": "user", "content": "hi"}, *sent, output],  # type: ignore[list-item]
            tools=[tool],  # type: ignore[list-item]
        )
        assert [item.type for item in followed.output] == ["reasoning", "function_call"]
        await client.close()
        other = anthropic.AsyncAnthropic(base_url=f"http://127.0.0.1:{running.port}", api_key="none", max_retries=0)
        offered = {"name": "get_weather", "input_schema": function["parameters"]}
        async with other.messages.stream(
            model="tiny",
            max_tokens=200,
            messages=MESSAGES,  # type: ignore[arg-type]
            tools=[offered],  # type: ignore[list-item]
        ) as messages:
            message = await messages.get_final_message()
        assert [block.type for block in message.content] == ["thinking", "tool_use"]
        assert message.stop_reason == "tool_use"
        results = [{"type": "tool_result", "tool_use_id": message.content[1].id, "content": "sunny"}]  # type: ignore[union-attr]
        next_turn = await other.messages.create(
            model="tiny",
            max_tokens=200,
            messages=[
                *MESSAGES,  # type: ignore[list-item]
                {"role": "assistant", "content": message.content},  # type: ignore[typeddict-item]
                {"role": "user", "content": results},  # type: ignore[typeddict-item]
            ],
            tools=[offered],  # type: ignore[list-item]
        )
        assert [block.type for block in next_turn.content] == ["thinking", "tool_use"]
        await other.close()


async def test_limits_inside_and_behind_thoughts_in_every_api(serving: Serving, thinker: TextModel) -> None:
    async with serving(scripted(thinker, SAID), text=thinker) as running:
        client = openai.AsyncOpenAI(base_url=f"http://127.0.0.1:{running.port}/v1", api_key="none", max_retries=0)
        stream = await client.chat.completions.create(
            model="tiny",
            messages=MESSAGES,  # type: ignore[arg-type]
            stream=True,
            n=3,
            stop=["me", "two"],
            logprobs=True,
            top_logprobs=1,
        )
        thoughts, answers, tokens, ends = [""] * 3, [""] * 3, [""] * 3, [""] * 3
        async for chunk in stream:
            for choice in chunk.choices:
                at = choice.index
                thoughts[at] += getattr(choice.delta, "reasoning", None) or ""
                answers[at] += choice.delta.content or ""
                ends[at] += choice.finish_reason or ""
                if choice.logprobs is not None:
                    tokens[at] += "".join(token.token for token in choice.logprobs.content or ())
        assert thoughts == ["Let me see."] * 3 and answers == tokens == ["Forty-"] * 3 and ends == ["stop"] * 3
        cut = (await client.chat.completions.create(model="tiny", messages=MESSAGES, max_tokens=3)).choices[0]  # type: ignore[arg-type]
        assert (cut.finish_reason, cut.message.content) == ("length", "")
        response = await client.responses.create(model="tiny", input="hi", max_output_tokens=16)
        assert response.status == "incomplete" and response.output_text == "F"
        await client.close()
        other = anthropic.AsyncAnthropic(base_url=f"http://127.0.0.1:{running.port}", api_key="none", max_retries=0)
        short = await other.messages.create(model="tiny", max_tokens=3, messages=MESSAGES)  # type: ignore[arg-type]
        assert short.stop_reason == "max_tokens" and [block.type for block in short.content] == ["thinking"]
        stopped = await other.messages.create(
            model="tiny",
            max_tokens=200,
            messages=MESSAGES,  # type: ignore[arg-type]
            stop_sequences=["me", "two"],
        )
        assert (stopped.stop_reason, stopped.stop_sequence) == ("stop_sequence", "two")
        assert stopped.content[-1].type == "text" and stopped.content[-1].text == "Forty-"
        await other.close()
