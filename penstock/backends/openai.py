"""The client of a remote server with an OpenAI-compatible chat API: text in, text out.

The second kind of backend. An engine gets tokens and a request can continue on another one; here messages are sent as
they are and text comes back. Invariant: a stream ends with the server's own end or with one `ApiError`; a reader that
stops early closes the connection, which tells the server to stop.
"""

from __future__ import annotations

import os
import time
from collections.abc import AsyncGenerator, AsyncIterator
from dataclasses import dataclass
from typing import Any

import httpx
import msgspec

from penstock.backends.round_trip import RoundTrip
from penstock.errors import ConfigError
from penstock.protocol.errors import ApiError, EngineLost, EngineUnavailable, InvalidRequest, Overloaded
from penstock.telemetry.context import outgoing_headers

CONNECT_S = 5.0
CHECK_S = 5.0
LONGEST_LINE = 8 * 2**20
_JSON = {"content-type": "application/json", "accept": "text/event-stream"}


class FunctionDelta(msgspec.Struct):
    name: str | None = None
    arguments: str | None = None


class CallDelta(msgspec.Struct):
    index: int = 0
    id: str | None = None
    function: FunctionDelta | None = None


class ChunkDelta(msgspec.Struct):
    content: str | None = None
    tool_calls: list[CallDelta] | None = None


class TokenOdds(msgspec.Struct):
    token: str = ""
    logprob: float = 0.0
    top_logprobs: list[TokenOdds] = msgspec.field(default_factory=list)


class ChunkLogprobs(msgspec.Struct):
    content: list[TokenOdds] | None = None


class ChunkChoice(msgspec.Struct):
    index: int = 0
    delta: ChunkDelta = msgspec.field(default_factory=ChunkDelta)
    logprobs: ChunkLogprobs | None = None
    finish_reason: str | None = None


class PromptDetails(msgspec.Struct):
    cached_tokens: int | None = None


class ChunkUsage(msgspec.Struct):
    prompt_tokens: int = 0
    completion_tokens: int = 0
    prompt_tokens_details: PromptDetails | None = None


class Chunk(msgspec.Struct):
    """One event of a stream; only the fields used here."""

    choices: list[ChunkChoice] = msgspec.field(default_factory=list)
    usage: ChunkUsage | None = None
    error: Any = None


_chunk = msgspec.json.Decoder(Chunk)
_encode = msgspec.json.Encoder().encode


@dataclass(frozen=True, slots=True)
class Upstream:
    """Address and credentials of a server."""

    url: str
    """Including `/v1`."""
    model: str
    """Name of the model on the server."""
    key_env: str = ""
    """Environment variable with its key; empty: no key."""
    timeout_s: float = 60.0
    """Maximum silence."""

    def headers(self) -> dict[str, str]:
        return _JSON | authorization(self.key_env, self.url)


def authorization(key_env: str, url: str) -> dict[str, str]:
    """The authorization header for `url`; empty if no key is needed."""
    if not key_env:
        return {}
    key = os.environ.get(key_env)
    if not key:
        raise ConfigError(f"the environment variable {key_env} (key_env of {url}) is not set")
    return {"authorization": f"Bearer {key}"}


class OpenAIServer:
    """The client of one server."""

    def __init__(self, name: str, upstream: Upstream) -> None:
        self.name = name
        self.upstream = upstream
        self.in_flight = 0
        self._client: httpx.AsyncClient | None = None
        self._heard_at = float("-inf")
        self.round_trip = RoundTrip()

    @property
    def idle_s(self) -> float:
        """Seconds since it last sent something."""
        return time.monotonic() - self._heard_at

    async def start(self) -> None:
        self._client = httpx.AsyncClient(
            base_url=self.upstream.url.rstrip("/"),
            headers=self.upstream.headers(),
            timeout=httpx.Timeout(self.upstream.timeout_s, connect=CONNECT_S, pool=CONNECT_S),
            limits=httpx.Limits(max_connections=None, max_keepalive_connections=64),
        )

    async def close(self) -> None:
        if self._client is not None:
            await self._client.aclose()

    async def check(self) -> None:
        """Checks its health; raises `EngineUnavailable` when it does not answer."""
        assert self._client is not None
        sent_at = time.monotonic()
        try:
            reply = await self._client.get("/models", timeout=CHECK_S)
        except httpx.HTTPError as error:
            raise self._unreachable(error) from error
        if reply.status_code >= 500:
            raise EngineUnavailable(f"The remote server of this model returned {reply.status_code}.")
        self.round_trip.measured(time.monotonic() - sent_at)

    async def stream(self, body: dict[str, Any], request_id: str) -> AsyncGenerator[Chunk, None]:
        """The events of one answer."""
        assert self._client is not None
        begun = False
        self.in_flight += 1
        try:
            sent = _encode({**body, "model": self.upstream.model})
            headers = {**outgoing_headers(), "x-request-id": request_id}
            async with self._client.stream("POST", "/chat/completions", content=sent, headers=headers) as reply:
                if reply.status_code != 200:
                    raise _refusal(reply.status_code, await reply.aread(), reply.headers.get("retry-after"))
                async for data in _events(reply):
                    self._heard_at = time.monotonic()
                    if data == b"[DONE]":
                        return
                    begun = True
                    yield _read(data)
        except httpx.HTTPError as error:
            lost = EngineLost("The remote server of this model closed the connection.")
            raise (lost if begun else self._unreachable(error)) from error
        finally:
            self.in_flight -= 1

    def _unreachable(self, error: Exception) -> EngineUnavailable:
        why = "did not answer in time" if isinstance(error, httpx.TimeoutException) else "cannot be reached"
        return EngineUnavailable(f"The remote server of this model {why}; try again.")


async def _events(reply: httpx.Response) -> AsyncIterator[bytes]:
    """The data of each event."""
    rest = b""
    async for part in reply.aiter_bytes():
        *lines, rest = (rest + part).split(b"\n")
        if len(rest) > LONGEST_LINE:
            raise EngineLost("The remote server of this model sent an endless line.")
        for line in lines:
            if line.startswith(b"data:"):
                yield line[5:].strip()
    if rest.startswith(b"data:"):
        yield rest[5:].strip()


def _read(data: bytes) -> Chunk:
    try:
        chunk = _chunk.decode(data)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise EngineLost("The remote server of this model sent an invalid chunk.") from error
    if chunk.error is not None:
        raise EngineLost("The remote server of this model failed on this request; try again.")
    return chunk


def _refusal(status: int, body: bytes, retry_after: str | None) -> ApiError:
    """The error for the client. Mistakes in the request keep the server's message; problems between us and the
    server, such as a wrong key or model name, are not shown to clients."""
    if status in (400, 413, 422):
        return InvalidRequest(_message(body) or f"The remote server of this model refused the request ({status}).")
    if status == 429:
        wait = float(retry_after) if retry_after is not None and retry_after.isdigit() else 2.0
        return Overloaded("The remote server of this model is overloaded; try again shortly.", retry_after=wait)
    return EngineUnavailable(f"The remote server of this model returned {status}; try again.")


def _message(body: bytes) -> str | None:
    try:
        found = msgspec.json.decode(body)["error"]["message"]
    except (msgspec.MsgspecError, KeyError, TypeError):
        return None
    return found[:2048] if isinstance(found, str) else None
