"""The client of `penstock chat`: one streamed request per turn, with the latencies a user sees.

It uses only the OpenAI-compatible HTTP API, so it works with any such server.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import TracebackType
from typing import Any, TypeAlias

import httpx
import msgspec

from penstock.cli.admin import server_url
from penstock.errors import PenstockError

Message: TypeAlias = dict[str, str]
Think: TypeAlias = Callable[[str], None]


class ChatError(PenstockError):
    """The server could not be reached, or refused the request."""


@dataclass(frozen=True, slots=True)
class Options:
    """Optional request fields."""

    temperature: float | None = None
    top_p: float | None = None
    max_tokens: int | None = None
    seed: int | None = None
    reasoning_effort: str | None = None

    def fields(self) -> dict[str, Any]:
        named = {name: getattr(self, name) for name in self.__slots__}
        return {name: value for name, value in named.items() if value is not None}


@dataclass(slots=True)
class Answer:
    """One answer and its timings."""

    text: str = ""
    thought: str = ""
    """What the model thought before it answered."""
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
            thought = (usage.get("completion_tokens_details") or {}).get("reasoning_tokens") or 0
            of_thought = f" ({thought} of thought)" if thought else ""
            parts.append(f"{usage.get('prompt_tokens', 0)} in ({cached} cached), {tokens} out{of_thought}")
        if self.finish_reason not in (None, "stop"):
            parts.append(f"ended by {self.finish_reason}")
        return " · ".join(parts)


class Client:
    """A connection to a server. Errors are raised as `ChatError`, with a remedy."""

    def __init__(self, url: str, key: str | None = None) -> None:
        self._url = server_url(url)
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

    def models(self) -> list[str]:
        """The models of the server; the first is its default."""
        try:
            reply = self._http.get("/v1/models", timeout=10.0)
        except httpx.HTTPError as error:
            raise self._unreachable(error) from error
        if reply.status_code != 200:
            raise ChatError(_refusal(reply.status_code, reply.content))
        try:
            found = [str(entry["id"]) for entry in msgspec.json.decode(reply.content)["data"]]
            if not found:
                raise ChatError(f"{self._url} serves no model")
            return found
        except (msgspec.MsgspecError, LookupError, TypeError) as error:
            raise ChatError(
                f"{self._url} is not an OpenAI-compatible server: its /v1/models is not readable"
            ) from error

    def stream(
        self, model: str, messages: list[Message], options: Options, answer: Answer, think: Think | None = None
    ) -> Iterator[str]:
        """Yields pieces of the answer as they arrive; `answer` is complete when this ends. `think` is told what the
        model thinks before it answers."""
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
                    thought, piece = _take(line, answer)
                    if thought or piece:
                        now = time.perf_counter()
                        answer.first_s = answer.first_s if answer.first_s is not None else now - begin
                        answer.total_s = now - begin
                    if thought:
                        answer.thought += thought
                        if think is not None:
                            think(thought)
                    if piece:
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


def _take(line: str, answer: Answer) -> tuple[str, str]:
    """What one SSE line adds to the thought and to the answer."""
    if not line.startswith("data:") or (data := line[5:].strip()) == "[DONE]":
        return "", ""
    try:
        chunk = msgspec.json.decode(data)
    except msgspec.MsgspecError as error:
        raise ChatError(f"the server sent invalid JSON: {data[:80]}") from error
    if "error" in chunk:
        raise ChatError(str((chunk["error"] or {}).get("message", chunk["error"])))
    if chunk.get("usage"):
        answer.usage = chunk["usage"]
    thought = piece = ""
    for choice in chunk.get("choices") or []:
        delta = choice.get("delta") or {}
        thought += delta.get("reasoning_content") or delta.get("reasoning") or ""
        piece += delta.get("content") or ""
        answer.finish_reason = choice.get("finish_reason") or answer.finish_reason
    return thought, piece


def _refusal(status: int, body: bytes) -> str:
    try:
        return f"{msgspec.json.decode(body)['error']['message']} (HTTP {status})"
    except (msgspec.MsgspecError, LookupError, TypeError):
        return f"the server returned HTTP {status}: {body[:200].decode(errors='replace')}"
