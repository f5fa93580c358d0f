"""Functions of an MCP server: a child process over stdio, or a server at a URL.

One task owns the connection, which is opened on first use and kept. When it fails, pending calls fail, and the next
call opens a new one, at most once in `RETRY_S`.
"""

from __future__ import annotations

import asyncio
import importlib.util
import json
import logging
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Any

from penstock.errors import ConfigError, needs_extra
from penstock.tools.execution.addresses import Addresses, trusted
from penstock.tools.execution.base import Function, Outcome, ToolError, ToolServer, clipped

log = logging.getLogger(__name__)

START_S = 30.0
"""Time limit for starting a server and listing its functions."""
FRESH_S = 60.0
"""How long its list of functions is cached."""
RETRY_S = 2.0
_PAGES = 16
_FRAMING = 16
"""Maximum HTTP bytes per byte of a result: JSON escapes, events and other messages add overhead."""

Connect = Callable[[], AbstractAsyncContextManager[Any]]


class McpTools(ToolServer):
    """See `ToolServer`."""

    def __init__(self, name: str, connect: Connect, *, timeout_s: float, most_bytes: int) -> None:
        self._name = name
        self._connect = connect
        self._timeout_s = timeout_s
        self._most_bytes = most_bytes
        self._task: asyncio.Task[None] | None = None
        self._client: asyncio.Future[Any] | None = None
        self._opened_at = float("-inf")
        self._listed: tuple[Function, ...] = ()
        self._listed_at = float("-inf")

    async def functions(self) -> tuple[Function, ...]:
        if time.monotonic() - self._listed_at > FRESH_S or self._task is None or self._task.done():
            client = await self._open()
            try:
                async with asyncio.timeout(START_S):
                    self._listed = await _list(client)
            except Exception as error:
                raise ToolError(f"the MCP server {self._name} does not list its functions: {_why(error)}") from error
            self._listed_at = time.monotonic()
        return self._listed

    async def call(self, function: str, arguments: dict[str, Any]) -> Outcome:
        from mcp import MCPError
        from mcp_types import CONNECTION_CLOSED

        client = await self._open()
        try:
            async with asyncio.timeout(self._timeout_s):
                result = await client.call_tool(function, arguments)
        except TimeoutError:
            return Outcome(f"Error: no answer within {self._timeout_s:g} s.", ok=False)
        except MCPError as error:
            if error.error.code == CONNECTION_CLOSED:
                self._drop()
            return Outcome(clipped(f"Error: {error}", self._most_bytes), ok=False)
        except Exception as error:
            self._drop()
            raise ToolError(f"the MCP server {self._name} closed the connection: {_why(error)}") from error
        return Outcome(clipped(_text(result), self._most_bytes), ok=not result.is_error)

    async def close(self) -> None:
        task = self._task
        self._drop()
        if task is not None:
            await asyncio.gather(task, return_exceptions=True)

    async def _open(self) -> Any:
        if self._task is None or self._task.done():
            if time.monotonic() - self._opened_at < RETRY_S:
                raise ToolError(f"the MCP server {self._name} is not available")
            self._opened_at = time.monotonic()
            self._client = asyncio.get_running_loop().create_future()
            self._task = asyncio.create_task(self._own(self._client), name=f"MCP server {self._name}")
        assert self._client is not None
        try:
            async with asyncio.timeout(START_S):
                return await asyncio.shield(self._client)
        except TimeoutError:
            self._drop()
            raise ToolError(f"the MCP server {self._name} did not start within {START_S:g} s") from None

    async def _own(self, ready: asyncio.Future[Any]) -> None:
        """Holds the connection; it must be closed by the task that opened it."""
        try:
            await asyncio.to_thread(importlib.import_module, "mcp")
            async with self._connect() as client:
                ready.set_result(client)
                await asyncio.Event().wait()
        except asyncio.CancelledError:
            if not ready.done():
                ready.set_exception(ToolError(f"the MCP server {self._name} was stopped"))
            raise
        except Exception as error:
            log.warning("MCP server cannot be used", extra={"server": self._name, "why": _why(error)})
            if not ready.done():
                ready.set_exception(ToolError(f"the MCP server {self._name} cannot be used: {_why(error)}"))
        finally:
            if ready.done() and not ready.cancelled():
                ready.exception()  # the waiting call may have been cancelled

    def _drop(self) -> None:
        if self._task is not None:
            self._task.cancel()
            self._task = None


def stdio(command: Sequence[str], env: Mapping[str, str]) -> Connect:
    """A server in a child process, with a minimal environment and `env`."""
    _check_library()

    def connect() -> AbstractAsyncContextManager[Any]:
        import mcp

        return mcp.Client(mcp.StdioServerParameters(command=command[0], args=list(command[1:]), env=dict(env)))

    return connect


def streamable_http(
    url: str, headers: Mapping[str, str], addresses: Addresses, *, timeout_s: float, most_bytes: int
) -> Connect:
    """A server at a URL with a checked address. Replies are bounded and not compressed, because compression hides
    their size."""
    _check_library()

    @asynccontextmanager
    async def connect() -> Any:
        import httpx2
        import mcp
        from mcp.client.streamable_http import streamable_http_client

        class Bounded(httpx2.AsyncByteStream):
            def __init__(self, stream: Any) -> None:
                self._stream = stream

            async def __aiter__(self) -> AsyncIterator[bytes]:
                left = _FRAMING * most_bytes
                async for part in self._stream:
                    left -= len(part)
                    if left < 0:
                        raise httpx2.ReadError(f"the server sent more than {_FRAMING * most_bytes:,} bytes")
                    yield part

            async def aclose(self) -> None:
                await self._stream.aclose()

        class Pinned(httpx2.AsyncBaseTransport):
            """As `PinnedTransport`, for the library that MCP uses."""

            def __init__(self) -> None:
                self._inner = httpx2.AsyncHTTPTransport(verify=trusted(), trust_env=False)

            async def handle_async_request(self, request: httpx2.Request) -> httpx2.Response:
                await addresses.pin(request)
                response = await self._inner.handle_async_request(request)
                if response.headers.get("content-encoding", "identity") != "identity":
                    await response.aclose()
                    raise httpx2.DecodingError("the server sent a compressed reply, which was not requested")
                if request.method == "POST":
                    response.stream = Bounded(response.stream)
                return response

            async def aclose(self) -> None:
                await self._inner.aclose()

        asked = {"accept-encoding": "identity", **headers}
        client = httpx2.AsyncClient(transport=Pinned(), headers=asked, timeout=timeout_s, trust_env=False)
        async with client, mcp.Client(streamable_http_client(url, http_client=client)) as session:
            yield session

    return connect


def _check_library() -> None:
    """Checks that the library is installed without importing it: the import takes a second and is done in a thread."""
    if importlib.util.find_spec("mcp") is None:
        raise ConfigError(f"an MCP server {needs_extra('mcp')}")


async def _list(client: Any) -> tuple[Function, ...]:
    found: list[Function] = []
    cursor: str | None = None
    for _ in range(_PAGES):
        page = await client.list_tools(cursor=cursor)
        found += (Function(tool.name, tool.description or "", tool.input_schema) for tool in page.tools)
        cursor = page.next_cursor
        if cursor is None:
            break
    return tuple(found)


def _text(result: Any) -> str:
    """The text of a result; images and audio are only mentioned."""
    parts = [
        block.text if block.type == "text" else f"[{block.type}, which this model cannot read]"
        for block in result.content
    ]
    if not parts and result.structured_content is not None:
        return json.dumps(result.structured_content, ensure_ascii=False)
    return "\n".join(parts)


def _why(error: BaseException) -> str:
    """The first underlying error of an exception group, as text."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return str(error) or type(error).__name__
