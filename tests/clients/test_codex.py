"""The Codex command line through the Responses API: a whole session that reads, patches and runs."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.clients.environment import Environment
from tests.clients.scripted_server import Prompt, ScriptedServer, call, scripted_server

KNOWN = "gpt-6.1-sol"
PATCH = """*** Begin Patch
*** Update File: greet.py
@@
-print("hello")
+print("hello, penstock")
*** End Patch
"""
SETTINGS = """model = "{model}"
model_provider = "penstock"
[model_providers.penstock]
name = "Penstock"
base_url = "{url}"
wire_api = "responses"
"""


@pytest.fixture(scope="module")
def scripted() -> Iterator[ScriptedServer]:
    """The second name is one that Codex knows, and treats differently."""
    with scripted_server(aliases=(KNOWN,)) as server:
        yield server


def session(client: Environment, server: ScriptedServer, folder: Path, model: str) -> list[dict[str, Any]]:
    """Lets Codex work on a small project; returns what it reported."""
    home, project = folder / "home", folder / "project"
    home.mkdir()
    project.mkdir()
    (project / "greet.py").write_text('print("hello")\n')
    (home / "config.toml").write_text(SETTINGS.format(model=model, url=server.openai))
    done = client.run(
        client.program("codex"),
        *("exec", "--json", "--skip-git-repo-check", "--dangerously-bypass-approvals-and-sandbox"),
        "Make greet.py greet Penstock, and run it.",
        env={"CODEX_HOME": str(home)},
        cwd=project,
    )
    assert (project / "greet.py").read_text() == 'print("hello, penstock")\n', done.stdout[-4000:]
    return [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]


@pytest.mark.clients("codex", "a session that reads a file, applies a patch and runs a command")
def test_a_session_with_functions(client: Environment, scripted: ScriptedServer, tmp_path: Path) -> None:
    def work(prompt: Prompt) -> str:
        steps = [
            call("exec_command", cmd="cat greet.py"),
            call("exec_command", cmd=f"apply_patch <<'EOF'\n{PATCH}EOF"),
            call("exec_command", cmd="python3 greet.py"),
        ]
        done = len(prompt.results)
        if done == 1:
            assert 'print("hello")' in prompt.results[0]
        if done < len(steps):
            return steps[done]
        return f"It prints: {prompt.results[-1].splitlines()[-1]}"

    scripted.answer(work)
    reported = session(client, scripted, tmp_path, scripted.model)
    assert not scripted.failures()
    said = [event["item"]["text"] for event in reported if event.get("item", {}).get("type") == "agent_message"]
    assert said[-1] == "It prints: hello, penstock"
    turns = scripted.posted("/v1/responses")
    assert len(turns) == 4
    # Everything that it sent is honoured, or named.
    assert set(turns[0].ignored) == {
        "client_metadata",
        "reasoning",
        "tools.web_search",
    }
    assert any(tool["type"] == "namespace" for tool in turns[0].body["tools"])


@pytest.mark.clients("codex", "a session with free-text tools in namespaces")
def test_a_session_with_free_text_tools(client: Environment, scripted: ScriptedServer, tmp_path: Path) -> None:
    """As Codex works with models that it knows: tools come as input items, and take code instead of JSON."""
    quoted = json.dumps(PATCH)
    steps = [
        'text((await tools.exec_command({cmd: "cat greet.py"})).output)',
        f"text(await tools.apply_patch({quoted}))",
        'text((await tools.exec_command({cmd: "python3 greet.py"})).output)',
    ]

    def work(prompt: Prompt) -> str:
        assert "functions__exec" in prompt.tools
        done = len(prompt.results)
        if done < len(steps):
            return call("functions__exec", input=steps[done])
        return "It prints: hello, penstock" if "hello, penstock" in prompt.results[-1] else "It failed."

    scripted.answer(work)
    reported = session(client, scripted, tmp_path, KNOWN)
    assert not scripted.failures()
    said = [event["item"]["text"] for event in reported if event.get("item", {}).get("type") == "agent_message"]
    assert said[-1] == "It prints: hello, penstock"
    outputs = [item for one in scripted.posted("/v1/responses") for item in one.body["input"]]
    assert any(item["type"] == "custom_tool_call" and item["namespace"] == "functions" for item in outputs)
