"""What requests and histories say of thoughts: contradicted, without effect, or left out of what comes back."""

from __future__ import annotations

from typing import Any

import pytest

from penstock.text import TextModel
from tests.gateway.api.test_reasoning import OPENS, SAID, SWITCHED, TURNS, prompt_of, scripted
from tests.gateway.conftest import Serving
from tests.text.test_thoughts import model

USER = {"role": "user", "content": "hi"}
THOUGHT = {"type": "reasoning", "content": [{"type": "reasoning_text", "text": "Hm."}], "summary": []}
LAST = TURNS.replace("{{ m.content }}", "[{{ m.reasoning_content }}]{{ m.content }}") + "<|assistant|>"
"""Shows the thought of every message."""


@pytest.fixture(scope="module")
def opens(tmp_path_factory: pytest.TempPathFactory) -> TextModel:
    return model(tmp_path_factory.mktemp("opens"), "<think>", "</think>", template=OPENS)


@pytest.fixture(scope="module")
def shows(tmp_path_factory: pytest.TempPathFactory) -> TextModel:
    return model(tmp_path_factory.mktemp("shows"), "<think>", "</think>", template=LAST)


async def test_thoughts_are_shown_or_not(serving: Serving, opens: TextModel) -> None:
    async with serving(scripted(opens, SAID), text=opens) as running:
        for shown in (True, False):
            reply = await running.chat(include_reasoning=shown, reasoning={"exclude": shown})
            assert reply.status_code == 400, reply.text
            assert reply.json()["error"]["param"] == "reasoning.exclude"
            reply = await running.chat(include_reasoning=shown, reasoning={"exclude": not shown})
            assert reply.status_code == 200
            assert ("reasoning_content" in reply.json()["choices"][0]["message"]) is shown


@pytest.mark.parametrize(
    ("said", "name"),
    [
        ({"enable_thinking": False, "thinking_budget": 50}, "thinking_budget"),
        ({"thinking": {"type": "disabled", "budget_tokens": 50}}, "thinking.budget_tokens"),
        ({"reasoning": {"effort": "none", "max_tokens": 50}}, "reasoning.max_tokens"),
        ({"enable_thinking": False, "thinking_budget": 0}, None),
    ],
)
async def test_the_budget_of_a_thought_that_is_not_to_be(
    serving: Serving, opens: TextModel, said: dict[str, Any], name: str | None
) -> None:
    async with serving(scripted(opens, SAID), text=opens) as running:
        reply = await running.chat(**said)
        assert reply.status_code == 200, reply.text
        assert reply.headers.get("x-penstock-ignored") == name
        assert running.engine.seen[-1].params.thought.budget == 0  # type: ignore[union-attr]


async def test_variables_of_a_template_that_the_request_brings(serving: Serving, opens: TextModel) -> None:
    said = {"chat_template_kwargs": {"enable_thinking": False}}
    async with serving(scripted(opens, SAID), text=opens, request_templates=True) as running:
        reply = await running.chat(chat_template=OPENS, **said)
        assert reply.headers["x-penstock-ignored"] == "chat_template_kwargs.enable_thinking"
        assert "x-penstock-ignored" not in (await running.chat(chat_template=SWITCHED, **said)).headers
        refused = await running.chat(chat_template=OPENS, documents=[{"text": "x"}])
        assert refused.status_code == 400 and refused.json()["error"]["param"] == "documents"
        for more in (said, {"thinking_budget": 5}):
            refused = await running.chat(chat_template="{% for", **more)
            assert refused.status_code == 400, refused.text
            assert refused.json()["error"]["param"] == "chat_template"


async def test_thoughts_have_the_name_that_the_template_of_the_request_knows(
    serving: Serving, shows: TextModel
) -> None:
    told = [USER, {"role": "assistant", "content": "So", "reasoning_content": "Hm."}, USER]
    async with serving(scripted(shows, "x"), text=shows, request_templates=True) as running:
        for name in ("reasoning_content", "thinking", "reasoning"):
            template = LAST.replace("m.reasoning_content", f"message.{name}").replace("m in", "message in")
            reply = await running.chat(messages=told, chat_template=template.replace("m.", "message."))
            assert "x-penstock-ignored" not in reply.headers, reply.text
            assert "[Hm.]So" in prompt_of(running, shows), template


@pytest.mark.parametrize(
    "items",
    [
        [USER, THOUGHT, USER, {"role": "assistant", "content": "So"}, USER],
        [USER, THOUGHT],
        [USER, {"type": "reasoning", "summary": [{"type": "summary_text", "text": "Hm."}]}, USER],
    ],
    ids=["of an answer that never came", "at the end", "only a summary"],
)
async def test_thoughts_without_an_answer_belong_to_no_other(
    serving: Serving, shows: TextModel, items: list[dict[str, Any]]
) -> None:
    async with serving(scripted(shows, "x"), text=shows) as running:
        reply = await running.client.post("/v1/responses", json={"model": "tiny", "input": items})
        assert reply.status_code == 200, reply.text
        assert reply.headers["x-penstock-ignored"] == "input.reasoning"
        assert "Hm." not in prompt_of(running, shows)


async def test_thoughts_between_a_call_and_its_result_stay(serving: Serving, shows: TextModel) -> None:
    call = {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"}
    result = {"type": "function_call_output", "call_id": "c", "output": "4"}
    async with serving(scripted(shows, "x"), text=shows) as running:
        items = [USER, THOUGHT, call, result, THOUGHT, {"role": "assistant", "content": "So"}, USER]
        reply = await running.client.post("/v1/responses", json={"model": "tiny", "input": items})
        assert reply.status_code == 200 and "x-penstock-ignored" not in reply.headers
        assert prompt_of(running, shows).count("[Hm.]") == 2


async def test_omitted_thoughts_come_back_in_their_signature(
    serving: Serving, opens: TextModel, shows: TextModel
) -> None:
    """Clients that do not show thoughts send blocks back whose text is empty."""
    asked = {"model": "tiny", "max_tokens": 200, "thinking": {"type": "adaptive", "display": "omitted"}}
    async with serving(scripted(opens, SAID), text=opens) as running:
        reply = await running.client.post("/v1/messages", json={**asked, "messages": [USER]})
        said = reply.json()["content"]
        assert said[0]["thinking"] == "" and said[1]["text"] == "Forty-two."
    async with serving(scripted(shows, "x"), text=shows, served={"reasoning": "think"}) as running:
        told = [USER, {"role": "assistant", "content": said}, USER]
        reply = await running.client.post("/v1/messages", json={**asked, "messages": told})
        assert reply.status_code == 200 and "x-penstock-ignored" not in reply.headers, reply.text
        assert "[Let me see.]Forty-two." in prompt_of(running, shows)
        said[0]["signature"] = "ErUB"  # of another server
        reply = await running.client.post("/v1/messages", json={**asked, "messages": told})
        assert reply.headers["x-penstock-ignored"] == "messages.content.thinking"
