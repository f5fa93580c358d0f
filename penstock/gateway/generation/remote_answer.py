"""Answers of remote models as the response cache holds them: what the server said, before guards and citations.

A replayed answer passes stop strings, guardrails and citations again, so that it obeys the rules of today.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from msgspec import Struct

from penstock.backends.remote.chunk import CallDelta, ChunkChoice, ChunkDelta, ChunkLogprobs, FunctionDelta

EVENT_CHARACTERS = 128
"""Characters per event when a recorded answer is streamed."""


class RecordedAnswer(Struct, frozen=True, array_like=True):
    """A complete answer: a chunk per choice."""

    choices: list[ChunkChoice]
    prompt_tokens: int
    completion_tokens: int


def record_choice(chunks: Sequence[ChunkChoice]) -> ChunkChoice:
    """All chunks of a choice as one."""
    whole = ChunkChoice(0, ChunkDelta(content=""))
    thoughts: list[str] = []
    texts: list[str] = []
    calls: dict[int, CallDelta] = {}
    for chunk in chunks:
        texts.append((chunk.delta.content or "") + (chunk.delta.refusal or ""))
        thoughts.append(chunk.delta.reasoning_content or "")
        for call in chunk.delta.tool_calls or ():
            known = calls.setdefault(call.index, CallDelta(call.index, None, FunctionDelta("", "")))
            known.id = known.id or call.id
            assert known.function is not None
            if call.function is not None:
                known.function.name = known.function.name or call.function.name
                known.function.arguments = (known.function.arguments or "") + (call.function.arguments or "")
        if chunk.logprobs is not None and chunk.logprobs.content:
            whole.logprobs = whole.logprobs or ChunkLogprobs([])
            assert whole.logprobs.content is not None
            whole.logprobs.content += chunk.logprobs.content
        if chunk.token_ids:
            whole.token_ids = [*(whole.token_ids or ()), *chunk.token_ids]
        whole.finish_reason = chunk.finish_reason or whole.finish_reason
        whole.stop_reason = chunk.stop_reason if chunk.stop_reason is not None else whole.stop_reason
    whole.delta.content = "".join(texts)
    whole.delta.reasoning_content = "".join(thoughts) or None
    whole.delta.tool_calls = [calls[index] for index in sorted(calls)] or None
    return whole


def replayed_chunks(answer: RecordedAnswer) -> Iterator[tuple[int, ChunkChoice]]:
    """The parts of a recorded answer, each with the index of its choice."""
    for index, whole in enumerate(answer.choices):
        text = whole.delta.content or ""
        if whole.logprobs is not None or whole.token_ids or len(text) <= EVENT_CHARACTERS:
            yield index, whole
            continue
        if whole.delta.reasoning_content:
            yield index, ChunkChoice(0, ChunkDelta(reasoning_content=whole.delta.reasoning_content))
        for start in range(0, len(text), EVENT_CHARACTERS):
            yield index, ChunkChoice(0, ChunkDelta(content=text[start : start + EVENT_CHARACTERS]))
        yield (
            index,
            ChunkChoice(
                0,
                ChunkDelta(tool_calls=whole.delta.tool_calls),
                finish_reason=whole.finish_reason,
                stop_reason=whole.stop_reason,
            ),
        )
