"""The request of a batch's line, which `BatchLine` marks as part of a batch."""

from __future__ import annotations

import asyncio
import uuid

from penstock.gateway.accounting.batch_line import BATCH_LINE, BatchLine
from penstock.gateway.app.data_rules import REQUIRE
from penstock.gateway.app.memory_request import MemoryRequest
from penstock.identity import Caller


class LineRequest(MemoryRequest):
    """One request. Setting `aborted` acts like a disconnect of the client."""

    def __init__(
        self, path: str, body: bytes, line: BatchLine, caller: Caller, aborted: asyncio.Event, require: str = ""
    ) -> None:
        """`require`: the labels that the request which made the batch demands."""
        headers = [(b"content-type", b"application/json"), (b"x-request-id", f"req_{uuid.uuid4().hex}".encode())]
        if require:
            headers.append((REQUIRE.encode(), require.encode("latin-1")))
        super().__init__(path, body, caller, aborted, headers, {BATCH_LINE: line})
