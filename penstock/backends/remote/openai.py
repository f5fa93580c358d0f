"""OpenAI's API and its relatives: chat, completions, embeddings.

The neutral form is this API's, so that requests pass as they are. Any server that claims to be compatible is asked like
this by default; it refuses itself what it does not know.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, ClassVar, TypeVar

import msgspec

from penstock.backends.remote.chunk import (
    Chunk,
    ChunkChoice,
    ChunkDelta,
    ChunkLogprobs,
    ChunkUsage,
    EmbeddingBatch,
    RerankScores,
    TokenOdds,
    bounded,
)
from penstock.backends.remote.dialect import Call, Dialect, Reader, encode, json_object, vectors
from penstock.backends.remote.failure import failed_stream, garbage
from penstock.backends.remote.features import Feature, Operation
from penstock.backends.remote.frames import Event
from penstock.protocol.errors import EngineUnavailable

T = TypeVar("T")
PATHS: Mapping[Operation, str] = {"chat": "/chat/completions", "completions": "/completions"}


class WireDelta(ChunkDelta):
    reasoning: str | None = None
    """Another name of `reasoning_content`."""


class WireChoice(ChunkChoice):
    delta: WireDelta = msgspec.field(default_factory=WireDelta)


class WireChunk(Chunk):
    choices: list[WireChoice] = msgspec.field(default_factory=list)  # type: ignore[assignment]


class TextLogprobs(msgspec.Struct):
    """The form of logprobs in completions: parallel lists; some servers send the form of chats."""

    tokens: list[str] = msgspec.field(default_factory=list)
    token_logprobs: list[float | None] = msgspec.field(default_factory=list)
    top_logprobs: list[dict[str, float] | None] | None = None
    content: list[TokenOdds] | None = None


class TextChoice(msgspec.Struct):
    index: int = 0
    text: str | None = None
    logprobs: TextLogprobs | None = None
    finish_reason: str | None = None
    stop_reason: str | int | None = None
    token_ids: list[int] | None = None
    prompt_token_ids: list[int] | None = None


class TextChunk(msgspec.Struct):
    choices: list[TextChoice] = msgspec.field(default_factory=list)
    usage: ChunkUsage | None = None
    error: Any = None


_chat = msgspec.json.Decoder(WireChunk)
_text = msgspec.json.Decoder(TextChunk)


def _decoded(decoder: msgspec.json.Decoder[T], data: bytes) -> T:
    """A chunk; of one that is not quite as it should be, what there is: fields that are null count as left out, and
    numbers may be text."""
    try:
        return decoder.decode(data)
    except (msgspec.MsgspecError, UnicodeDecodeError):
        try:
            return msgspec.convert(_without_null(json_object(data)), decoder.type, strict=False)
        except msgspec.ValidationError as error:
            raise garbage() from error


def _without_null(found: Any) -> Any:
    if isinstance(found, dict):
        return {name: _without_null(value) for name, value in found.items() if value is not None}
    return [_without_null(value) for value in found] if isinstance(found, list) else found


class ChatReader(Reader):
    """Chunks of a chat completion."""

    def read(self, event: Event) -> Iterator[Chunk]:
        if event.data == b"[DONE]":
            self.done = True
            return
        chunk = _decoded(_chat, event.data)
        if chunk.error is not None or event.kind == "error":
            raise stream_error(chunk.error)
        for choice in chunk.choices:
            if choice.delta.reasoning and not choice.delta.reasoning_content:
                choice.delta.reasoning_content = choice.delta.reasoning
        yield chunk


class TextReader(Reader):
    """Chunks of a completion."""

    def read(self, event: Event) -> Iterator[Chunk]:
        if event.data == b"[DONE]":
            self.done = True
            return
        chunk = _decoded(_text, event.data)
        if chunk.error is not None or event.kind == "error":
            raise stream_error(chunk.error)
        prompt = next((choice.prompt_token_ids for choice in chunk.choices if choice.prompt_token_ids), None)
        yield Chunk([_choice(choice) for choice in chunk.choices], chunk.usage, prompt_token_ids=prompt)


def _choice(sent: TextChoice) -> ChunkChoice:
    return ChunkChoice(
        sent.index,
        ChunkDelta(sent.text),
        _logprobs(sent.logprobs),
        sent.finish_reason,
        sent.stop_reason,
        sent.token_ids,
    )


def _logprobs(sent: TextLogprobs | None) -> ChunkLogprobs | None:
    if sent is None:
        return None
    if sent.content is not None:
        return ChunkLogprobs(sent.content)
    tops = sent.top_logprobs or [None] * len(sent.tokens)
    return ChunkLogprobs(
        [
            TokenOdds(token, 0.0 if odds is None else odds, None, [TokenOdds(*each) for each in (top or {}).items()])
            for token, odds, top in zip(sent.tokens, sent.token_logprobs, tops, strict=False)
        ]
    )


def stream_error(error: Any) -> Exception:
    """The error in the middle of a stream, an object or a text."""
    if isinstance(error, dict):
        kind = error.get("type") or error.get("code")
        said = error.get("message")
        return failed_stream(str(kind or ""), said if isinstance(said, str) else "")
    return failed_stream("")


class EmbeddingWire(msgspec.Struct):
    embedding: list[float]
    index: int = 0


class EmbeddingReply(msgspec.Struct):
    data: list[EmbeddingWire]
    usage: ChunkUsage | None = None


class RerankResult(msgspec.Struct):
    index: int
    relevance_score: float


class RerankUsage(msgspec.Struct):
    prompt_tokens: int = 0
    total_tokens: int = 0


class RerankReply(msgspec.Struct):
    results: list[RerankResult]
    usage: RerankUsage | None = None


class OpenAI(Dialect):
    """Any server with OpenAI's API."""

    name = "openai"
    features: ClassVar[frozenset[Feature]] = frozenset(
        (
            *("chat", "completions", "embeddings", "rerank", "tools", "tool_choice", "parallel_tool_calls", "logprobs"),
            *("top_logprobs", "n", "logit_bias", "seed", "response_format", "reasoning", "continue_final_message"),
            *("token_prompt", "echo"),
        )
    )

    @property
    def base(self) -> str:
        return self.upstream.url.rstrip("/")

    def call(self, operation: Operation, body: Mapping[str, Any]) -> Call:
        return Call(
            self.base + PATHS[operation],
            encode(self.rewritten(operation, {**body, "model": self.upstream.model})),
            {"accept": "text/event-stream"},
        )

    def rewritten(self, operation: Operation, body: dict[str, Any]) -> dict[str, Any]:
        """The body in this server's own spelling."""
        return body

    def reader(self, operation: Operation, body: Mapping[str, Any]) -> Reader:
        return ChatReader() if operation == "chat" else TextReader()

    def whole(self, operation: Operation, body: Mapping[str, Any], data: bytes) -> Iterator[Chunk]:
        """The answer in one piece: its message is a delta that has everything."""
        sent = json_object(data)
        try:
            for choice in sent.get("choices") or ():
                if "message" in choice:
                    choice["delta"] = choice.pop("message")
                    for index, call in enumerate(choice["delta"].get("tool_calls") or ()):
                        call["index"] = index
        except (TypeError, AttributeError) as error:
            raise garbage() from error
        return self.reader(operation, body).read(Event("", encode(sent)))

    def embed_call(self, texts: Sequence[str], dimensions: int | None = None) -> Call:
        body: dict[str, Any] = {"model": self.upstream.model, "input": list(texts), "encoding_format": "float"}
        if dimensions is not None:
            body["dimensions"] = dimensions
        return Call(f"{self.base}/embeddings", encode(body))

    def embeddings(self, data: bytes) -> EmbeddingBatch:
        try:
            reply = msgspec.convert(json_object(data), EmbeddingReply, strict=False)
        except msgspec.ValidationError as error:
            raise EngineUnavailable("The remote server of this model sent invalid vectors; try again.") from error
        rows = [row.embedding for row in sorted(reply.data, key=lambda row: row.index)]
        return EmbeddingBatch(vectors(rows), 0 if reply.usage is None else bounded(reply.usage.prompt_tokens))

    def rerank_call(self, query: str, documents: Sequence[str]) -> Call:
        """As Cohere, Jina, vLLM and this project have it; it is no part of OpenAI's own API."""
        body = {"model": self.upstream.model, "query": query, "documents": list(documents)}
        return Call(f"{self.base}/rerank", encode(body))

    def scores(self, data: bytes, documents: int) -> RerankScores:
        try:
            reply = msgspec.convert(json_object(data), RerankReply, strict=False)
        except msgspec.ValidationError as error:
            raise EngineUnavailable("The remote server of this model sent invalid scores; try again.") from error
        found = {result.index: result.relevance_score for result in reply.results}
        if len(found) != documents or min(found, default=0) < 0 or max(found, default=-1) != documents - 1:
            raise EngineUnavailable("The remote server of this model sent too few scores; try again.")
        used = 0 if reply.usage is None else reply.usage.prompt_tokens or reply.usage.total_tokens
        return RerankScores([found[index] for index in range(documents)], bounded(used))

    def health_call(self) -> Call:
        return Call(f"{self.base}/models")
