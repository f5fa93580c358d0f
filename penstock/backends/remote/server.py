"""The client of one server that runs a model elsewhere: text in, text out, in whatever dialect it speaks.

The second kind of backend. An engine gets tokens and a request can continue on another one; here messages are sent as
they are and text comes back. Invariants: a stream ends with the server's own end or with one `ApiError`; a reader that
stops early closes the connection, which tells the server to stop.
"""

from __future__ import annotations

import asyncio
import ssl
import time
from collections.abc import AsyncGenerator, Mapping, Sequence
from functools import cache
from typing import Any, NamedTuple

import httpx

from penstock.backends.remote.chunk import Chunk, EmbeddingBatch, RerankScores, TokenCount
from penstock.backends.remote.dialect import Call, Dialect
from penstock.backends.remote.dialects import make_dialect
from penstock.backends.remote.failure import ServerOverloaded
from penstock.backends.remote.features import Feature, Fit, Operation
from penstock.backends.remote.frames import SseFrames
from penstock.backends.remote.load import ServerLoad
from penstock.backends.remote.rate_limit import RateLimits
from penstock.backends.remote.upstream import Upstream
from penstock.backends.round_trip import RoundTrip
from penstock.protocol.errors import ApiError, EngineLost, EngineUnavailable
from penstock.telemetry.context import outgoing_headers

CONNECT_S = 5.0
CHECK_S = 5.0
BYTES_PER_TOKEN = 5
"""Of a request's body, for limits on tokens until the server has counted them."""
INLINE = 32 * 1024
LARGEST = 64 * 2**20
"""Bytes of a reply that is not streamed."""
LONGEST_ERROR = 64 * 1024
"""Bytes of an error that are read."""


class Answer(NamedTuple):
    """A reply that is not streamed."""

    status_code: int
    headers: httpx.Headers
    content: bytes


async def _read(reply: httpx.Response, most: int) -> bytes:
    """The body of a reply, cut off after `most` bytes."""
    found = bytearray()
    async for part in reply.aiter_bytes():
        found += part
        if len(found) >= most:
            break
    return bytes(found[:most])


@cache
def _certificates() -> ssl.SSLContext:
    """Loaded once, because that takes a while."""
    return httpx.create_ssl_context()


class RemoteServer:
    """The client of one server."""

    def __init__(self, name: str, upstream: Upstream) -> None:
        self.name = name
        self.upstream = upstream
        self.dialect: Dialect = make_dialect(upstream)
        self.in_flight = 0
        self.load: ServerLoad | None = None
        """What it said about itself when it was last asked."""
        self.in_flight_then = 0
        """Requests in flight at that time."""
        self.limits = RateLimits()
        self._client: httpx.AsyncClient | None = None
        self._heard_at = float("-inf")
        self.round_trip = RoundTrip()

    @property
    def idle_s(self) -> float:
        """Seconds since it last sent something."""
        return time.monotonic() - self._heard_at

    def supports(self, feature: Feature) -> bool:
        return self.dialect.supports(feature)

    def fit(self, body: Mapping[str, Any], operation: Operation = "chat") -> Fit:
        return self.dialect.fit(body, operation)

    async def start(self) -> None:
        self.dialect.check()
        self._client = httpx.AsyncClient(
            verify=_certificates(),
            timeout=httpx.Timeout(self.upstream.timeout_s, connect=CONNECT_S, pool=CONNECT_S),
            limits=httpx.Limits(max_connections=None, max_keepalive_connections=64),
        )

    async def close(self) -> None:
        if self._client is not None:
            await self._client.aclose()

    async def check(self) -> None:
        """Checks its health; raises `EngineUnavailable` when it does not answer."""
        sent_at = time.monotonic()
        reply = await self._send(self.dialect.health_call(), within=CHECK_S)
        if not self.dialect.healthy(reply.status_code, reply.content):
            raise EngineUnavailable(f"The remote server of this model returned {reply.status_code}.")
        self.round_trip.measured(time.monotonic() - sent_at)

    @property
    def tells_load(self) -> bool:
        return self.dialect.load_call() is not None

    async def look(self) -> None:
        """Asks how busy it is, if it tells; a server that does not answer this is not unhealthy for that."""
        call = self.dialect.load_call()
        if call is None:
            return
        in_flight = self.in_flight
        try:
            reply = await self._send(call, within=CHECK_S)
            self.load = await self._told(reply.content) if reply.status_code == 200 else None
        except ApiError:
            self.load = None
        self.in_flight_then = in_flight

    async def _told(self, content: bytes) -> ServerLoad | None:
        """Metrics may be long; then another thread reads them."""
        if len(content) <= INLINE:
            return self.dialect.load(content)
        return await asyncio.to_thread(self.dialect.load, content)

    @property
    def requests(self) -> int:
        """Requests that it has: what it said last, and what has been sent since; else those that are sent from here."""
        told = None if self.load is None else self.load.requests
        return self.in_flight if told is None else max(told + self.in_flight - self.in_flight_then, self.in_flight)

    def wait_s(self, tokens: int = 1) -> float:
        """Seconds until its limits allow a request with so many prompt tokens."""
        return self.limits.wait_s(time.monotonic(), tokens)

    async def stream(
        self, body: Mapping[str, Any], request_id: str, operation: Operation = "chat"
    ) -> AsyncGenerator[Chunk, None]:
        """The chunks of one answer. `body`: the neutral request, as `fit` left it."""
        assert self._client is not None
        begun = False
        self.in_flight += 1
        try:
            call = self.dialect.call(operation, body)
            self.limits.sent(len(call.content or b"") // BYTES_PER_TOKEN)
            reader = self.dialect.reader(operation, body)
            headers = {**self.dialect.sign(call), **outgoing_headers(), "x-request-id": request_id}
            async with self._client.stream("POST", call.url, content=call.content, headers=headers) as reply:
                self.limits.seen(reply.headers, time.monotonic())
                if reply.status_code != 200:
                    raise self._refusal(reply, await _read(reply, LONGEST_ERROR))
                if isinstance(reader.frames, SseFrames) and "json" in reply.headers.get("content-type", ""):
                    for chunk in self.dialect.whole(operation, body, await _read(reply, LARGEST)):
                        yield chunk
                    return
                async for part in reply.aiter_bytes():
                    self._heard_at = time.monotonic()
                    for chunk in reader.push(part):
                        begun = True
                        yield chunk
                    if reader.done:
                        return
                for chunk in reader.end():
                    yield chunk
        except httpx.HTTPError as error:
            lost = EngineLost("The remote server of this model closed the connection.")
            raise (lost if begun else self._unreachable(error)) from error
        finally:
            self.in_flight -= 1

    async def embed(self, texts: Sequence[str], request_id: str, dimensions: int | None = None) -> EmbeddingBatch:
        """Vectors of texts."""
        data = await self._ask(self.dialect.embed_call(texts, dimensions), request_id)
        found = self.dialect.embeddings(data)
        if len(found.vectors) != len(texts):
            raise EngineUnavailable("The remote server of this model sent too few vectors; try again.")
        return found

    async def rerank(self, query: str, documents: Sequence[str], request_id: str) -> RerankScores:
        """Scores of documents for a query."""
        data = await self._ask(self.dialect.rerank_call(query, documents), request_id)
        return self.dialect.scores(data, len(documents))

    async def count(self, body: Mapping[str, Any], request_id: str) -> TokenCount:
        """The tokens of a `prompt` or of `messages`."""
        return self.dialect.count(await self._ask(self.dialect.count_call(body), request_id))

    async def _ask(self, call: Call, request_id: str) -> bytes:
        """The body of the reply to a call that is not streamed."""
        self.in_flight += 1
        self.limits.sent(len(call.content or b"") // BYTES_PER_TOKEN)
        try:
            reply = await self._send(call, {**outgoing_headers(), "x-request-id": request_id})
            self._heard_at = time.monotonic()
            self.limits.seen(reply.headers, self._heard_at)
            if reply.status_code != 200:
                raise self._refusal(reply, reply.content)
            return reply.content
        finally:
            self.in_flight -= 1

    async def _send(self, call: Call, headers: Mapping[str, str] | None = None, within: float | None = None) -> Answer:
        assert self._client is not None
        try:
            async with self._client.stream(
                "GET" if call.content is None else "POST",
                call.url,
                content=call.content,
                headers={**self.dialect.sign(call), **(headers or {})},
                timeout=httpx.USE_CLIENT_DEFAULT if within is None else within,
            ) as reply:
                most = LARGEST if reply.status_code == 200 else LONGEST_ERROR
                return Answer(reply.status_code, reply.headers, await _read(reply, most))
        except httpx.HTTPError as error:
            raise self._unreachable(error) from error

    def _refusal(self, reply: httpx.Response | Answer, body: bytes) -> ApiError:
        error = self.dialect.refusal(reply.status_code, reply.headers, body)
        if isinstance(error, ServerOverloaded) and error.retry_after is not None:
            self.limits.refused(error.retry_after, time.monotonic())
        return error

    def _unreachable(self, error: Exception) -> EngineUnavailable:
        why = "did not answer in time" if isinstance(error, httpx.TimeoutException) else "cannot be reached"
        return EngineUnavailable(f"The remote server of this model {why}; try again.")
