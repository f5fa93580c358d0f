"""The request of a batch's line: an ASGI exchange in memory instead of on a socket.

It is answered like every other request, with validation, limits, guardrails and the request log; `BatchLine` marks
it as part of a batch.
"""

from __future__ import annotations

import asyncio
import uuid
from dataclasses import dataclass, field

from penstock.gateway.accounting.batch_line import BATCH_LINE, BatchLine
from penstock.gateway.app.bodies import Bodies
from penstock.gateway.app.data_rules import REQUIRE
from penstock.gateway.app.exchange import Exchange
from penstock.gateway.http.request import ON_DISCONNECT, Callback, Message
from penstock.identity import Caller


@dataclass(slots=True)
class Reply:
    """The reply to a line; without a status when the request was aborted."""

    request_id: str
    status: int | None = None
    headers: dict[str, str] = field(default_factory=dict)
    body: bytes = b""


class LineRequest:
    """One request. Setting `aborted` acts like a disconnect of the client."""

    def __init__(
        self, path: str, body: bytes, line: BatchLine, caller: Caller, aborted: asyncio.Event, require: str = ""
    ) -> None:
        """`require`: the labels that the request which made the batch demands."""
        self._body: bytes | None = body
        self._aborted = aborted
        self._parts: list[bytes] = []
        self._watcher: asyncio.Task[None] | None = None
        request_id = f"req_{uuid.uuid4().hex}"
        headers = [(b"content-type", b"application/json"), (b"x-request-id", request_id.encode())]
        if require:
            headers.append((REQUIRE.encode(), require.encode("latin-1")))
        scope = {
            "type": "http",
            "http_version": "1.1",
            "method": "POST",
            "path": path,
            "query_string": b"",
            "headers": headers,
            ON_DISCONNECT: self._on_disconnect,
            BATCH_LINE: line,
        }
        self.exchange = Exchange(
            scope, self._receive, self._send, stalled_reader_s=60.0, receive_s=60.0, bodies=Bodies()
        )
        self.exchange.caller = caller
        self._reply = Reply(request_id)

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
            None if callback is None else asyncio.create_task(self._watch(callback), name="batch line watch")
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
            self._parts.append(message.get("body", b""))
