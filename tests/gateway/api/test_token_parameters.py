"""Parameters of vLLM, SGLang and llama.cpp that are about tokens: what reaches the engine, and what comes back."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any, cast

from penstock.config.routing import AdmissionConfig
from penstock.config.sampling import SamplingDefaults
from penstock.config.schema import TierConfig
from penstock.engine.request import Request, SamplingParams, TokenLogprob
from penstock.gateway.accounting.admission import Admissions
from penstock.gateway.app.exchange import Exchange
from penstock.gateway.generation.engine import AT_ONCE
from penstock.gateway.generation.logprobs import prompt_entries
from penstock.gateway.generation.sampling import choice_params, forbidden_words
from penstock.gateway.generation.schemas import ChatRequest
from penstock.identity import Caller
from penstock.routing.registry import ModelRegistry
from penstock.telemetry.metrics import Metrics
from penstock.text import TextModel
from tests.gateway.conftest import Serving, events
from tests.scripted import ScriptedEngine

REACHES: list[tuple[dict[str, Any], dict[str, Any]]] = [
    ({"typical_p": 0.5}, {"typical_p": 0.5}),
    ({"repeat_penalty": 1.5}, {"repetition_penalty": 1.5}),
    ({"repeat_penalty": 1.5, "repetition_penalty": 1.5}, {"repetition_penalty": 1.5}),
    ({"n_predict": 7}, {"max_tokens": 7}),
    ({"max_new_tokens": 7, "max_tokens": 7}, {"max_tokens": 7}),
    ({"min_new_tokens": 3, "max_tokens": 9}, {"min_tokens": 3}),
    ({"allowed_token_ids": [5, 9, 5]}, {"allowed_token_ids": (5, 9)}),
    ({"allowed_token_ids": None, "bad_words": []}, {"allowed_token_ids": (), "bad_words": ()}),
    ({"prompt_logprobs": 2}, {"prompt_logprobs": 2, "logprobs": None}),
    ({"n_probs": 3}, {"logprobs": 3}),
    ({"n_probs": 0, "n_predict": -1, "repeat_penalty": None}, {"logprobs": None, "repetition_penalty": 1.0}),
]


async def test_what_reaches_the_engine(serving: Serving, text: TextModel) -> None:
    engine = ScriptedEngine(text, "ab")
    async with serving(engine) as gateway:
        for ask in (gateway.chat, gateway.complete):
            for body, expected in REACHES:
                reply = await ask(**body)
                assert reply.status_code == 200, (body, reply.text)
                assert "x-penstock-ignored" not in reply.headers, body
                found = engine.seen[-1].params
                assert {name: getattr(found, name) for name in expected} == expected, body


async def test_filters_that_a_list_of_samplers_leaves_out_are_off(serving: Serving) -> None:
    async with serving() as gateway:
        for ask in (gateway.chat, gateway.complete):
            reply = await ask(samplers=["top_k", "min_p"], top_k=3, top_p=0.2, temperature=0.4, presence_penalty=1)
            assert reply.status_code == 200 and reply.headers["x-penstock-ignored"] == "samplers", "the order is fixed"
            found = gateway.engine.seen[-1].params
            assert (found.top_k, found.top_p, found.temperature, found.presence_penalty) == (3, 1.0, 1.0, 0.0)
            refused = await ask(samplers=["nope"])
            assert refused.status_code == 400 and refused.json()["error"]["param"] == "samplers"


def test_a_forbidden_word_also_counts_behind_a_space(text: TextModel) -> None:
    request = ChatRequest(model="m", messages=[], bad_words=["ab", " b", "ab"])
    a, b, space = text.encode("a")[0], text.encode("b")[0], text.encode(" ")[0]
    assert forbidden_words(request, text) == ((a, b), (space, a, b), (b,), (space, b))


def test_only_the_first_choice_scores_the_prompt() -> None:
    params = SamplingParams(prompt_logprobs=1, seed=5)
    assert [p.prompt_logprobs for p in choice_params(params, 3, score_once=True)] == [1, None, None]
    assert [p.prompt_logprobs for p in choice_params(params, 2)] == [1, 1]


def test_prompt_logprobs_have_the_shape_of_vllm(text: TextModel) -> None:
    scores = [None, TokenLogprob(-3.0, [97, 98], [-0.5, -1.0], 7), TokenLogprob(-0.5, [97, 98], [-0.5, -1.0], 1)]
    first, second, third = prompt_entries(text, [5, 99, 97], scores, 2)
    assert first is None
    assert second is not None and third is not None
    assert [(id, entry["rank"], entry["logprob"]) for id, entry in second.items()] == [
        ("97", 1, -0.5), ("98", 2, -1.0), ("99", 7, -3.0)
    ]  # fmt: skip
    assert set(third) == {"97", "98"} and third["97"]["decoded_token"] == text.token_text(97)


async def test_token_ids_and_prompt_logprobs_come_back(serving: Serving, text: TextModel) -> None:
    tokens = text.encode("Hey!", special=False)
    eos = text.eos_token_ids[0]
    engine = ScriptedEngine(text, lambda request: [*tokens, eos])
    prompt = text.encode("hi", special=False)
    async with serving(engine) as gateway:
        body = (await gateway.chat(return_token_ids=True, prompt_logprobs=1, n=2)).json()
        assert [choice["token_ids"] for choice in body["choices"]] == [[*tokens, eos]] * 2
        assert body["prompt_token_ids"] == engine.seen[-1].prompt
        assert len(body["prompt_logprobs"]) == len(body["prompt_token_ids"]) and body["prompt_logprobs"][0] is None

        streamed = await gateway.chat(return_token_ids=True, stream=True, stop=["y"])
        chunks = [json.loads(data) for data in events(streamed.text)[:-1]]
        assert chunks[0]["prompt_token_ids"] == body["prompt_token_ids"]
        assert not any("prompt_token_ids" in chunk for chunk in chunks[1:])
        ids = [id for chunk in chunks for id in chunk["choices"][0].get("token_ids", [])]
        assert ids == tokens[:3], "with the token that completed the stop string"

        both = (await gateway.complete(prompt=["hi", "hi"], return_token_ids=True, prompt_logprobs=0)).json()["choices"]
        assert [choice["prompt_token_ids"] for choice in both] == [prompt, prompt]
        assert [len(choice["prompt_logprobs"]) for choice in both] == [len(prompt)] * 2
        assert both[1]["token_ids"] == [*tokens, eos]

        named = (await gateway.chat(logprobs=True, top_logprobs=1, return_tokens_as_token_ids=True)).json()
        entry = named["choices"][0]["logprobs"]["content"][0]
        assert entry["token"] == entry["top_logprobs"][0]["token"] == f"token_id:{tokens[0]}"
        legacy = (await gateway.complete(logprobs=1, return_tokens_as_token_ids=True)).json()["choices"][0]["logprobs"]
        assert legacy["tokens"] == [f"token_id:{token}" for token in tokens]
        too_many = await gateway.complete(prompt=["x" * 400] * 128, prompt_logprobs=20)
        assert too_many.status_code == 400 and too_many.json()["error"]["param"] == "prompt_logprobs"


async def test_the_best_of_several_are_returned_and_all_are_paid_for(serving: Serving, text: TextModel) -> None:
    words = ["aaaa", "bb", "cccc", "dd"]

    class Scored(ScriptedEngine):
        """Choice 1 has the best mean, choice 3 the second best."""

        def _advance(self, id: str) -> None:
            super()._advance(id)
            for delta in self._deltas:
                if delta.request_id == id and delta.logprobs:
                    delta.logprobs = [
                        TokenLogprob({"a": -2.0, "b": -0.5, "c": -3.0, "d": -1.0}[text.decode(delta.tokens)])
                    ]

    def script(request: Request) -> list[int]:
        return text.encode(words[request.params.seed - 10], special=False)

    async with serving(Scored(text, script)) as gateway:
        reply = (await gateway.complete(best_of=4, n=2, seed=10)).json()
        assert [(choice["index"], choice["text"]) for choice in reply["choices"]] == [(0, "bb"), (1, "dd")]
        assert reply["choices"][0]["logprobs"] is None
        assert reply["usage"]["completion_tokens"] == sum(map(len, words))


async def test_many_prompts_reach_the_engine_a_few_at_a_time(serving: Serving, text: TextModel) -> None:
    most = 0

    class Watched(ScriptedEngine):
        def submit(self, request: Request) -> None:
            nonlocal most
            super().submit(request)
            most = max(most, len(self._left))

    engine = Watched(text, lambda request: request.prompt[-1:] * (1 + request.prompt[-1] % 5))
    async with serving(engine) as gateway:
        prompts = [f"{chr(97 + i % 26)}" for i in range(128)]
        choices = (await gateway.complete(prompt=prompts, max_tokens=8)).json()["choices"]
        assert [choice["index"] for choice in choices] == list(range(128))
        assert all(set(choice["text"]) == {prompts[choice["index"]]} for choice in choices)
        assert most <= AT_ONCE and len(engine.seen) == 128
        streamed = await gateway.complete(prompt=prompts[:40], stream=True)
        ends = [c for data in events(streamed.text)[:-1] for c in json.loads(data)["choices"] if c["finish_reason"]]
        assert sorted(c["index"] for c in ends) == list(range(40))


def test_a_key_is_never_above_its_tier() -> None:
    tiers = [TierConfig(name="slow", priority=2), TierConfig(name="fast", priority=0), TierConfig(name="usual")]
    admissions = Admissions(AdmissionConfig(enabled=False), tiers, {}, ModelRegistry([]), cast(Metrics, None))

    def of(tier: str, asked: int | None, key: str = "k") -> tuple[int, list[str]]:
        exchange = SimpleNamespace(
            caller=Caller("t", key=key, tier=tier),
            scope={},
            ignored=[],
            refuses_unknown=False,
            shadow=False,
            header=lambda name: None,
        )
        return admissions.priority(cast(Exchange, exchange), None, asked), exchange.ignored

    assert [of(tier, 0)[0] for tier in ("fast", "usual", "slow")] == [-1, 0, 1]
    assert of("usual", -3) == (0, ["priority"]) and of("fast", -3) == (-1, ["priority"])
    assert of("usual", 2) == (2, []) and of("fast", 1) == (0, []) and of("slow", 99) == (17, [])
    assert of("usual", -3, key="") == (-1, [])


async def test_salt_priority_and_defaults(serving: Serving, text: TextModel) -> None:
    engine = ScriptedEngine(text)
    async with serving(engine, served={"sampling": SamplingDefaults(typical_p=0.7)}) as gateway:
        assert (await gateway.chat(cache_salt="mine", priority=3)).status_code == 200
        request = engine.seen[-1]
        assert request.cache_salt.endswith("\0mine") and request.priority == 3
        assert request.params.typical_p == 0.7
        await gateway.chat(priority=-5)
        assert engine.seen[-1].priority == -1, "without keys nobody is below"
        await gateway.chat(priority=10**6, cache_salt="")
        assert engine.seen[-1].priority == 16 and engine.seen[-1].cache_salt == ""
