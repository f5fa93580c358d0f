"""aider edits a file of a git repository. The model is scripted, because the default one is too small to act."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from tests.clients.environment import Environment
from tests.clients.scripted_server import Prompt, ScriptedServer

BEFORE = 'def greeting() -> str:\n    return "Hello"\n'
EDIT = """I change the greeting.

greeting.py
```python
<<<<<<< SEARCH
    return "Hello"
=======
    return "Good morning"
>>>>>>> REPLACE
```
"""


@pytest.mark.clients("aider", "one edit of a file in a git repository, with its commit")
def test_one_edit(client: Environment, scripted: ScriptedServer, tmp_path: Path) -> None:
    def git(*command: str) -> str:
        return subprocess.run(("git", *command), cwd=tmp_path, check=True, capture_output=True, text=True).stdout

    git("init", "-q")
    git("config", "user.name", "tester")
    git("config", "user.email", "tester@example.org")
    (tmp_path / "greeting.py").write_text(BEFORE)
    git("add", "."), git("commit", "-qm", "begin")

    def script(prompt: Prompt) -> str:
        return EDIT if "SEARCH/REPLACE" in prompt.text else "feat: a friendlier greeting"

    scripted.answer(script)
    client.run(
        client.program("aider"),
        *("--model", f"openai/{scripted.model}", "--openai-api-base", scripted.openai, "--openai-api-key", "none"),
        *("--edit-format", "diff", "--yes-always", "--no-check-update", "--no-show-model-warnings", "--no-analytics"),
        *("--no-gitignore", "--map-tokens", "0", "--message", "Say good morning.", "greeting.py"),
        cwd=tmp_path,
        env={"HOME": str(tmp_path / "home"), "LITELLM_LOCAL_MODEL_COST_MAP": "True", "AIDER_CHECK_UPDATE": "0"},
    )
    assert not scripted.failures()
    assert (tmp_path / "greeting.py").read_text() == BEFORE.replace("Hello", "Good morning")
    assert git("log", "--format=%s").splitlines() == ["feat: a friendlier greeting", "begin"]
    assert scripted.posted("/v1/chat/completions")[0].body["stream"] is True
