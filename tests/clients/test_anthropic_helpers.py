"""What the Anthropic SDK does beyond single requests."""

from __future__ import annotations

import pytest

from tests.clients.environment import Environment
from tests.clients.scripted_server import Prompt, ScriptedServer, call
from tests.e2e.conftest import MODEL, Server


def script(prompt: Prompt) -> str:
    if prompt.text.endswith("It is"):
        return " wet."
    if not prompt.tools:
        return '{"city": "Paris", "wet": true}'
    return prompt.results[-1] if prompt.results else call("weather", city="Paris")


@pytest.mark.clients("anthropic", "tool_runner, whole and streamed; parse; an answer that is begun")
def test_helpers(client: Environment, scripted: ScriptedServer) -> None:
    scripted.answer(script)
    said = client.script("anthropic_helpers.py", scripted.url, scripted.model)
    assert said["ran"] == "It rains in Paris."
    assert said["reasons"] == ["tool_use", "end_turn"]
    assert said["parsed"] == {"city": "Paris", "wet": True}
    assert said["begun"] == " wet."
    # It asks for a thread first, and goes on without one.
    assert all("thread_unsupported_request" in one for one in scripted.failures())


@pytest.mark.clients("anthropic", "a batch: create, retrieve, results, list, delete")
def test_a_batch(client: Environment, served: Server) -> None:
    said = client.script("anthropic_helpers.py", served.url, MODEL, "batch")
    assert said["results"] == {"r0": "succeeded", "r1": "succeeded", "r2": "succeeded", "r3": "errored"}
    assert said["listed"] and said["counts"]["succeeded"] == 3  # type: ignore[index]
