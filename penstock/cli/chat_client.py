"""The client of `penstock chat`: one streamed request per turn, with the latencies a user sees.

It uses only the OpenAI-compatible HTTP API, so it works with any such server.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from types import TracebackType
from typing import Any, TypeAlias

import httpx
import msgspec

from penstock.cli.terminal import show_error, stderr
from penstock.errors import PenstockError
from penstock.telemetry.printable import printable

Message: TypeAlias = dict[str, str]


class ChatError(PenstockError):
    """The server could not be reached, or refused the request."""


@dataclass(frozen=True, slots=True)
class Options:
    """Optional request fields."""

    temperature: float | None = None
    top_p: float | None = None
    max_tokens: int | None = None
    seed: int | None = None

    def fields(self) -> dict[str, Any]:
        named = {name: getattr(self, name) for name in self.__slots__}
        return {name: value for name, value in named.items() if value is not None}


@dataclass(slots=True)
class Answer:
    """One answer and its timings."""

    text: str = ""
    first_s: float | None = None
    total_s: float = 0.0
    usage: dict[str, Any] | None = None
    finish_reason: str | None = None

    def summary(self) -> str:
        usage = self.usage or {}
        tokens = usage.get("completion_tokens") or 0
        parts = [f"first token {self.first_s * 1000:.0f} ms"] if self.first_s is not None else []
        decode_s = self.total_s - (self.first_s or 0.0)
        if tokens > 1 and decode_s > 0:
            parts.append(f"{(tokens - 1) / decode_s:.1f} tokens/s")
        if usage:
            cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0
            parts.append(f"{usage.get('prompt_tokens', 0)} in ({cached} cached), {tokens} out")
        if self.finish_reason not in (None, "stop"):
            parts.append(f"ended by {self.finish_reason}")
        return " · ".join(parts)


class Client:
    """A connection to a server. Errors are raised as `ChatError`, with a remedy."""

    def __init__(self, url: str, key: str | None = None) -> None:
        self._url = url.rstrip("/").removesuffix("/v1")
        headers = {"authorization": f"Bearer {key}"} if key else {}
        # No read timeout: the server sends keep-alive comments while it works and enforces its own limits.
        timeout = httpx.Timeout(10.0, read=None)
        try:
            self._http = httpx.Client(base_url=self._url, headers=headers, timeout=timeout)
        except (httpx.InvalidURL, ValueError) as error:
            raise ChatError(f"{url} is not an address: {error}") from error

    def __enter__(self) -> Client:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._http.close()

    def default_model(self) -> str:
        try:
            reply = self._http.get("/v1/models", timeout=10.0)
        except httpx.HTTPError as error:
            raise self._unreachable(error) from error
        if reply.status_code != 200:
            raise ChatError(_refusal(reply.status_code, reply.content))
        try:
            return str(msgspec.json.decode(reply.content)["data"][0]["id"])
        except (msgspec.MsgspecError, LookupError, TypeError) as error:
            raise ChatError(
                f"{self._url} is not an OpenAI-compatible server: its /v1/models is not readable"
            ) from error

    def stream(self, model: str, messages: list[Message], options: Options, answer: Answer) -> Iterator[str]:
        """Yields pieces of the answer as they arrive; `answer` is complete when this ends."""
        body = {
            "model": model,
            "messages": messages,
            "stream": True,
            "stream_options": {"include_usage": True},
            **options.fields(),
        }
        begin = time.perf_counter()
        try:
            with self._http.stream("POST", "/v1/chat/completions", json=body) as reply:
                if reply.status_code != 200:
                    raise ChatError(_refusal(reply.status_code, reply.read()))
                for line in reply.iter_lines():
                    piece = _take(line, answer)
                    if piece:
                        now = time.perf_counter()
                        answer.first_s = answer.first_s if answer.first_s is not None else now - begin
                        answer.total_s = now - begin
                        answer.text += piece
                        yield piece
        except httpx.HTTPError as error:
            if answer.text:
                raise ChatError(f"the connection was lost in the middle of the answer ({error})") from error
            raise self._unreachable(error) from error

    def _unreachable(self, error: httpx.HTTPError) -> ChatError:
        if isinstance(error, httpx.ConnectError | httpx.ConnectTimeout | httpx.UnsupportedProtocol):
            return ChatError(
                f"no server at {self._url}; start one with `penstock serve`, or give its address with --url"
            )
        return ChatError(f"{self._url}: {type(error).__name__}: {error}")


def _take(line: str, answer: Answer) -> str:
    """The text that one SSE line adds to the answer."""
    if not line.startswith("data:") or (data := line[5:].strip()) == "[DONE]":
        return ""
    try:
        chunk = msgspec.json.decode(data)
    except msgspec.MsgspecError as error:
        raise ChatError(f"the server sent invalid JSON: {data[:80]}") from error
    if "error" in chunk:
        raise ChatError(str((chunk["error"] or {}).get("message", chunk["error"])))
    if chunk.get("usage"):
        answer.usage = chunk["usage"]
    piece = ""
    for choice in chunk.get("choices") or []:
        piece += (choice.get("delta") or {}).get("content") or ""
        answer.finish_reason = choice.get("finish_reason") or answer.finish_reason
    return piece


def _refusal(status: int, body: bytes) -> str:
    try:
        return f"{msgspec.json.decode(body)['error']['message']} (HTTP {status})"
    except (msgspec.MsgspecError, LookupError, TypeError):
        return f"the server returned HTTP {status}: {body[:200].decode(errors='replace')}"


def one_shot(client: Client, model: str, system: str | None, options: Options, message: str, *, quiet: bool) -> None:
    answer = Answer()
    for piece in client.stream(model, _opening(system) + [{"role": "user", "content": message}], options, answer):
        _write(piece)
    sys.stdout.write("\n")
    if not quiet:
        stderr().print(answer.summary(), style="dim", markup=False)


def converse(client: Client, model: str, system: str | None, options: Options) -> None:
    """The interactive loop. A refused turn is removed, so that the conversation can continue."""
    import readline  # noqa: F401  (line editing and history for input())

    console = stderr()
    help = f"Chat with {model}. /reset starts over, /system TEXT sets the system prompt, /exit quits."
    console.print(help, style="dim", markup=False)
    messages = _opening(system)
    while True:
        try:
            text = input("\n› ").strip()
        except (EOFError, KeyboardInterrupt):
            print()
            return
        if not text:
            continue
        if text in ("/exit", "/quit"):
            return
        if text == "/reset" or text.startswith("/system"):
            system = text.removeprefix("/system").strip() or None if text != "/reset" else system
            messages = _opening(system)
            console.print("started over", style="dim")
            continue
        messages.append({"role": "user", "content": text})
        answer = Answer()
        try:
            for piece in client.stream(model, messages, options, answer):
                _write(piece)
            print()
            console.print(answer.summary(), style="dim", markup=False)
        except KeyboardInterrupt:
            print(" [stopped]")
        except ChatError as error:
            print()
            show_error(str(error))
        if answer.text:
            messages.append({"role": "assistant", "content": answer.text})
        else:
            messages.pop()


def _write(piece: str) -> None:
    """Shows a piece of an answer. On a terminal a model must not send control characters."""
    sys.stdout.write(printable(piece, keep="\n\t") if sys.stdout.isatty() else piece)
    sys.stdout.flush()


def _opening(system: str | None) -> list[Message]:
    return [{"role": "system", "content": system}] if system else []
