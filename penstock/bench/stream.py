"""One streamed answer of an OpenAI-compatible server, timed: text completions and chat completions.

An answer is whole or an error: a stream that ends without text or usage never counts as a fast one.
"""

from __future__ import annotations

import time
from dataclasses import dataclass

import msgspec

from penstock.bench.wire import Connection, StatusError, WireError
from penstock.errors import PenstockError


class AnswerError(PenstockError):
    """The stream reports an error, or is not the answer that was asked for."""


class _Delta(msgspec.Struct):
    content: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    tool_calls: list[msgspec.Raw] | None = None

    @property
    def empty(self) -> bool:
        return not (self.content or self.reasoning_content or self.reasoning or self.tool_calls)


class _Choice(msgspec.Struct):
    delta: _Delta | None = None
    """Of a chat completion."""
    token_ids: list[int] | None = None


class _PromptDetails(msgspec.Struct):
    cached_tokens: int | None = None


class _Usage(msgspec.Struct):
    prompt_tokens: int = 0
    completion_tokens: int = 0
    prompt_tokens_details: _PromptDetails | None = None


class _Error(msgspec.Struct):
    message: str = ""
    code: str | int | None = None
    type: str | None = None


class _Event(msgspec.Struct):
    choices: list[_Choice] = []
    usage: _Usage | None = None
    error: _Error | None = None


_event_decoder = msgspec.json.Decoder(_Event)


@dataclass(frozen=True, slots=True)
class Answer:
    """Times are those of `time.perf_counter`."""

    first: float
    """Its first piece of text came."""
    last: float
    end: float
    gaps: list[float]
    """Seconds between two pieces."""
    prompt_tokens: int
    output_tokens: int
    cached_tokens: int | None
    """None: the server does not say."""
    token_ids: list[int]
    """Of a request with `return_token_ids`."""
    text: str
    """Of a chat completion, without its thoughts."""


async def read_answer(connection: Connection, path: str, body: bytes) -> Answer:
    """Send a request for a stream with usage and read its answer to the end."""
    first = last = 0.0
    usage: _Usage | None = None
    gaps: list[float] = []
    ids: list[int] = []
    texts: list[str] = []
    async for payload in connection.events(path, body):
        now = time.perf_counter()
        if payload == b"[DONE]":
            continue
        try:
            event = _event_decoder.decode(payload)
        except msgspec.MsgspecError as error:
            raise AnswerError(f"in stream: an unreadable event: {error}") from error
        if event.error is not None:
            raise AnswerError(f"in stream: {event.error.code or event.error.type}: {event.error.message}")
        usage = event.usage or usage
        if not event.choices:
            continue
        choice = event.choices[0]
        if choice.token_ids:
            ids += choice.token_ids
        if choice.delta is not None:
            # The first chunk of a chat completion has only the role, and often comes before anything is computed.
            if choice.delta.empty:
                continue
            texts.append(choice.delta.content or "")
        if first:
            gaps.append(now - last)
        else:
            first = now
        last = now
    end = time.perf_counter()
    if usage is None or not first:
        raise AnswerError("stream ended without text and usage")
    details = usage.prompt_tokens_details
    cached = None if details is None else details.cached_tokens
    return Answer(
        first, last, end, gaps, usage.prompt_tokens, usage.completion_tokens, cached, ids, "".join(texts)
    )  # fmt: skip


def check_length(answer: Answer, asked: int) -> None:
    if answer.output_tokens != asked:
        raise AnswerError(f"fewer tokens than the {asked} asked for (does the server limit a request's time?)")


def explain(error: AnswerError | WireError) -> str:
    """Short enough to count equal errors together."""
    if not isinstance(error, StatusError):
        return str(error)
    try:
        detail = _event_decoder.decode(error.body).error
    except msgspec.MsgspecError:
        detail = None
    if detail is None:
        return f"HTTP {error.status}"
    return f"HTTP {error.status} {detail.code or detail.type}: {detail.message}"
