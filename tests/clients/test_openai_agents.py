"""The OpenAI Agents SDK over chat completions and over the Responses API."""

from __future__ import annotations

import pytest

from tests.clients.environment import Environment
from tests.clients.scripted_server import Prompt, ScriptedServer, call


def answers(prompt: Prompt) -> str:
    if "Make a person." in prompt.text:
        return '{"name": "Ann", "age": 40}'
    if "transfer_to_expert" in prompt.tools and "transfer_to_expert" not in prompt.text.rpartition("</tools>")[2]:
        return call("transfer_to_expert")
    city = "Rome" if "Rome" in prompt.text else "Paris"
    rains = [result for result in prompt.results if "rains" in result]
    return rains[-1] if rains else call("weather", city=city)


@pytest.mark.clients("openai-agents", "tool loops, streams, handoffs and typed output, with both APIs")
def test_tool_loops(client: Environment, scripted: ScriptedServer) -> None:
    scripted.answer(answers)
    said = client.script("openai_agents.py", scripted.url, scripted.model)
    assert not scripted.failures()
    for api in ("chat", "responses"):
        told = said[api]
        assert isinstance(told, dict) and told.pop("events") > 5
        assert told == {
            "whole": "It rains in Paris.",
            "streamed": "It rains in Paris.",
            "handed": ["It rains in Rome.", "expert"],
            "made": {"name": "Ann", "age": 40},
            "further": "It rains in Paris.",
        }
