"""The neutral form of a streamed answer, which every dialect produces.

Its fields are those of OpenAI's chat chunks, whatever API the server speaks; the text of a completion is in
`delta.content`, too. Invariants: `index` of a tool call counts the calls of a choice from 0, the first piece of a call
has its id and name, and the arguments of its pieces put together are one JSON object.
"""

from __future__ import annotations

from typing import Any

import msgspec


class FunctionDelta(msgspec.Struct):
    name: str | None = None
    arguments: str | None = None


class CallDelta(msgspec.Struct):
    index: int = 0
    id: str | None = None
    function: FunctionDelta | None = None


class ChunkDelta(msgspec.Struct):
    content: str | None = None
    reasoning_content: str | None = None
    """Thoughts, which come before the answer and are not part of it."""
    refusal: str | None = None
    """What a model says instead of an answer."""
    tool_calls: list[CallDelta] | None = None


class TokenOdds(msgspec.Struct):
    token: str = ""
    logprob: float = 0.0
    bytes: list[int] | None = None
    top_logprobs: list[TokenOdds] = msgspec.field(default_factory=list)


class ChunkLogprobs(msgspec.Struct):
    content: list[TokenOdds] | None = None


class ChunkChoice(msgspec.Struct):
    index: int = 0
    delta: ChunkDelta = msgspec.field(default_factory=ChunkDelta)
    logprobs: ChunkLogprobs | None = None
    finish_reason: str | None = None
    """One of OpenAI's: stop, length, tool_calls, content_filter."""
    stop_reason: str | int | None = None
    """The stop string or token that ended it, where the server tells."""
    token_ids: list[int] | None = None
    """Its tokens, where they were asked for and the server tells."""


class PromptDetails(msgspec.Struct):
    cached_tokens: int | None = None


class CompletionDetails(msgspec.Struct):
    reasoning_tokens: int | None = None


class ChunkUsage(msgspec.Struct):
    """Tokens counted by the server; those read from its prompt cache are part of `prompt_tokens`."""

    prompt_tokens: int = 0
    completion_tokens: int = 0
    prompt_tokens_details: PromptDetails | None = None
    completion_tokens_details: CompletionDetails | None = None


MOST_TOKENS = 2**31 - 1


def plausible(usage: ChunkUsage) -> ChunkUsage:
    """A usage that can be charged, whatever a server says: nothing is negative or without bound, no part larger than
    the whole."""
    prompt, completion = bounded(usage.prompt_tokens), bounded(usage.completion_tokens)
    cached, thought = usage.prompt_tokens_details, usage.completion_tokens_details
    return ChunkUsage(
        prompt,
        completion,
        None if cached is None else PromptDetails(bounded(cached.cached_tokens or 0, prompt)),
        None if thought is None else CompletionDetails(bounded(thought.reasoning_tokens or 0, completion)),
    )


def bounded(tokens: int, most: int = MOST_TOKENS) -> int:
    return min(max(tokens, 0), most)


class Chunk(msgspec.Struct):
    """One event of a stream; only the fields used here."""

    choices: list[ChunkChoice] = msgspec.field(default_factory=list)
    usage: ChunkUsage | None = None
    error: Any = None
    prompt_token_ids: list[int] | None = None
    """Where they were asked for and the server tells."""


class EmbeddingBatch(msgspec.Struct, frozen=True):
    """Vectors of texts, in their order."""

    vectors: list[list[float]]
    prompt_tokens: int


class RerankScores(msgspec.Struct, frozen=True):
    """A score per document, in their order; larger is better."""

    scores: list[float]
    prompt_tokens: int


class TokenCount(msgspec.Struct, frozen=True):
    """How many tokens a server says a text has, and which, where it tells."""

    count: int
    tokens: list[int] | None = None


def text_chunk(text: str, index: int = 0) -> Chunk:
    return Chunk([ChunkChoice(index, ChunkDelta(text))])


def end_chunk(reason: str, usage: ChunkUsage | None = None, index: int = 0) -> Chunk:
    return Chunk([ChunkChoice(index, finish_reason=reason)], usage)
