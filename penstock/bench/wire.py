"""A streaming HTTP/1.1 POST for load generation: one kept-alive connection, server-sent events out.

A load generator shares the machine with what it measures, so it must cost little per event: this reads whole
chunks off an asyncio stream and splits events itself, several times cheaper than a general client. It is no
general client: no redirects, no compression (none is offered), no HTTP/2.
"""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass
from urllib.parse import urlsplit

from penstock.errors import ConfigError, PenstockError

_LINE_LIMIT = 1 << 20


class WireError(PenstockError):
    """The connection failed or the reply is not HTTP."""


class ConnectError(WireError):
    """There is no connection to the server."""


class StatusError(WireError):
    """The server answered with something other than 200."""

    def __init__(self, status: int, body: bytes, headers: Mapping[bytes, bytes] | None = None) -> None:
        super().__init__(f"HTTP {status}: {body[:300].decode(errors='replace')}")
        self.status = status
        self.body = body
        self.headers = headers or {}


@dataclass(frozen=True, slots=True)
class Target:
    """Where the server is, taken from a URL such as http://127.0.0.1:8000 (a trailing /v1 is fine)."""

    host: str
    port: int
    tls: bool
    prefix: str
    api_key: str | None = None
    headers: tuple[tuple[str, str], ...] = ()
    """Sent with every request."""

    @classmethod
    def parse(cls, url: str, api_key: str | None = None) -> Target:
        parts = urlsplit(url if "://" in url else f"http://{url}")
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ConfigError(f"{url!r} is not a server's URL; it should look like http://127.0.0.1:8000")
        tls = parts.scheme == "https"
        prefix = parts.path.rstrip("/").removesuffix("/v1")
        return cls(parts.hostname, parts.port or (443 if tls else 80), tls, prefix, api_key)

    def head(self, method: str, path: str, length: int, content_type: str = "application/json") -> bytes:
        lines = [
            f"{method} {self.prefix}{path} HTTP/1.1",
            f"Host: {self.host}:{self.port}",
            f"Content-Type: {content_type}",
            f"Content-Length: {length}",
        ]
        if self.api_key:
            lines.append(f"Authorization: Bearer {self.api_key}")
        lines.extend(f"{name}: {value}" for name, value in self.headers)
        return ("\r\n".join(lines) + "\r\n\r\n").encode()


class Connection:
    """One kept-alive connection; opened on first use and again after the server closed it."""

    def __init__(self, target: Target) -> None:
        self.target = target
        self._reader: asyncio.StreamReader | None = None
        self._writer: asyncio.StreamWriter | None = None

    async def close(self) -> None:
        writer, self._reader, self._writer = self._writer, None, None
        if writer is not None:
            writer.close()
            try:
                await writer.wait_closed()
            except OSError:
                # The peer closed first; there is nothing left to close.
                return

    async def _send(self, data: bytes) -> asyncio.StreamReader:
        if self._reader is None or self._writer is None or self._reader.at_eof():
            await self.close()
            context = ssl.create_default_context() if self.target.tls else None
            self._reader, self._writer = await asyncio.open_connection(
                self.target.host, self.target.port, ssl=context, limit=_LINE_LIMIT
            )
        self._writer.write(data)
        await self._writer.drain()
        return self._reader

    async def request(self, method: str, path: str, body: bytes = b"", content_type: str = "application/json") -> bytes:
        """The whole body of a 200 reply."""
        return b"".join([part async for part in self._exchange(method, path, body, content_type)])

    async def events(self, path: str, body: bytes) -> AsyncIterator[bytes]:
        """The payload of each `data:` line, as it arrives."""
        pending = b""
        async for part in self._exchange("POST", path, body):
            *lines, pending = (pending + part).split(b"\n")
            for line in lines:
                if line.startswith(b"data:"):
                    yield line[5:].strip()

    async def _exchange(
        self, method: str, path: str, body: bytes, content_type: str = "application/json"
    ) -> AsyncIterator[bytes]:
        finished = False
        try:
            reader = await self._send(self.target.head(method, path, len(body), content_type) + body)
            status, headers = await _read_head(reader)
            if status != 200:
                raise StatusError(status, b"".join([part async for part in _read_body(reader, headers)]), headers)
            async for part in _read_body(reader, headers):
                yield part
            finished = headers.get(b"connection", b"").lower() != b"close"
        except (OSError, EOFError, asyncio.IncompleteReadError, ValueError) as error:
            where = f"{self.target.host}:{self.target.port}"
            if isinstance(error, OSError) and self._writer is None:
                raise ConnectError(f"no connection to {where} ({error.strerror or error})") from error
            raise WireError(f"connection to {where} failed: {error!r}") from error
        finally:
            # A connection left in the middle of a reply cannot carry another request.
            if not finished:
                await self.close()


async def _read_head(reader: asyncio.StreamReader) -> tuple[int, dict[bytes, bytes]]:
    block = await reader.readuntil(b"\r\n\r\n")
    first, *lines = block[:-4].split(b"\r\n")
    version, status, *_ = first.split(b" ", 2)
    if not version.startswith(b"HTTP/1."):
        raise ValueError(f"not an HTTP reply: {first[:80]!r}")
    headers = {}
    for line in lines:
        name, _, value = line.partition(b":")
        headers[name.strip().lower()] = value.strip()
    return int(status), headers


async def _read_body(reader: asyncio.StreamReader, headers: dict[bytes, bytes]) -> AsyncIterator[bytes]:
    if headers.get(b"transfer-encoding", b"").lower() == b"chunked":
        async for part in _read_chunks(reader):
            yield part
    elif b"content-length" in headers:
        yield await reader.readexactly(int(headers[b"content-length"]))
    else:
        while part := await reader.read(1 << 16):
            yield part


async def _read_chunks(reader: asyncio.StreamReader) -> AsyncIterator[bytes]:
    """The parts of a chunked body. Waits once for each arrival, not once for each line and part of it."""
    data = b""
    while True:
        at = 0
        while (line := data.find(b"\r\n", at)) >= 0:
            size = int(data[at:line].split(b";", 1)[0], 16)
            begin, end = line + 2, line + 2 + size
            if size == 0 and data.find(b"\r\n\r\n", line) >= 0:  # behind trailers, if there are any
                return
            if size == 0 or len(data) < end + 2:
                break
            yield data[begin:end]
            at = end + 2
        arrived = await reader.read(1 << 16)
        if not arrived:
            raise asyncio.IncompleteReadError(data[at:], None)
        data = data[at:] + arrived
