"""What holds for requests that say nothing: the model's sampling values, and the limits of time and length."""

from __future__ import annotations

import logging
from types import SimpleNamespace
from typing import Any, cast

import pytest

from penstock.config.sampling import SamplingDefaults
from penstock.config.schema import DEFAULT_TIERS
from penstock.engine.request import EngineInfo, SamplingParams
from penstock.gateway.accounting.request_limits import Cap
from penstock.gateway.app.exchange import Exchange
from penstock.gateway.generation.sampling import TokenLimit, fit, length_limit, sampling_params
from penstock.gateway.generation.schemas import ChatRequest
from penstock.gateway.process.settings import GatewaySettings
from penstock.identity import Caller
from penstock.text import TextModel
from tests.gateway.conftest import Serving
from tests.scripted import ScriptedEngine

INFO = EngineInfo("m", "i", 1000, 100, 16, 10, 4, "cpu", "float32")
DEFAULTS = SamplingDefaults(
    temperature=0.2, top_p=0.9, top_k=40, min_p=0.1, presence_penalty=0.5, frequency_penalty=0.25,
    repetition_penalty=1.1,
)  # fmt: skip


def params(**given: Any) -> SamplingParams:
    request = ChatRequest(model="m", messages=[], **given)
    return sampling_params(request, INFO, (), TokenLimit(8, None), defaults=DEFAULTS, logprobs=None)


def test_values_that_a_request_does_not_give_are_the_models_own() -> None:
    for silent in (params(), params(temperature=None, top_p=None, top_k=None)):
        for name, value in DEFAULTS.given.items():
            assert getattr(silent, name) == value, name
    asked = params(temperature=1.0, top_p=1.0, top_k=0, min_p=0.0, presence_penalty=0.0, repetition_penalty=1.0)
    assert (asked.temperature, asked.top_p, asked.top_k, asked.min_p) == (1.0, 1.0, 0, 0.0)
    assert (asked.presence_penalty, asked.frequency_penalty, asked.repetition_penalty) == (0.0, 0.25, 1.0)
    assert params(top_k=-1).top_k == 0
    assert params(temperature=0.0).greedy
    assert (params(temperature=1.5).min_p, params(temperature=1.5).top_p) == (0.0, 0.9)


LIMITS: list[tuple[TokenLimit, int | None, int, str]] = [
    # asked and default, quota, most tokens, the name of the limit
    (TokenLimit(8, None), None, 8, ""),
    (TokenLimit(2000, None, clip=True), None, 900, "context_window"),
    (TokenLimit(8, 5, default_is="default_max_tokens"), None, 8, ""),
    (TokenLimit(None, 5, default_is="default_max_tokens"), None, 5, "default_max_tokens"),
    (TokenLimit(None, 900, default_is="default_max_tokens"), None, 900, "default_max_tokens"),
    (TokenLimit(None, 950, default_is="default_max_tokens"), None, 900, "context_window"),
    (TokenLimit(None, None), None, 900, "context_window"),
    (TokenLimit(None, None), 400, 300, "context_tokens"),
    (TokenLimit(None, None), 2000, 900, "context_window"),
    (TokenLimit(None, None).lowered(7, "sampling.max_tokens"), None, 7, "sampling.max_tokens"),
    (TokenLimit(None, 5, default_is="max_tokens").lowered(7, "sampling.max_tokens"), None, 5, "max_tokens"),
]


@pytest.mark.parametrize(("limit", "quota", "most", "name"), LIMITS)
def test_the_limit_that_ends_a_long_answer_is_named(limit: TokenLimit, quota: int | None, most: int, name: str) -> None:
    cap = None if quota is None else Cap("context_tokens", quota, "tier", "The tier `free`")
    fitted = fit(SamplingParams(), 100, limit, 1000, "messages", cap)
    assert fitted.max_tokens == most
    assert length_limit(fitted, limit, 1000, cap) == name


def test_time_limits_are_those_of_the_tier_and_of_the_server() -> None:
    def of(tier: str, key: str = "k", **settings: Any) -> float | None:
        exchange = SimpleNamespace(caller=Caller("acme", tier=tier, key=key), scope={}, limit_scopes={})
        found = GatewaySettings(models=(), tiers=DEFAULT_TIERS, **settings).generation
        return found.time_limit(cast(Exchange, exchange), "tiny")

    assert [of(tier) for tier in ("free", "standard", "enterprise", "batch")] == [30.0, 600.0, None, None]
    assert of("standard", key="") is None, "nobody has a tier where there are no keys"
    assert (of("free", time_limit_s=10.0), of("enterprise", time_limit_s=10.0)) == (10.0, 10.0)
    assert of("free", time_limit_s=1000.0) == 30.0


async def test_every_api_uses_and_shows_the_models_values(
    serving: Serving, text: TextModel, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "penstock.gateway")
    engine = ScriptedEngine(text, "word " * 50)
    sampling = SamplingDefaults(temperature=0.2, top_p=0.9, max_tokens=9)
    async with serving(engine, served={"sampling": sampling}) as gateway:
        chat = await gateway.chat()
        assert chat.json()["usage"]["completion_tokens"] == 9
        assert chat.headers["x-penstock-limit"] == "sampling.max_tokens"
        assert [record.__dict__["limit"] for record in caplog.records if "limit" in record.__dict__] == [
            "sampling.max_tokens"
        ]
        response = await gateway.client.post("/v1/responses", json={"model": "tiny", "input": "hi"})
        assert (response.json()["temperature"], response.json()["top_p"]) == (0.2, 0.9)
        body = {"model": "tiny", "max_tokens": 4, "messages": [{"role": "user", "content": "hi"}]}
        message = await gateway.client.post("/v1/messages", json=body)
        assert message.status_code == 200 and "x-penstock-limit" not in message.headers, "it asked for 4 tokens"
        complete = await gateway.complete()
        assert complete.json()["usage"]["completion_tokens"] == 16
        seen = [request.params for request in engine.seen]
        assert {(one.temperature, one.top_p) for one in seen} == {(0.2, 0.9)} and len(seen) == 4
        models = (await gateway.client.get("/v1/models")).json()["data"]
        assert models[0]["sampling"] == {"temperature": 0.2, "top_p": 0.9, "max_tokens": 9}
        assert (await gateway.chat(temperature=1.0)).status_code == 200
        assert engine.seen[-1].params.temperature == 1.0
