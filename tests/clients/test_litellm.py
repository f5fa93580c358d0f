"""litellm with each of its providers that can reach us."""

from __future__ import annotations

import pytest

from tests.clients.environment import Environment
from tests.clients.scripted_server import Prompt, ScriptedServer, call

LOCAL = {"LITELLM_LOCAL_MODEL_COST_MAP": "True"}


def weather(prompt: Prompt) -> str:
    """Asks for the weather once, then says what came back."""
    return prompt.results[-1] if prompt.results else call("weather", city="Paris")


@pytest.mark.clients("litellm", "a tool loop of two turns, whole and streamed, provider openai")
def test_tool_loop_over_chat_completions(client: Environment, scripted: ScriptedServer) -> None:
    scripted.answer(weather)
    said = client.script("litellm_tool_loop.py", f"openai/{scripted.model}", scripted.openai, env=LOCAL)
    assert not scripted.failures()
    assert said["turns"][-1]["content"] == "It rains in Paris."
    assert said["second"] == "It snows in Paris."


@pytest.mark.clients("litellm", "a tool loop of two turns, whole and streamed, provider anthropic")
def test_tool_loop_over_messages(client: Environment, scripted: ScriptedServer) -> None:
    scripted.answer(weather)
    said = client.script("litellm_tool_loop.py", f"anthropic/{scripted.model}", scripted.url, env=LOCAL)
    assert not scripted.failures()
    assert said["turns"][-1]["content"] == "It rains in Paris."
    assert said["second"] == "It snows in Paris."
