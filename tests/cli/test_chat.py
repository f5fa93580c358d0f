"""`penstock chat` against a small HTTP server that speaks the streaming API."""

import io
import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest
from rich.console import Console
from typer.testing import CliRunner

from penstock.cli.app import app
from penstock.cli.chat_client import Client, Options
from penstock.cli.conversation import Conversation
from penstock.cli.markdown_stream import MarkdownStream, complete

USAGE = {"prompt_tokens": 7, "completion_tokens": 2, "prompt_tokens_details": {"cached_tokens": 5}}


class Api(ThreadingHTTPServer):
    """Answers with `lines`, or with `status` and `body`; remembers what it was asked."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.lines = [
            ": keep-alive",
            event(choices=[{"delta": {"role": "assistant", "content": ""}}]),
            event(choices=[{"delta": {"content": "Bon"}}]),
            event(choices=[{"delta": {"content": "jour é"}, "finish_reason": "length"}]),
            event(choices=[], usage=USAGE),
            "data: [DONE]",
        ]
        self.status = 200
        self.body = b""
        self.asked: list[dict[str, Any]] = []
        self.keys: list[str | None] = []

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"


class Handler(BaseHTTPRequestHandler):
    server: Api

    def do_GET(self) -> None:
        self._reply(200, json.dumps({"object": "list", "data": [{"id": "small"}, {"id": "large"}]}).encode())

    def do_POST(self) -> None:
        self.server.asked.append(json.loads(self.rfile.read(int(self.headers["content-length"]))))
        self.server.keys.append(self.headers["authorization"])
        body = self.server.body or "".join(line + "\n\n" for line in self.server.lines).encode()
        self._reply(self.server.status, body)

    def _reply(self, status: int, body: bytes) -> None:
        self.send_response(status)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        pass


def event(**chunk: object) -> str:
    return "data: " + json.dumps(chunk, ensure_ascii=False)


@pytest.fixture
def api() -> Iterator[Api]:
    with Api() as server:
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        yield server
        server.shutdown()
        thread.join()


def chat(api: Api, *arguments: str, stdin: str | None = None) -> Any:
    return CliRunner().invoke(app, ["chat", "--url", api.url, *arguments], input=stdin)


def test_one_question_is_answered_with_its_timings(api: Api) -> None:
    result = chat(api, "Hello")
    assert result.exit_code == 0
    assert result.stdout == "Bonjour é\n"
    assert "first token" in result.stderr and "tokens/s" in result.stderr
    assert "7 in (5 cached), 2 out" in result.stderr and "ended by length" in result.stderr
    assert api.asked[0]["model"] == "small"
    assert api.asked[0]["messages"] == [{"role": "user", "content": "Hello"}]


def test_options_go_into_the_request_and_only_those_given(api: Api) -> None:
    options = ["--model", "m", "--system", "Be brief.", "-t", "0", "--max-tokens", "9", "--seed", "3", "--key", "k"]
    chat(api, "Hello", *options)
    asked = api.asked[0]
    assert (asked["model"], asked["temperature"], asked["max_tokens"], asked["seed"]) == ("m", 0, 9, 3)
    assert asked["messages"][0] == {"role": "system", "content": "Be brief."}
    assert "top_p" not in asked
    assert api.keys == ["Bearer k"]


def test_the_question_can_come_from_a_pipe(api: Api) -> None:
    chat(api, "-", stdin="from a file")
    assert api.asked[0]["messages"][-1]["content"] == "from a file"


def test_quiet_prints_only_the_answer(api: Api) -> None:
    result = chat(api, "Hello", "--quiet")
    assert (result.stdout, result.stderr) == ("Bonjour é\n", "")


@pytest.mark.parametrize(
    ("status", "body", "message"),
    [
        (404, b'{"error": {"message": "No model x."}}', "No model x. (HTTP 404)"),
        (502, b"<html>bad gateway</html>", "HTTP 502: <html>"),
    ],
)
def test_a_refusal_is_shown_in_the_servers_words(api: Api, status: int, body: bytes, message: str) -> None:
    api.status, api.body = status, body
    assert message in str(chat(api, "Hello").exception)


def test_an_error_in_the_middle_of_a_stream_is_an_error(api: Api) -> None:
    api.lines = [event(choices=[{"delta": {"content": "Bon"}}]), event(error={"message": "The engine stopped."})]
    result = chat(api, "Hello")
    assert result.stdout.startswith("Bon")
    assert "The engine stopped." in str(result.exception)


def test_a_conversation_remembers_resets_and_survives_errors(
    api: Api, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    turns = iter(["one", "", "/system Be kind.", "two", "three", "fails", "four", "/exit"])

    def typed(prompt: str) -> str:
        turn = next(turns)
        api.status = 500 if turn == "fails" else 200
        api.body = b'{"error": {"message": "Broken."}}' if turn == "fails" else b""
        return turn

    monkeypatch.setattr("builtins.input", typed)
    with Client(api.url) as client:
        Conversation(client, "small", None, Options(), plain=False).run()
    contents = [[message["content"] for message in asked["messages"]] for asked in api.asked]
    answer = "Bonjour é"
    assert contents[0] == ["one"]
    assert contents[1] == ["Be kind.", "two"]
    assert contents[2] == ["Be kind.", "two", answer, "three"]
    assert contents[4] == ["Be kind.", "two", answer, "three", answer, "four"], "the refused turn was taken back"
    assert "Broken." in capsys.readouterr().err


def test_commands_of_a_conversation(
    api: Api, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    turns = iter(["/help", "/retry", "/model", "/model huge", "one", "/model large", "/retry", "/nonsense", "/exit"])
    monkeypatch.setattr("builtins.input", lambda prompt: next(turns))
    with Client(api.url) as client:
        Conversation(client, "small", None, Options(), plain=False).run()
    told = " ".join(capsys.readouterr().err.split())
    assert "/system TEXT" in told and "/model NAME" in told
    assert "There is no question to ask again." in told
    assert "Served: small (now), large" in told and "There is no model huge." in told
    assert "There is no command /nonsense; /help lists them." in told
    assert [(asked["model"], asked["messages"]) for asked in api.asked] == [
        ("small", [{"role": "user", "content": "one"}]),
        ("large", [{"role": "user", "content": "one"}]),
    ]


def test_blocks_of_markdown_are_complete_after_an_empty_line_outside_of_code() -> None:
    code = "```py\na = 1\n\nb = 2\n```\n"
    assert complete("One line\nand another") == 0
    assert complete("One.\n\nTwo") == len("One.\n\n")
    assert complete(code) == 0
    assert complete(f"{code}\nnext") == len(code) + 1


def test_an_answer_is_formatted_wrapped_and_harmless() -> None:
    screen = io.StringIO()
    console = Console(file=screen, force_terminal=True, width=30, color_system=None)
    answer = "A **bold** claim, and a good many words more than one line.\n\n- one\n- two\n\n"
    answer += "```\nx = 1\n\ny = 2\n```\n\x1b[2J"
    with MarkdownStream(console) as shown:
        for letter in answer:
            shown.write(letter)
    said = screen.getvalue()
    assert "\x1b[2J" not in said, "a model must not clear the screen"
    assert "**" not in said and " \u2022 one" in said and "x = 1" in said


def test_thoughts_are_shown_beside_the_answer(api: Api) -> None:
    api.lines[2:2] = [
        event(choices=[{"delta": {"reasoning_content": "Let me "}}]),
        event(choices=[{"delta": {"reasoning": "see."}}]),
    ]
    usage = {**USAGE, "completion_tokens_details": {"reasoning_tokens": 4}}
    api.lines[-2] = event(choices=[], usage=usage)
    result = CliRunner().invoke(app, ["chat", "hi", "--url", api.url, "--effort", "low"])
    assert result.exit_code == 0 and result.stdout == "Bonjour é\n"
    assert "Let me see." in result.stderr and "2 out (4 of thought)" in result.stderr
    assert api.asked[-1]["reasoning_effort"] == "low"
    quiet = CliRunner().invoke(app, ["chat", "hi", "--url", api.url, "--quiet"])
    assert quiet.stdout == "Bonjour é\n" and "Let me" not in quiet.stderr
