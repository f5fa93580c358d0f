"""A request that comes from a batch and not from a socket: the same ASGI conversation, held in memory.

It takes the way of every other request, through validation, limits, guardrails, engine and request log; what is
different about it is said by `BatchLine`, which its `Exchange` carries.
"""

from __future__ import annotations

import asyncio
import uuid
from dataclasses import dataclass, field

from penstock.gateway.app.exchange import BatchLine, Exchange
from penstock.gateway.http.request import DEPARTURE, Gone, Message
from penstock.identity import Caller


@dataclass(slots=True)
class Reply:
    """What was answered; no status when the request was broken off."""

    request_id: str
    status: int | None = None
    headers: dict[str, str] = field(default_factory=dict)
    body: bytes = b""


class Inner:
    """One such request. When `gone` is set its client has left."""

    def __init__(self, path: str, body: bytes, line: BatchLine, caller: Caller, gone: asyncio.Event) -> None:
        self._body: bytes | None = body
        self._gone = gone
        self._parts: list[bytes] = []
        self._watcher: asyncio.Task[None] | None = None
        request_id = f"req_{uuid.uuid4().hex}"
        scope = {
            "type": "http",
            "http_version": "1.1",
            "method": "POST",
            "path": path,
            "query_string": b"",
            "headers": [(b"content-type", b"application/json"), (b"x-request-id", request_id.encode())],
            DEPARTURE: self._departure,
        }
        self.exchange = Exchange(scope, self._receive, self._send, stalled_reader_s=60.0, receive_s=60.0)
        self.exchange.line = line
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
        await self._gone.wait()
        return {"type": "http.disconnect"}

    def _departure(self, gone: Gone | None) -> None:
        if self._watcher is not None:
            self._watcher.cancel()
        self._watcher = None if gone is None else asyncio.create_task(self._watch(gone), name="client watcher")

    async def _watch(self, gone: Gone) -> None:
        await self._gone.wait()
        gone()

    async def _send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self._reply.status = message["status"]
            self._reply.headers = {
                name.decode("latin-1"): value.decode("latin-1") for name, value in message["headers"]
            }
        else:
            self._parts.append(message.get("body", b""))
