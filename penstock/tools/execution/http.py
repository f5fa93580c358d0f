"""Functions of an HTTP API described by OpenAPI. Redirects are not followed, because they could send the server's
credentials anywhere; replies are bounded and not compressed, because compression hides their size."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any
from urllib.parse import urlsplit

import httpx

from penstock.telemetry.context import outgoing_headers
from penstock.tools.execution.addresses import Addresses, PinnedTransport
from penstock.tools.execution.base import Function, Outcome, ToolError, ToolServer
from penstock.tools.execution.openapi import Operation, base_url, operations


class HttpTools(ToolServer):
    """See `ToolServer`."""

    def __init__(
        self,
        document: Mapping[str, Any],
        *,
        url: str = "",
        headers: Mapping[str, str] | None = None,
        addresses: Addresses,
        timeout_s: float,
        most_bytes: int,
    ) -> None:
        """`url`: base URL of the API; empty: the document's first server."""
        base = url or base_url(document)
        if urlsplit(base).scheme not in ("http", "https") or not urlsplit(base).hostname:
            raise ToolError(f"{base!r} is not the URL of an HTTP API; give `url`, or `servers` in the document")
        self._operations: dict[str, Operation] = {found.function.name: found for found in operations(document)}
        self._most_bytes = most_bytes
        self._timeout_s = timeout_s
        self._client = httpx.AsyncClient(
            base_url=base,
            headers={"accept-encoding": "identity", "accept": "application/json, text/*", **(headers or {})},
            transport=PinnedTransport(addresses),
            timeout=timeout_s,
            trust_env=False,
        )

    async def functions(self) -> tuple[Function, ...]:
        return tuple(operation.function for operation in self._operations.values())

    async def call(self, function: str, arguments: dict[str, Any]) -> Outcome:
        operation = self._operations[function]
        try:
            path, query, headers, body = operation.request(arguments)
            async with asyncio.timeout(self._timeout_s):  # for the whole call; the client's limit is per read
                return await self._ask(operation.method, path, query, {**outgoing_headers(), **headers}, body)
        except ToolError as error:
            return Outcome(f"Error: {error}.", ok=False)
        except (TimeoutError, httpx.TimeoutException):
            return Outcome(f"Error: no answer within {self._timeout_s:g} s.", ok=False)
        except UnicodeError:
            return Outcome("Error: a header can hold plain ASCII only.", ok=False)
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            return Outcome(f"Error: the server cannot be reached ({type(error).__name__}).", ok=False)

    async def _ask(self, method: str, path: str, query: dict[str, Any], headers: dict[str, str], body: Any) -> Outcome:
        async with self._client.stream(method, path, params=query, headers=headers, json=body) as response:
            if response.is_redirect:
                return Outcome("Error: the server redirects elsewhere, which is not followed.", ok=False)
            if response.headers.get("content-encoding", "identity") != "identity":
                return Outcome("Error: the server sent a compressed result, which was not asked for.", ok=False)
            data = bytearray()
            cut = False
            async for part in response.aiter_raw():
                data += part
                if len(data) > self._most_bytes:
                    cut = True
                    break
            text = bytes(data[: self._most_bytes]).decode("utf-8", "replace")
            if cut:
                text += f"\n[cut: the result has more than {self._most_bytes:,} bytes]"
            if response.is_success:
                return Outcome(text)
            return Outcome(f"Error: HTTP {response.status_code}. {text}", ok=False)

    async def close(self) -> None:
        await self._client.aclose()
