"""Records of Ollama's API: one JSON object a line while an answer streams, or a single one. The last has the counts and
durations, in nanoseconds."""

from __future__ import annotations

import datetime
from collections.abc import Sequence
from time import monotonic
from typing import Any

import msgspec

from penstock.gateway.app.dialects import OLLAMA
from penstock.gateway.app.exchange import encode_json
from penstock.gateway.generation.assistant_message import AssembledCall, merge_calls
from penstock.gateway.generation.base import Generation
from penstock.gateway.generation.choice import AnyToken, Piece
from penstock.gateway.generation.logprobs import logprob_entries
from penstock.gateway.generation.renderer import Renderer
from penstock.protocol.errors import ApiError

NDJSON = b"application/x-ndjson"
_REASONS = {"tool_calls": "stop"}


def now() -> str:
    """The time as Ollama writes it."""
    return datetime.datetime.now(datetime.UTC).isoformat().replace("+00:00", "Z")


def nanoseconds(seconds: float | None) -> int:
    return max(int((seconds or 0.0) * 1e9), 0)


class RecordRenderer(Renderer):
    """See `Renderer`."""

    content_type = NDJSON

    def __init__(
        self,
        generation: Generation,
        model: str,
        started_at: float,
        *,
        chat: bool,
        load_s: float = 0.0,
        logprobs: bool = False,
        top: int = 0,
    ) -> None:
        """`model`: as the client named it. `chat`: text is a message, not a `response`. `load_s`: how long the request
        waited for the model to be loaded."""
        self._generation = generation
        self._model = model
        self._started_at = started_at
        self._chat = chat
        self._load_s = load_s
        self._logprobs = logprobs
        self._top = top
        self._calls: list[AssembledCall] = []
        self._sent = 0
        """How many of the calls the client has."""
        self._last: Piece | None = None
        self._limit: str | None = None
        self._head = {"id": f"{'ollama-chat-' if chat else 'ollama-generate-'}{generation.id}"}
        # There are no comments in this format: a record without text.
        self.keep_alive = self._line(self._record(""))

    def opening(self) -> bytes:
        return b""

    def event(self, piece: Piece) -> bytes:
        self._take(piece)
        data = b""
        if piece.reasoning:
            data = self._line(self._record("", thoughts=piece.reasoning))
        if piece.text or piece.tokens:
            data += self._line(self._record(piece.text, tokens=piece.tokens))
        ready = self._calls[self._sent : None if self._last is not None else -1]
        if ready:
            data += self._line(self._record("", calls=ready))
        return data

    def closing(self) -> bytes:
        return self._line({**self._record(""), **self._end()})

    def whole(self, pieces: list[list[Piece]]) -> bytes:
        for piece in pieces[0]:
            self._take(piece)
        text = "".join(piece.text for piece in pieces[0])
        thoughts = "".join(piece.reasoning for piece in pieces[0])
        tokens = [token for piece in pieces[0] for token in piece.tokens]
        record = self._record(text, calls=self._calls, tokens=tokens, thoughts=thoughts)
        return encode_json({**record, **self._end()})

    def limit_reached(self, limit: str, scope: str) -> bytes:
        """There are no comments in this format: the last record says it."""
        self._limit = limit
        return b""

    def failure(self, error: ApiError) -> bytes:
        return self._line(OLLAMA.error(error, ""))

    def _take(self, piece: Piece) -> None:
        if piece.calls:
            merge_calls(self._calls, piece.calls)
        if piece.finish_reason is not None:
            self._last = piece

    def _record(
        self,
        text: str,
        *,
        calls: list[AssembledCall] | None = None,
        tokens: Sequence[AnyToken] | None = None,
        thoughts: str = "",
    ) -> dict[str, Any]:
        record: dict[str, Any] = {"model": self._model, "created_at": now()}
        holder: dict[str, Any] = record
        if self._chat:
            holder = record["message"] = {"role": "assistant", "content": text}
        else:
            record["response"] = text
        if thoughts:
            holder["thinking"] = thoughts
        if calls:
            first = self._sent
            self._sent += len(calls)
            holder["tool_calls"] = [_call(call, index) for index, call in enumerate(calls, first)]
        record["done"] = False
        if tokens and self._logprobs:
            record["logprobs"] = logprob_entries(self._generation.text, tokens, self._top)
        return record

    def _end(self) -> dict[str, Any]:
        assert self._last is not None and self._last.finish_reason is not None
        generation, reason = self._generation, self._last.finish_reason
        runs = generation.runs()
        prefill = decode = 0.0
        if runs:
            run = runs[0]
            first, last = run.first_at, run.last_at
            if run.prefill_s is not None:
                prefill = run.prefill_s
            elif first is not None and run.submitted_at is not None:
                prefill = first - run.submitted_at
            if run.decode_s is not None:
                decode = run.decode_s
            elif first is not None and last is not None:
                decode = last - first
        return {
            **({} if self._limit is None else {"x_penstock_limit": self._limit}),
            "id": self.response_id,
            "done": True,
            "done_reason": _REASONS.get(reason, reason),
            "total_duration": nanoseconds(monotonic() - self._started_at),
            "load_duration": nanoseconds(self._load_s),
            "prompt_eval_count": generation.prompt_tokens,
            "prompt_eval_duration": nanoseconds(prefill),
            "eval_count": generation.completion_tokens,
            "eval_duration": max(nanoseconds(decode), 1),  # clients divide by it
        }

    def _line(self, record: object) -> bytes:
        return encode_json(record) + b"\n"


def _call(call: AssembledCall, index: int) -> dict[str, Any]:
    try:
        arguments = msgspec.json.decode(call.arguments or "{}")
    except (msgspec.DecodeError, RecursionError):
        arguments = None
    if not isinstance(arguments, dict):  # a call that was cut off
        arguments = {"INVALID_JSON": call.arguments}
    return {"id": call.id, "function": {"index": index, "name": call.name, "arguments": arguments}}
