"""Answers as deltas: recorded while an engine produces them, and replayed later instead of asking an engine.

Tokens are recorded, not text. A replayed answer passes stop strings, tool parsing and guardrails again, so it obeys the
rules of today and looks like a fresh one to every API family.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from penstock.engine.request import Delta

EVENT_TOKENS = 32
"""Tokens per event when a recorded answer is streamed."""


class AnswerRecord:
    """Gathers the deltas of each choice into one."""

    __slots__ = ("deltas",)

    def __init__(self, choices: int) -> None:
        self.deltas = [Delta("") for _ in range(choices)]

    def add(self, index: int, delta: Delta) -> None:
        recorded = self.deltas[index]
        recorded.extend(delta)
        if delta.prompt_logprobs is not None:
            recorded.prompt_logprobs = delta.prompt_logprobs


def replayed(deltas: Sequence[Delta]) -> Iterator[tuple[int, Delta]]:
    """The parts of a recorded answer with the index of their choice; the choices alternate."""
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
