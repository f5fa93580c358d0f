"""The well-behaved tenant of `penstock bench hostile`: an endless stream, short chats, formatted chats and uploads.

Everything it sends is small and legitimate, at a rate that a quiet server serves with ease. Every request must succeed;
the latencies are what the benchmark reports.
"""

from __future__ import annotations

import asyncio
import json
import time
from array import array
from collections.abc import Awaitable, Callable

from penstock.bench.stats import Percentiles, percentiles
from penstock.bench.wire import Connection, Target, WireError

MEASURES = ("token gap", "short chat", "formatted chat", "upload")


class Victim:
    """Sends its traffic for a while, and keeps every latency by measure."""

    def __init__(self, target: Target, model: str, stream_only: bool = False) -> None:
        self._stream_only = stream_only
        self._target = target
        self._model = model
        self._number = 0
        self.latencies: dict[str, array[float]] = {name: array("d") for name in MEASURES}
        self.failures: list[str] = []

    async def run(self, seconds: float) -> None:
        """Requests that are under way when the time is over are waited for: a hung request counts in full."""
        end = time.monotonic() + seconds
        async with asyncio.TaskGroup() as group:
            group.create_task(self._repeat(end, 0.0, self._stream))
            if self._stream_only:
                return
            group.create_task(self._repeat(end, 0.25, self._timed("short chat", self._chat)))
            group.create_task(self._repeat(end, 0.5, self._timed("formatted chat", self._formatted)))
            group.create_task(self._repeat(end, 0.5, self._timed("upload", self._upload)))

    def summary(self) -> dict[str, Percentiles | None]:
        return {name: percentiles(values) for name, values in self.latencies.items()}

    async def _repeat(self, end: float, pause: float, send: Callable[[Connection], Awaitable[None]]) -> None:
        connection = Connection(self._target)
        while time.monotonic() < end:
            try:
                await send(connection)
            except WireError as error:
                self.failures.append(str(error))
                await connection.close()
                await asyncio.sleep(0.2)
            await asyncio.sleep(pause)
        await connection.close()

    def _timed(
        self, measure: str, send: Callable[[Connection], Awaitable[None]]
    ) -> Callable[[Connection], Awaitable[None]]:
        async def timed(connection: Connection) -> None:
            begun = time.monotonic()
            await send(connection)
            self.latencies[measure].append(time.monotonic() - begun)

        return timed

    def _body(self, content: str, tokens: int, **fields: object) -> bytes:
        messages = [{"role": "user", "content": content}]
        return json.dumps({"model": self._model, "messages": messages, "max_tokens": tokens, **fields}).encode()

    async def _stream(self, connection: Connection) -> None:
        body = self._body("Tell me a long story.", 200, stream=True, ignore_eos=True)
        last: float | None = None
        async for event in connection.events("/v1/chat/completions", body):
            if b'"content"' in event:
                now = time.monotonic()
                if last is not None:
                    self.latencies["token gap"].append(now - last)
                last = now

    async def _chat(self, connection: Connection) -> None:
        await connection.request("POST", "/v1/chat/completions", self._body("Hello", 4))

    async def _formatted(self, connection: Connection) -> None:
        # A new schema each time: none of them is in the server's cache of compiled grammars.
        self._number += 1
        schema = {"type": "object", "properties": {f"field{self._number}": {"enum": ["a", "b"]}},
                  "required": [f"field{self._number}"], "additionalProperties": False}  # fmt: skip
        form = {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema}}
        body = self._body("Choose.", 24, response_format=form)
        await connection.request("POST", "/v1/chat/completions", body)

    async def _upload(self, connection: Connection) -> None:
        line = json.dumps({"custom_id": "1", "method": "POST", "url": "/v1/chat/completions", "body": {}})
        parts = (
            '--b\r\nContent-Disposition: form-data; name="purpose"\r\n\r\nbatch\r\n'
            '--b\r\nContent-Disposition: form-data; name="file"; filename="f.jsonl"\r\n\r\n'
            f"{line * 200}\r\n--b--\r\n"
        )
        await connection.request("POST", "/v1/files", parts.encode(), "multipart/form-data; boundary=b")
