"""What an engine said, kept so that it can be said again: one delta per choice, and the way back into a stream.

The tokens are kept, not the text: said again they pass stop strings, tool parsing and guardrails anew, so an old answer
obeys today's rules and looks like a fresh one to every API family.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import msgspec

from penstock.engine.request import Delta

LONGEST_QUESTION = 1000
"""Characters: about what an encoder reads, and what can be taken apart in no time."""
EVENT_TOKENS = 32
"""Tokens per event when a kept answer is streamed."""


@dataclass(frozen=True, slots=True)
class Question:
    """The last thing a user said, and all else that the request says, which must be equal for a semantic hit."""

    text: str
    context: bytes


_decoder = msgspec.msgpack.Decoder(list[Delta])
encode_answer = msgspec.msgpack.Encoder().encode


def decode_answer(data: bytes) -> list[Delta]:
    return _decoder.decode(data)


class Memory:
    """Gathers the deltas of each choice into one."""

    def __init__(self, choices: int) -> None:
        self.deltas = [Delta("") for _ in range(choices)]

    def add(self, index: int, delta: Delta) -> None:
        kept = self.deltas[index]
        kept.tokens.extend(delta.tokens)
        if delta.logprobs is not None:
            kept.logprobs = [*(kept.logprobs or ()), *delta.logprobs]
        if delta.prompt_logprobs is not None:
            kept.prompt_logprobs = delta.prompt_logprobs
        if delta.finish_reason is not None:
            kept.finish_reason = delta.finish_reason


def replayed(deltas: Sequence[Delta]) -> Iterator[tuple[int, Delta]]:
    """Choices and parts of their answers, in turns."""
    longest = max(len(delta.tokens) for delta in deltas)
    for start in range(0, max(longest, 1), EVENT_TOKENS):
        for index, delta in enumerate(deltas):
            end = start + EVENT_TOKENS
            if start and start >= len(delta.tokens):
                continue
            yield (
                index,
                Delta(
                    "",
                    delta.tokens[start:end],
                    finish_reason=delta.finish_reason if end >= len(delta.tokens) else None,
                    logprobs=None if delta.logprobs is None else delta.logprobs[start:end],
                    prompt_logprobs=None if start else delta.prompt_logprobs,
                ),
            )
