"""Guardrails of a real gateway: what goes in and what comes out, for those they are for."""

from __future__ import annotations

import asyncio
import json
import time
from pathlib import Path
from typing import Any

import pytest

from penstock.config import load
from penstock.config.guardrails import GuardrailConfig
from penstock.config.schema import TierConfig
from penstock.errors import ConfigError
from penstock.text import TextModel
from tests.gateway.conftest import Running, Serving, events, eventually
from tests.scripted import ScriptedEngine

NUMBER = r"\b\d{3}-\d{2}-\d{4}\b"
LEAK = "Her number is 123-45-6789, call now."


def rule(**more: Any) -> GuardrailConfig:
    return GuardrailConfig(**{"name": "numbers", "patterns": (NUMBER,), **more})


def prompt_of(running: Running, text: TextModel) -> str:
    return text.decode(running.engine.seen[-1].prompt)


async def said(running: Running, **body: Any) -> tuple[str, str]:
    """What a streamed chat shows, and why it ended."""
    reply = await running.chat(stream=True, **body)
    assert reply.status_code == 200, reply.text
    choices = [json.loads(event)["choices"][0] for event in events(reply.text)[:-1]]
    return "".join(choice["delta"].get("content", "") for choice in choices), choices[-1]["finish_reason"]


async def test_refused_input_is_a_400_that_names_the_rule_and_reaches_no_engine(serving: Serving) -> None:
    async with serving(
        guardrails=(rule(stage="input"), rule(name="words", words=("Hunter2",), patterns=()))
    ) as running:
        bodies: list[tuple[str, dict[str, Any]]] = [
            ("/v1/chat/completions", {"messages": [{"role": "user", "content": "is 123-45-6789 hers?"}]}),
            ("/v1/completions", {"prompt": ["fine", "is 123-45-6789 hers?"]}),
            ("/v1/completions", {"prompt": "it is hunter2!"}),
            ("/v1/responses", {"input": "123-45-6789", "store": False}),
            ("/v1/messages", {"messages": [{"role": "user", "content": "HUNTER2"}], "max_tokens": 5}),
        ]
        for path, body in bodies:
            reply = await running.client.post(path, json={"model": "tiny", **body})
            assert reply.status_code == 400, reply.text
            error = reply.json()["error"]
            assert "`numbers`" in error["message"] or "`words`" in error["message"]
            assert error.get("code", "content_blocked") == "content_blocked"
            assert "123-45" not in reply.text
        assert running.engine.seen == []
        assert await running.metric('penstock_guardrails_total{rule="numbers",stage="input",action="refuse"}') == 3
        assert (await running.chat()).status_code == 200


async def test_redacted_input_is_what_the_model_sees(serving: Serving, text: TextModel) -> None:
    async with serving(guardrails=(rule(stage="input", action="redact", replacement="<gone>"),)) as running:
        content = [{"type": "text", "text": "call 123-45-6789 or 987-65-4321"}]
        await running.chat(messages=[{"role": "system", "content": "1"}, {"role": "user", "content": content}])
        assert "call <gone> or <gone>" in prompt_of(running, text)
        echoed = await running.complete(prompt="call 123-45-6789", echo=True, max_tokens=1)
        assert echoed.json()["choices"][0]["text"].startswith("call <gone>")
        await running.complete(prompt=text.encode("ids 123-45-6789"))
        assert prompt_of(running, text) == "ids <gone>"


async def test_redacted_output_in_streams_and_whole_answers(serving: Serving, text: TextModel) -> None:
    clean = LEAK.replace("123-45-6789", "[redacted]")
    async with serving(ScriptedEngine(text, LEAK), guardrails=(rule(stage="output", action="redact"),)) as running:
        assert await said(running) == (clean, "stop")
        assert (await running.chat()).json()["choices"][0]["message"]["content"] == clean
        assert (await running.complete(max_tokens=100)).json()["choices"][0]["text"] == clean
        # The end of an answer hides no number either, nor does a stop string behind it.
        assert (await said(running, max_tokens=25))[0] == "Her number is [redacted]"
        assert (await said(running, stop=[", call"]))[0] == "Her number is [redacted]"


async def test_refused_output_ends_where_the_match_begins(serving: Serving, text: TextModel) -> None:
    engine = ScriptedEngine(text, lambda request: text.encode(LEAK + "x" * 300), step_s=0.002)
    async with serving(engine, guardrails=(rule(),)) as running:
        assert await said(running) == ("Her number is ", "content_filter")
        await eventually(lambda: len(engine.aborted) == 1)
        whole = (await running.chat()).json()["choices"][0]
        assert (whole["message"]["content"], whole["finish_reason"]) == ("Her number is ", "content_filter")
        body = {"model": "tiny", "input": "hi", "store": False}
        response = (await running.client.post("/v1/responses", json=body)).json()
        assert (response["status"], response["incomplete_details"]["reason"]) == ("incomplete", "content_filter")
        body = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 100}
        assert (await running.client.post("/v1/messages", json=body)).json()["stop_reason"] == "refusal"
        counted = 'penstock_guardrails_total{rule="numbers",stage="output",action="refuse"}'
        assert await running.metric(counted) == 4


async def test_rules_are_for_the_tenants_and_tiers_they_name(serving: Serving, text: TextModel) -> None:
    for given, blocked in (
        ({"tenants": ("other",)}, False),
        ({"tenants": ("default",)}, True),
        ({"tiers": ("free",)}, True),
        ({"tiers": ("paid",), "tenants": ("other",)}, False),
    ):
        options = {"tiers": (TierConfig(name="free"), TierConfig(name="paid")), "default_tier": "free"}
        async with serving(ScriptedEngine(text, LEAK), guardrails=(rule(**given),), **options) as running:
            assert (await said(running))[1] == ("content_filter" if blocked else "stop")


async def test_logprobs_would_show_what_is_kept_back(serving: Serving) -> None:
    async with serving(guardrails=(rule(stage="output"),)) as running:
        reply = await running.chat(logprobs=True)
        assert (reply.status_code, reply.json()["error"]["param"]) == (400, "logprobs")


async def test_without_rules_there_is_nothing(serving: Serving) -> None:
    async with serving() as running:
        assert running.parts.guardrails is not None and not running.parts.guardrails.checks_input
        assert (await running.chat(logprobs=True)).status_code == 200


@pytest.mark.parametrize(
    ("written", "complaint"),
    [
        ("{words: [x]}", "name"),
        ("{name: a}", "words or patterns"),
        ("{name: a, words: ['']}", "empty"),
        ("{name: a, words: [x], tiers: [gold]}", "gold"),
        ("{name: a, words: [x], action: hide}", "refuse, redact"),
    ],
)
def test_rules_that_say_nothing_are_refused(written: str, complaint: str, tmp_path: Path) -> None:
    file = tmp_path / "penstock.yaml"
    file.write_text(f"guardrails: [{written}]\n")
    with pytest.raises(ConfigError, match=complaint):
        load(file)


async def test_a_pattern_that_cannot_work_stops_the_start(serving: Serving) -> None:
    with pytest.raises(ConfigError, match="numbers"):
        async with serving(guardrails=(rule(patterns=("(",)),)):
            pass


async def test_a_pattern_that_backtracks_without_end_does_not_freeze_the_gateway(serving: Serving) -> None:
    gaps: list[float] = []

    async def watch() -> None:
        while True:
            begun = time.monotonic()
            await asyncio.sleep(0.001)
            gaps.append(time.monotonic() - begun)

    async with serving(guardrails=(rule(stage="input", patterns=("(?:a|a|aa)+c",)),)) as gateway:
        for _ in range(10):  # a busy machine may hold everything up now and then, but not each time
            gaps.clear()
            watching = asyncio.create_task(watch())
            reply = await gateway.chat(messages=[{"role": "user", "content": "a" * 80 + "b"}])
            watching.cancel()
            assert reply.status_code == 400 and "rule" in reply.json()["error"]["message"]
            if max(gaps) < 0.5:
                break
    assert max(gaps) < 0.5, "other requests went on"
