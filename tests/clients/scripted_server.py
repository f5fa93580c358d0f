"""The real gateway on a real port with a scripted engine behind it, in this process, and a record of what arrived.

The engine says what `script` returns for a `Prompt`: the conversation as the chat template wrote it for the model,
taken apart again. Its tokenizer has one token per byte, and its context is long, so the prompt of a coding agent fits.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
import tempfile
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from penstock.engine.request import Request
from penstock.gateway.app.asgi import App
from penstock.gateway.app.exchange import Receive, Send
from penstock.gateway.http.connections import Application
from penstock.gateway.http.request import Message, Scope
from penstock.gateway.process.main import serve
from penstock.gateway.process.settings import GatewaySettings, ModelSettings
from penstock.routing.registry import ModelRegistry, ServedModel
from penstock.testing.in_process_backend import InProcessBackend
from penstock.text import TextModel
from tests.ports import free_port
from tests.scripted import ScriptedEngine, make_text

MODEL = "scripted"
CONTEXT = 1 << 20
_TURN = re.compile(r"<\|(system|user|assistant)\|>(.*?)(?:<\|end\|>|\Z)", re.S)


@dataclass(frozen=True, slots=True)
class Prompt:
    """What the model is asked: the messages as it sees them. Results of tools are user messages."""

    text: str
    request: Request

    @property
    def messages(self) -> list[tuple[str, str]]:
        """Role and text of each message; the answer to be written is not among them."""
        return [(role, text) for role, text in _TURN.findall(self.text.removesuffix("<|assistant|>"))]

    @property
    def system(self) -> str:
        return "\n".join(text for role, text in self.messages if role == "system")

    @property
    def last(self) -> str:
        """The last message, whoever wrote it."""
        return self.messages[-1][1] if self.messages else self.text

    @property
    def results(self) -> list[str]:
        """What tools answered so far."""
        return re.findall(r"<tool_response>\n(.*?)\n</tool_response>", self.text, re.S)

    @property
    def tools(self) -> dict[str, dict[str, Any]]:
        """The functions on offer, by name."""
        found = re.search(r"<tools>\n(.*?)\n</tools>", self.text, re.S)
        listed = [json.loads(line) for line in found[1].splitlines()] if found else []
        return {tool["name"]: tool for tool in listed}


def call(name: str, /, **arguments: Any) -> str:
    """What the model writes to call a function."""
    return calls((name, arguments))


def calls(*wanted: tuple[str, dict[str, Any]]) -> str:
    """What the model writes to call several functions at once."""
    bodies = [{"name": name, "arguments": arguments} for name, arguments in wanted]
    return f"<tool_call>{json.dumps(bodies, ensure_ascii=False)}</tool_call>"


@dataclass(slots=True)
class Arrived:
    """One HTTP request and how it was answered."""

    method: str
    path: str
    query: str
    headers: dict[str, str]
    raw: bytes = b""
    status: int = 0
    reply_headers: dict[str, str] = field(default_factory=dict)
    reply: bytes = b""

    @property
    def body(self) -> Any:
        return json.loads(self.raw) if self.raw else None

    @property
    def ignored(self) -> list[str]:
        """Parameters that the server says it ignored."""
        return [name.strip() for name in self.reply_headers.get("x-penstock-ignored", "").split(",") if name.strip()]


Script = Callable[[Prompt], str]


class ScriptedServer:
    """`answer` sets what the engine says from now on and forgets what had arrived."""

    model = MODEL

    def __init__(self, url: str, text: TextModel, tokenizer: Tokenizer) -> None:
        self.url = url
        """Without `/v1`."""
        self.arrived: list[Arrived] = []
        self.text = text
        self._tokenizer = tokenizer
        self.engine = ScriptedEngine(text, self._say, max_model_len=CONTEXT)
        self._script: Script = lambda prompt: "Hello, world!"

    @property
    def openai(self) -> str:
        return f"{self.url}/v1"

    def answer(self, script: Script | str) -> None:
        self._script = (lambda prompt: script) if isinstance(script, str) else script
        self.arrived.clear()
        self.engine.seen.clear()

    def posted(self, path: str) -> list[Arrived]:
        return [one for one in self.arrived if one.method == "POST" and one.path == path]

    def failures(self) -> list[str]:
        """What was refused or failed, in words, for the message of a failed test."""
        return [
            f"{one.method} {one.path} {one.status} {one.reply[:300]!r}" for one in self.arrived if one.status >= 400
        ]

    def _say(self, request: Request) -> list[int]:
        written = self._tokenizer.decode(request.prompt, skip_special_tokens=False)
        try:
            said = self._script(Prompt(written, request))
        except Exception as error:  # it must not end the engine's thread, and the test must see it
            said = f"the script failed: {error!r}"
        return [*self.text.encode(said), self.text.eos_token_ids[0]]

    def recorded(self, app: Application) -> Application:
        async def record(scope: Scope, receive: Receive, send: Send) -> None:
            headers = {key.decode().lower(): value.decode("latin-1") for key, value in scope["headers"]}
            one = Arrived(scope["method"], scope["path"], scope["query_string"].decode(), headers)
            self.arrived.append(one)

            async def receive_recorded() -> Message:
                message = await receive()
                one.raw += message.get("body", b"")
                return message

            async def send_recorded(message: Message) -> None:
                if message["type"] == "http.response.start":
                    one.status = message["status"]
                    one.reply_headers = {key.decode().lower(): value.decode() for key, value in message["headers"]}
                one.reply += message.get("body", b"")
                await send(message)

            await app(scope, receive_recorded, send_recorded)

        return record


@contextlib.contextmanager
def scripted_server(*, aliases: tuple[str, ...] = (), **settings: Any) -> Iterator[ScriptedServer]:
    """It runs on a thread of its own until the end of the block. `aliases`: more names of the model. `settings`: more
    of `GatewaySettings`."""
    with tempfile.TemporaryDirectory(prefix="penstock-scripted-") as folder:
        text = make_text(Path(folder), context_length=CONTEXT)
        port = free_port()
        tokenizer = Tokenizer.from_file(f"{folder}/tokenizer.json")
        server = ScriptedServer(f"http://127.0.0.1:{port}", text, tokenizer)
        options: dict[str, Any] = {"drain_s": 0.2, "models": (ModelSettings(MODEL, ""),), "time_limit_s": None}
        gateway = GatewaySettings(port=port, **{**options, **settings})
        up, failed = threading.Event(), []
        stop: list[Callable[[], None]] = []

        async def main() -> None:
            end = asyncio.Event()
            loop = asyncio.get_running_loop()
            stop.append(lambda: loop.call_soon_threadsafe(end.set))
            registry = ModelRegistry([ServedModel(MODEL, text, InProcessBackend(server.engine), aliases=aliases)], ())

            def wrap(app: App) -> Application:
                return server.recorded(app)

            await serve(gateway, registry, end, lambda _: up.set(), wrap=wrap)

        def run() -> None:
            try:
                asyncio.run(main())
            except BaseException as error:
                failed.append(error)
            finally:
                up.set()

        thread = threading.Thread(target=run, name="scripted server", daemon=True)
        thread.start()
        up.wait(60)
        if failed:
            raise failed[0]
        try:
            yield server
        finally:
            stop[0]()
            thread.join(30)
