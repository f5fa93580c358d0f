"""Turns into notes: what a model is asked so that the oldest turns of a conversation may leave the prompt.

Each call adds one note on the turns it covers and leaves earlier notes alone: a fact is then rewritten once, not once
per summary, which is what small models lose facts by. Only when the notes outgrow their room are the oldest two made
one. The model and the tokenizer are given as functions; nothing here knows what they are.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass

from penstock.conversations.conversation import Conversation, Message, Summary, Turn

Ask = Callable[[list[Message], int], Awaitable[str]]
"""The model's answer to messages, of so many tokens at most."""

# Words that also small models do what they say for: a list of what was said, and one plain question after it.
_TASK = "You are a helpful assistant that summarizes conversations."
_QUESTION = "Summarize what the user said, with names, numbers and places, and what was answered, in a few sentences."
_WORDS = {"user": "- The user said:", "assistant": "Answered:", "tool": "A tool returned:", "system": "Told:"}
ANSWER_TOKENS = 64
"""What is kept of an answer or a result in a transcript: a summary is of what the user said above all."""
_HEADING = "Notes on the earlier part of this conversation:"


@dataclass(frozen=True, slots=True)
class SummaryBudget:
    """Token counts that bound a summary."""

    note: int
    """One note."""
    notes: int
    """All notes together."""
    transcript: int
    """What one question to the model may hold of the conversation."""


@dataclass(frozen=True, slots=True)
class Tokens:
    """The two things a summary needs of a tokenizer."""

    count: Callable[[str], int]
    cut: Callable[[str, int], str]
    """The beginning of a text, of so many tokens at most."""


def with_notes(system: str, summary: Summary) -> list[Message]:
    """The system message of a prompt whose oldest turns are notes; none when there is nothing to say."""
    notes = f"{_HEADING}\n{summary.text}" if summary.notes else ""
    content = "\n\n".join(part for part in (system, notes) if part)
    return [{"role": "system", "content": content}] if content else []


async def condense(
    conversation: Conversation, summary: Summary, upto: int, *, ask: Ask, tokens: Tokens, room: SummaryBudget
) -> Summary:
    """Notes on everything before turn `upto`. What the model leaves empty is covered all the same."""
    notes = list(summary.notes)
    waiting = conversation.turns[max(0, summary.covers - conversation.first) : max(0, upto - conversation.first)]
    for transcript in transcripts(waiting, tokens, room.transcript):
        note = (await ask(question(transcript), room.note)).strip()
        if note:
            notes.append(tokens.cut(note, room.note))
    while len(notes) > 1 and sum(map(tokens.count, notes)) > room.notes:
        merged = (await ask(question("\n".join(notes[:2])), room.note)).strip()
        notes[:2] = [tokens.cut(merged or "\n".join(notes[:2]), room.note)]
    return Summary(max(upto, summary.covers), tuple(notes), conversation.epoch)


def transcripts(turns: Sequence[Turn], tokens: Tokens, most: int) -> Iterable[str]:
    """The turns as text, in pieces of at most `most` tokens; a turn that is longer is cut."""
    piece, size = "", 0
    for turn in turns:
        text = tokens.cut(" ".join(_said(message, tokens) for message in turn), most)
        length = tokens.count(text)
        if piece and size + length > most:
            yield piece
            piece, size = "", 0
        piece, size = f"{piece}\n{text}" if piece else text, size + length
    if piece:
        yield piece


def _said(message: Message, tokens: Tokens) -> str:
    calls = [f"{call['function']['name']}({call['function']['arguments']})" for call in message.get("tool_calls") or ()]
    said = " ".join(part for part in (str(message["content"] or ""), *calls) if part)
    if message["role"] != "user":
        said = tokens.cut(said, ANSWER_TOKENS)
    return f"{_WORDS[message['role']]} {said}"


def question(transcript: str) -> list[Message]:
    """What the model is asked about a part of a conversation."""
    return [
        {"role": "system", "content": _TASK},
        {"role": "user", "content": f"{transcript}\n\n{_QUESTION}"},
    ]
