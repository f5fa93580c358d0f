"""A request that did not come from a socket: an ASGI exchange in memory.

It is answered like every other request, with validation, limits, guardrails and the request log.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from penstock.gateway.app.bodies import Bodies
from penstock.gateway.app.exchange import Exchange
from penstock.gateway.http.request import ON_DISCONNECT, Callback, Message
from penstock.identity import Caller


@dataclass(slots=True)
class Reply:
    """The reply to a request; without a status when the request was aborted."""

    request_id: str
    status: int | None = None
    headers: dict[str, str] = field(default_factory=dict)
    body: bytes = b""


class MemoryRequest:
    """One POST request. Setting `aborted` acts like a disconnect of the client."""

    def __init__(
        self,
        path: str,
        body: bytes,
        caller: Caller,
        aborted: asyncio.Event,
        headers: Sequence[tuple[bytes, bytes]],
        marks: Mapping[str, Any],
    ) -> None:
        """`marks`: what the ASGI scope has beside the usual, to tell such a request from one of a client."""
        self._body: bytes | None = body
        self._aborted = aborted
        self._parts: list[bytes] = []
        self._watcher: asyncio.Task[None] | None = None
        scope = {
            "type": "http",
            "http_version": "1.1",
            "method": "POST",
            "path": path,
            "query_string": b"",
            "headers": list(headers),
            ON_DISCONNECT: self._on_disconnect,
            **marks,
        }
        self.exchange = Exchange(
            scope, self._receive, self._send, stalled_reader_s=60.0, receive_s=60.0, bodies=Bodies()
        )
        self.exchange.caller = caller
        self._reply = Reply(self.exchange.request_id)

    @property
    def reply(self) -> Reply:
        self._reply.body = b"".join(self._parts)
        return self._reply

    async def _receive(self) -> Message:
        if self._body is not None:
            body, self._body = self._body, None
            return {"type": "http.request", "body": body, "more_body": False}
        await self._aborted.wait()
        return {"type": "http.disconnect"}

    def _on_disconnect(self, callback: Callback | None) -> None:
        if self._watcher is not None:
            self._watcher.cancel()
        self._watcher = (
            None if callback is None else asyncio.create_task(self._watch(callback), name="watch of a memory request")
        )

    async def _watch(self, callback: Callback) -> None:
        await self._aborted.wait()
        callback()

    async def _send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self._reply.status = message["status"]
            self._reply.headers = {
                name.decode("latin-1"): value.decode("latin-1") for name, value in message["headers"]
            }
        else:
            self._written(message.get("body", b""))

    def _written(self, part: bytes) -> None:
        """A part of the body of the reply."""
        self._parts.append(part)
