"""Claude Code, without a terminal: a session that reads, edits, runs and reports, as a developer would have it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.clients.environment import Environment
from tests.clients.scripted_server import Prompt, ScriptedServer, call, calls

PROGRAM = 'def greet(name):\n    return "Hello, wrold, " + name\n'


def session(folder: Path) -> tuple[list[str], object]:
    """What the model says in each turn: it looks, corrects, tries the result, and says what it did."""
    file = str(folder / "greeting.py")
    turns = [
        call("Read", file_path=file),
        "There is a typing error.\n" + call("Edit", file_path=file, old_string="wrold", new_string="world"),
        calls(
            (
                "Bash",
                {"command": "python3 -c 'import greeting; print(greeting.greet(\"Ann\"))'", "description": "Try it"},
            ),
            ("Read", {"file_path": file}),
        ),
        "Corrected: it says world now.",
    ]
    seen: list[str] = []

    def script(prompt: Prompt) -> str:
        # Its own small questions (a title for the session, say) have no tools.
        if "Edit" not in prompt.tools:
            return "A typing error"
        seen.append(prompt.text)
        return turns[min(len(prompt.results), 2) if len(prompt.results) < 4 else 3]

    return seen, script


@pytest.mark.clients(
    "claude-code", "a session without a terminal: read a file, edit it, run a command, two calls at once"
)
def test_a_session(client: Environment, scripted: ScriptedServer, tmp_path: Path) -> None:
    home, project = tmp_path / "home", tmp_path / "project"
    home.mkdir()
    project.mkdir()
    (project / "greeting.py").write_text(PROGRAM)
    seen, script = session(project)
    scripted.answer(script)  # type: ignore[arg-type]
    done = client.run(
        client.program("claude"),
        *("-p", "Correct the typing error in greeting.py.", "--model", scripted.model, "--output-format", "json"),
        *("--allowedTools", "Read,Edit,Bash"),
        cwd=project,
        env={
            "HOME": str(home),
            "ANTHROPIC_BASE_URL": scripted.url,
            "ANTHROPIC_AUTH_TOKEN": "none",
            "DISABLE_TELEMETRY": "1",
            "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
        },
    )
    result = json.loads(done.stdout)
    assert not scripted.failures()
    assert (result["is_error"], result["num_turns"]) == (False, 5), result
    assert result["result"] == "Corrected: it says world now."
    assert "Hello, world, " in (project / "greeting.py").read_text()
    # The whole conversation reached the model: file, edit and the command's output.
    assert len(seen) == 4 and "wrold" in seen[1] and "Hello, world, Ann" in seen[3]
    assert result["usage"]["output_tokens"] > 0 and result["usage"]["cache_read_input_tokens"] > 0
    first = scripted.posted("/v1/messages")[0]
    assert first.query == "beta=true" and len(first.body["tools"]) > 15
    advice = {"thinking", "context_management", "output_config.effort", "system.x-anthropic-billing-header"}
    assert set(first.ignored) <= advice
