"""A server that speaks OpenAI's wire format as it is documented, and nothing else: plain asyncio, no code of ours.

It answers every conversation with `TEXT`, a character at a time. What arrived is kept, so that tests can look at it.
"""

from __future__ import annotations

import asyncio
import json
import math
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

TEXT = "Hello, world!"


@dataclass
class WireServer:
    """See above."""

    text: str = TEXT
    thoughts: str = ""
    call: dict[str, str] | None = None
    """A function call, by name and arguments, that it makes when it is offered tools and has no result yet."""
    pause_s: float = 0.0
    usage: bool = True
    """Whether it reports what it used."""
    dimensions: int = 4
    port: int = 0
    asked: list[tuple[str, dict[str, Any]]] = field(default_factory=list)
    broken: bool = False
    """It ends its streams in the middle."""
    left: int = 0
    """Streams whose reader closed the connection."""
    _tasks: set[asyncio.Task[None]] = field(default_factory=set)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}/v1"

    @property
    def last(self) -> dict[str, Any]:
        return self.asked[-1][1]

    def accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.ensure_future(self._serve(reader, writer))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def close(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while True:
                head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")
                _, path, _ = head[0].split(" ")
                lengths = [line for line in head if line.lower().startswith("content-length:")]
                body = await reader.readexactly(int(lengths[0].partition(":")[2]) if lengths else 0)
                await self._reply(writer, path.removeprefix("/v1"), json.loads(body) if body else {})
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            writer.close()

    async def _reply(self, writer: asyncio.StreamWriter, path: str, body: dict[str, Any]) -> None:
        if body:
            self.asked.append((path, body))
        if path in ("/chat/completions", "/completions") and body.get("stream"):
            writer.write(b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n")
            try:
                for event in self._events(path, body):
                    data = f"data: {event if isinstance(event, str) else json.dumps(event)}\n\n".encode()
                    writer.write(f"{len(data):x}\r\n".encode() + data + b"\r\n")
                    await writer.drain()
                    await asyncio.sleep(self.pause_s)
            except ConnectionError:
                self.left += 1
                raise
            if self.broken:
                writer.transport.abort()
                return
            writer.write(b"0\r\n\r\n")
            return
        found: Any = {"object": "list", "data": [{"id": "m", "object": "model"}]}
        if path == "/embeddings":
            found = self._embeddings(body)
        elif path == "/rerank":
            scores = {index: self._likeness(body["query"], text) for index, text in enumerate(body["documents"])}
            results = [{"index": index, "relevance_score": score} for index, score in scores.items()]
            results.sort(key=lambda result: -result["relevance_score"])
            found = {"results": results, "usage": {"total_tokens": 7 * len(scores)}}
        data = json.dumps(found).encode()
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n" % len(data))
        writer.write(data)

    def _events(self, path: str, body: dict[str, Any]) -> Iterator[Any]:
        head = {"id": "x-1", "object": "chunk", "created": 1, "model": body["model"]}
        chat = path == "/chat/completions"
        n, most = body.get("n", 1), body.get("max_tokens", body.get("max_completion_tokens", 1000))
        parts, ended = list(self._parts(body))[:most], "stop"
        if len(list(self._parts(body))) > most:
            ended = "length"
        calls = self.call is not None and body.get("tools") and body["messages"][-1]["role"] != "tool"
        for index in range(n):
            if chat:
                yield {**head, "choices": [_choice(index, delta={"role": "assistant", "content": ""})]}
                if self.thoughts:
                    yield {**head, "choices": [_choice(index, delta={"reasoning_content": self.thoughts})]}
            if calls:
                assert self.call is not None
                function = {"name": self.call["name"], "arguments": ""}
                call = {"index": 0, "id": "call_1", "type": "function", "function": function}
                yield {**head, "choices": [_choice(index, delta={"tool_calls": [call]})]}
                for piece in (self.call["arguments"][:5], self.call["arguments"][5:]):
                    more = {"index": 0, "function": {"arguments": piece}}
                    yield {**head, "choices": [_choice(index, delta={"tool_calls": [more]})]}
                yield {**head, "choices": [_choice(index, delta={}, finish_reason="tool_calls")]}
                continue
            for place, part in enumerate(parts):
                if self.broken and place == 1:
                    return
                said = _choice(index, delta={"content": part}) if chat else {"index": index, "text": part}
                said["logprobs"] = self._logprobs(body, part, chat)
                yield {**head, "choices": [said]}
            last: dict[str, Any] = {"delta": {}} if chat else {"text": ""}
            yield {**head, "choices": [{"index": index, **last, "finish_reason": ended}]}
        if self.usage and (body.get("stream_options") or {}).get("include_usage"):
            used = {"prompt_tokens": 11, "completion_tokens": n * len(parts), "total_tokens": 11 + n * len(parts)}
            details = {"completion_tokens_details": {"reasoning_tokens": 3}} if self.thoughts else {}
            yield {**head, "choices": [], "usage": {**used, **details}}
        yield "[DONE]"

    def _parts(self, body: dict[str, Any]) -> Iterator[str]:
        """Characters stand for tokens, as in the engine that tests compare with."""
        text = self.text
        for stop in body.get("stop") or ():
            text = text.partition(stop)[0]
        yield from text

    def _logprobs(self, body: dict[str, Any], part: str, chat: bool) -> Any:
        wanted = body.get("logprobs")
        if wanted is None or wanted is False:
            return None
        top = (body.get("top_logprobs") or 0) if chat else wanted
        others = [(part, -0.5), ("a", -1.0), ("b", -1.5)][:top]
        if not chat:
            tops = [dict(others)] if top else None
            return {"tokens": [part], "token_logprobs": [-0.5], "top_logprobs": tops, "text_offset": [0]}
        entry = {"token": part, "logprob": -0.5, "bytes": list(part.encode())}
        entry["top_logprobs"] = [{"token": t, "logprob": p, "bytes": list(t.encode())} for t, p in others]
        return {"content": [entry], "refusal": None}

    def _embeddings(self, body: dict[str, Any]) -> dict[str, Any]:
        texts = body["input"]
        width = body.get("dimensions") or self.dimensions
        data = [{"object": "embedding", "index": i, "embedding": vector(t, width)} for i, t in enumerate(texts)]
        used = {"prompt_tokens": 5 * len(texts), "total_tokens": 5 * len(texts)}
        return {"object": "list", "data": data[::-1], "model": body["model"], "usage": used}

    def _likeness(self, query: str, text: str) -> float:
        shared = set(query.lower().split()) & set(text.lower().split())
        return len(shared) / (1 + len(text.split()))


def vector(text: str, width: int) -> list[float]:
    """Texts with the same words have the same vector."""
    row = [0.1] * width
    for word in text.lower().split():
        row[sum(word.encode()) % width] += 1.0
    length = math.sqrt(sum(value * value for value in row))
    return [value / length for value in row]


def _choice(index: int, **fields: Any) -> dict[str, Any]:
    return {"index": index, "logprobs": None, "finish_reason": None, **fields}


@asynccontextmanager
async def wire_server(**options: Any) -> AsyncIterator[WireServer]:
    server = WireServer(**options)
    listening = await asyncio.start_server(server.accept, "127.0.0.1", 0)
    server.port = listening.sockets[0].getsockname()[1]
    try:
        yield server
    finally:
        listening.close()
        await server.close()
