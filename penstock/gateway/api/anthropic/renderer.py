"""`message` objects, whole or as the events that build them: blocks are opened, extended and closed."""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Iterator
from typing import Any

import msgspec

from penstock.gateway.api.anthropic.schemas import MessagesRequest
from penstock.gateway.api.sealed_text import sealed
from penstock.gateway.app.dialects import ANTHROPIC
from penstock.gateway.app.exchange import encode_json
from penstock.gateway.generation.base import Generation
from penstock.gateway.generation.choice import CONTENT_FILTER, Piece
from penstock.gateway.generation.renderer import Renderer
from penstock.protocol.errors import ApiError

_REASONS = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use", CONTENT_FILTER: "refusal"}
PING = b'event: ping\ndata: {"type":"ping"}\n\n'


class MessageRenderer(Renderer):
    """See `Renderer`."""

    keep_alive = PING

    def __init__(self, generation: Generation, request_id: str, request: MessagesRequest) -> None:
        self._generation = generation
        self._asked = request.max_tokens
        self._request_id = request_id
        self._blocks: list[dict[str, Any]] = []
        self._open: dict[str, Any] | None = None
        self._parts: list[str] = []
        """Of the open block: text, or the JSON of a call's input."""
        self._last: Piece | None = None
        self._omitted = request.thinking is not None and request.thinking.display == "omitted"
        """Whether thoughts are signed, but not shown."""
        self._head: dict[str, Any] = {
            "id": f"msg_{generation.id}",
            "type": "message",
            "role": "assistant",
            "model": generation.model.name,
            "content": [],
            "stop_reason": None,
            "stop_sequence": None,
        }
        if request.context_management is not None:
            self._head["context_management"] = {"applied_edits": []}

    def opening(self) -> bytes:
        return _event({"type": "message_start", "message": {**self._head, "usage": self._usage()}}) + PING

    def event(self, piece: Piece) -> bytes:
        return b"".join(map(_event, self._steps(piece)))

    def closing(self) -> bytes:
        ended = {"type": "message_delta", "delta": self._end(), "usage": self._usage()}
        return _event(ended) + _event({"type": "message_stop"})

    def whole(self, pieces: list[list[Piece]]) -> bytes:
        for piece in pieces[0]:
            for _ in self._steps(piece):
                pass
        return encode_json({**self._head, "content": self._blocks, **self._end(), "usage": self._usage()})

    def failure(self, error: ApiError) -> bytes:
        return b"event: error\ndata: %b\n\n" % encode_json(ANTHROPIC.error(error, self._request_id))

    def _steps(self, piece: Piece) -> Iterator[dict[str, Any]]:
        if piece.reasoning:
            if self._open is None or self._open["type"] != "thinking":
                yield from self._close()
                yield self._start({"type": "thinking", "thinking": "", "signature": ""})
            if self._omitted:
                self._parts.append(piece.reasoning)
            else:
                yield self._delta("thinking_delta", "thinking", piece.reasoning)
        if piece.text:
            if self._open is None or self._open["type"] != "text":
                yield from self._close()
                yield self._start({"type": "text", "text": ""})
            yield self._delta("text_delta", "text", piece.text)
        for call in piece.calls or ():
            if call.id is not None:
                yield from self._close()
                yield self._start({"type": "tool_use", "id": call.id, "name": call.name, "input": {}})
            else:
                yield self._delta("input_json_delta", "partial_json", call.arguments)
        if piece.finish_reason is not None:
            self._last = piece
            yield from self._close()

    def _start(self, block: dict[str, Any]) -> dict[str, Any]:
        self._open = block
        self._parts.clear()
        self._blocks.append(block)
        return {"type": "content_block_start", "index": len(self._blocks) - 1, "content_block": block}

    def _delta(self, kind: str, field: str, text: str) -> dict[str, Any]:
        self._parts.append(text)
        delta = {"type": kind, field: text}
        return {"type": "content_block_delta", "index": len(self._blocks) - 1, "delta": delta}

    def _close(self) -> Iterator[dict[str, Any]]:
        """Close the open block, if there is one."""
        block = self._open
        if block is None:
            return
        text = "".join(self._parts)
        if block["type"] == "text":
            block["text"] = text
        elif block["type"] == "thinking":
            block["thinking"] = "" if self._omitted else text
            block["signature"] = sealed(text) if self._omitted else signature(text)
            delta = {"type": "signature_delta", "signature": block["signature"]}
            yield {"type": "content_block_delta", "index": len(self._blocks) - 1, "delta": delta}
        else:
            block["input"] = _input(text)
        self._open = None
        yield {"type": "content_block_stop", "index": len(self._blocks) - 1}

    def _end(self) -> dict[str, Any]:
        assert self._last is not None and self._last.finish_reason is not None
        reason, matched = self._last.finish_reason, self._last.stop_reason
        if reason == "stop" and isinstance(matched, str):
            return {"stop_reason": "stop_sequence", "stop_sequence": matched}
        if reason == "length" and self._filled_window:
            return {"stop_reason": "model_context_window_exceeded", "stop_sequence": None}
        return {"stop_reason": _REASONS.get(reason, reason), "stop_sequence": None}

    @property
    def _filled_window(self) -> bool:
        """Whether the answer ended because the context window did, before it had as many tokens as asked for."""
        room = self._generation.most_completion_tokens
        return room < self._asked and self._generation.completion_tokens >= room

    def _usage(self) -> dict[str, Any]:
        """In this API `input_tokens` does not include tokens that were found in the prefix cache."""
        cached = self._generation.cached_tokens
        return {
            "input_tokens": self._generation.prompt_tokens - cached,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": cached,
            "output_tokens": self._generation.completion_tokens,
            "output_tokens_details": {"thinking_tokens": self._generation.reasoning_tokens},
            "service_tier": "standard",
        }


def signature(thought: str) -> str:
    """Clients expect one and send it back; a thought is taken as it comes, so it protects nothing. Where the thought is
    left out, the signature is the thought itself, packed: the client has nothing else to send back."""
    return base64.b64encode(hashlib.sha256(thought.encode()).digest()).decode()


def _input(text: str) -> dict[str, Any]:
    """The input of a call. Text that is no JSON object (a call that was cut off) is kept under `INVALID_JSON`."""
    try:
        value = msgspec.json.decode(text or "{}")
    except (msgspec.DecodeError, RecursionError):
        return {"INVALID_JSON": text}
    return value if isinstance(value, dict) else {"INVALID_JSON": text}


def _event(data: dict[str, Any]) -> bytes:
    return b"event: %b\ndata: %b\n\n" % (data["type"].encode(), encode_json(data))
