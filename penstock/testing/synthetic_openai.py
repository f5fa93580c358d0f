"""An OpenAI-compatible server that answers at once with a fixed completion, as a backend to compare proxies on.

One process with a bare asyncio protocol that parses as little of HTTP as it can, so that it is never the bottleneck.

    python -m penstock.testing.synthetic_openai PORT
"""

from __future__ import annotations

import asyncio
import json
import sys
import time

import uvloop

TEXT = "A gate opens, and water turns the wheel."
WORDS = TEXT.split(" ")


def _completion() -> bytes:
    body = {
        "id": "chatcmpl-synthetic",
        "object": "chat.completion",
        "created": int(time.time()),
        "model": "synthetic",
        "choices": [{"index": 0, "message": {"role": "assistant", "content": TEXT}, "finish_reason": "stop"}],
        "usage": {"prompt_tokens": 12, "completion_tokens": 8, "total_tokens": 20},
    }
    return _reply(json.dumps(body).encode())


def _reply(body: bytes, kind: str = "application/json") -> bytes:
    return f"HTTP/1.1 200 OK\r\ncontent-type: {kind}\r\ncontent-length: {len(body)}\r\n\r\n".encode() + body


def _stream(*, chat: bool = True) -> bytes:
    def chunk(**choice: object) -> bytes:
        said: dict[str, object] = {"delta": {}} if chat else {"text": ""}
        body = {
            "id": "chatcmpl-synthetic",
            "object": "chat.completion.chunk" if chat else "text_completion",
            "created": 1,
            "model": "synthetic",
            "choices": [{"index": 0, **said, "finish_reason": None, **choice}],
        }
        return b"data: " + json.dumps(body).encode() + b"\n\n"

    texts = [f"{' ' if index else ''}{word}" for index, word in enumerate(WORDS)]
    events = [chunk(delta={"role": "assistant", "content": ""})] if chat else []
    events += [chunk(delta={"content": text}) if chat else chunk(text=text) for text in texts]
    usage = {
        "id": "chatcmpl-synthetic",
        "object": "chat.completion.chunk",
        "created": 1,
        "model": "synthetic",
        "choices": [],
        "usage": {"prompt_tokens": 12, "completion_tokens": 8, "total_tokens": 20},
    }
    events += [chunk(finish_reason="stop"), b"data: " + json.dumps(usage).encode() + b"\n\n", b"data: [DONE]\n\n"]
    return _reply(b"".join(events), "text/event-stream")


MODELS = _reply(json.dumps({"object": "list", "data": [{"id": "synthetic", "object": "model"}]}).encode())
COMPLETION, STREAM, TEXT_STREAM = _completion(), _stream(), _stream(chat=False)


class Connection(asyncio.Protocol):
    def __init__(self) -> None:
        self._buffer = b""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        self._buffer += data
        while (end := self._buffer.find(b"\r\n\r\n")) >= 0:
            head = self._buffer[:end].lower()
            at = head.find(b"content-length:")
            length = int(head[at + 15 :].split(b"\r\n", 1)[0]) if at >= 0 else 0
            if len(self._buffer) < end + 4 + length:
                return
            body, self._buffer = self._buffer[end + 4 : end + 4 + length], self._buffer[end + 4 + length :]
            if head.startswith(b"get"):
                self._transport.write(MODELS)
            else:
                streamed = b'"stream":true' in body.replace(b" ", b"")
                stream = TEXT_STREAM if head.startswith(b"post /v1/completions ") else STREAM
                self._transport.write(stream if streamed else COMPLETION)


async def serve(port: int) -> None:
    server = await asyncio.get_running_loop().create_server(Connection, "127.0.0.1", port, backlog=4096)
    async with server:
        await server.serve_forever()


if __name__ == "__main__":
    uvloop.run(serve(int(sys.argv[1])))
