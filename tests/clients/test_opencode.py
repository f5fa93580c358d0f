"""opencode, without a terminal: a session that reads, edits, runs and reports, over both APIs that it can speak."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.clients.environment import Environment
from tests.clients.scripted_server import Prompt, Script, ScriptedServer, call, calls

PROGRAM = 'def greet(name):\n    return "Hello, wrold, " + name\n'
TRY = "python3 -c 'import greeting; print(greeting.greet(\"Ann\"))'"


def session(file: str) -> Script:
    """What the model says in each turn: it looks, corrects, tries the result, and says what it saw."""
    turns = {
        0: call("read", filePath=file),
        1: "There is a typing error.\n" + call("edit", filePath=file, oldString="wrold", newString="world"),
        2: calls(("bash", {"command": TRY, "description": "Try it"}), ("read", {"filePath": file})),
    }

    def script(prompt: Prompt) -> str:
        if "edit" not in prompt.tools:  # it asks for a title
            return "A typing error"
        shown = [result for result in prompt.results if "Hello, world, Ann" in result]
        return turns.get(len(prompt.results), f"Corrected; it printed {shown[-1].strip() if shown else 'nothing'}.")

    return script


@pytest.mark.parametrize(
    ("package", "path"),
    [
        pytest.param(
            "@ai-sdk/openai-compatible",
            "/v1/chat/completions",
            marks=pytest.mark.clients("opencode", "a session of reading, editing and a command, over chat completions"),
        ),
        pytest.param(
            "@ai-sdk/anthropic",
            "/v1/messages",
            marks=pytest.mark.clients("opencode", "a session of reading, editing and a command, over the Messages API"),
        ),
    ],
)
def test_a_session(client: Environment, scripted: ScriptedServer, tmp_path: Path, package: str, path: str) -> None:
    home, project = tmp_path / "home", tmp_path / "project"
    home.mkdir()
    project.mkdir()
    (project / "greeting.py").write_text(PROGRAM)
    settings = {
        "provider": {
            "penstock": {
                "npm": package,
                "name": "Penstock",
                "options": {"baseURL": scripted.openai, "apiKey": "none"},
                "models": {scripted.model: {"limit": {"context": 200_000, "output": 8192}}},
            }
        },
        "share": "disabled",
        "autoupdate": False,
    }
    (project / "opencode.json").write_text(json.dumps(settings))
    scripted.answer(session(str(project / "greeting.py")))
    done = client.run(
        client.program("opencode"),
        *("run", "Correct the typing error in greeting.py.", "--model", f"penstock/{scripted.model}"),
        cwd=project,
        env={"HOME": str(home), "PWD": str(project), "OPENCODE_DISABLE_MODELS_FETCH": "1"},
    )
    assert not scripted.failures()
    assert "it printed Hello, world, Ann." in done.stdout, done.stdout + done.stderr
    assert "Hello, world, " in (project / "greeting.py").read_text()
    turns = [one for one in scripted.posted(path) if len(one.body.get("tools") or ()) > 3]
    assert len(turns) == 4 and not any(one.ignored for one in turns), [one.ignored for one in turns]
