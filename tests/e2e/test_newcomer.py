"""The first minutes of a newcomer: a fresh clone, the two commands of the README, its examples, and common mistakes."""

from __future__ import annotations

import os
import re
import shlex
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import httpx
import pytest

from tests.ports import free_port

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]
ROOT = Path(__file__).resolve().parents[2]
INSTALL_S = 1200


@dataclass(frozen=True)
class FirstMinutes:
    folder: Path
    url: str
    said: str
    """What `make serve` printed up to its last line."""
    environment: dict[str, str]

    def readme(self, language: str, begins: str) -> str:
        """An example of the README, for the port that is served here."""
        fences = re.findall(rf"^```{language}\n(.*?)^```", (self.folder / "README.md").read_text(), flags=re.S | re.M)
        (found,) = [body for body in fences if body.startswith(begins)]
        return found.replace("http://127.0.0.1:8000", self.url)

    def penstock(self, line: str) -> subprocess.CompletedProcess[str]:
        command = [".venv/bin/penstock", *shlex.split(line)]
        return subprocess.run(
            command, cwd=self.folder, env=self.environment, capture_output=True, text=True, timeout=300
        )


@pytest.fixture(scope="module")
def newcomer(tmp_path_factory: pytest.TempPathFactory) -> Iterator[FirstMinutes]:
    folder = tmp_path_factory.mktemp("newcomer") / "penstock"
    subprocess.run(["git", "clone", "-q", str(ROOT), str(folder)], check=True)
    state = {"PENSTOCK_STATE": str(folder.parent / "state")}
    environment = {
        name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "VIRTUAL_ENV")
    } | state
    port = free_port()
    command = ["make", "serve", f"PYTHON={sys.executable}", f"ARGS=--port {port}"]
    process = subprocess.Popen(
        command, cwd=folder, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        start_new_session=True,
    )  # fmt: skip
    assert process.stdout is not None
    said = ""
    try:
        for line in process.stdout:
            said += line
            if line.startswith("curl "):
                break
        assert "Penstock is ready" in said, said[-3000:]
        yield FirstMinutes(folder, f"http://127.0.0.1:{port}", said, environment)
    finally:
        os.killpg(process.pid, signal.SIGINT)
        try:
            process.communicate(timeout=180)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def test_it_shows_progress_and_names_the_console_first(newcomer: FirstMinutes) -> None:
    said = newcomer.said
    assert "Installing Penstock into .venv" in said
    named = re.findall(rf"{re.escape(newcomer.url)}(/\S*)\s", said)
    assert named[:3] == ["/", "/v1", "/docs"], named
    page = httpx.get(f"{newcomer.url}/", headers={"accept": "text/html"}, follow_redirects=True)  # as a browser asks
    assert page.status_code == 200 and "<title>" in page.text


def test_the_printed_curl_works_as_it_is(newcomer: FirstMinutes) -> None:
    line = newcomer.said.strip().splitlines()[-1]
    done = subprocess.run(["bash", "-c", line], capture_output=True, text=True, timeout=300)
    assert '"finish_reason"' in done.stdout, done


def test_the_curl_of_the_readme_knows_the_capital_of_france(newcomer: FirstMinutes) -> None:
    line = newcomer.readme("sh", "curl ")
    answers = [
        subprocess.run(["bash", "-c", line], capture_output=True, text=True, timeout=300).stdout for _ in range(12)
    ]
    assert sum("Paris" in answer for answer in answers) >= 11, answers


def test_the_python_of_the_readme_streams(newcomer: FirstMinutes) -> None:
    code = newcomer.readme("python", "from openai import OpenAI")
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=180)
    assert done.returncode == 0 and len(done.stdout.split()) > 5, done


def test_the_terminal_commands(newcomer: FirstMinutes) -> None:
    chat = newcomer.penstock(f'chat "What is the capital of France?" --url {newcomer.url}')
    assert chat.returncode == 0 and chat.stdout.strip() and "first token" in chat.stderr, chat
    for line in ("models list", "replicas -o json", "top --once", "trace -o csv"):
        done = newcomer.penstock(f"{line} --url {newcomer.url}")
        assert done.returncode == 0 and done.stdout.strip(), done
    assert newcomer.penstock("doctor").returncode == 0


def test_mistakes_are_one_sentence(newcomer: FirstMinutes) -> None:
    chat = f"{newcomer.url}/v1/chat/completions"
    long = {"model": "smollm2-135m", "messages": [{"role": "user", "content": "word " * 20_000}]}
    refused = httpx.post(chat, json=long, timeout=180)
    assert refused.status_code == 400 and refused.json()["error"]["code"] == "context_length_exceeded"
    unknown = httpx.post(chat, json={"model": "gpt-9", "messages": [{"role": "user", "content": "Hi"}]})
    assert unknown.status_code == 404 and "smollm2-135m" in unknown.json()["error"]["message"]
    nobody = newcomer.penstock("chat Hello --url http://127.0.0.1:1")
    assert nobody.returncode == 2 and "penstock serve" in nobody.stderr and "Traceback" not in nobody.stderr


def test_a_backup_while_it_runs(newcomer: FirstMinutes) -> None:
    done = newcomer.penstock("backup first-backup")
    assert done.returncode == 0 and (newcomer.folder / "first-backup" / "penstock.db").stat().st_size > 0, done
