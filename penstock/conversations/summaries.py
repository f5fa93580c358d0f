"""Summarises the oldest turns of a conversation as notes, so that they can leave the prompt.

Each call adds one note on the turns it covers and leaves earlier notes alone, so a fact is rewritten once and not with
every summary, which is how small models lose facts. Only when the notes exceed their budget are the oldest two merged.
The model and the tokenizer are passed in as functions.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass

from penstock.conversations.conversation import Conversation, Message, Summary, Turn

Ask = Callable[[list[Message], int], Awaitable[str]]
"""The model's answer to messages, with a maximum number of tokens."""

# Worded so that small models follow it too: a list of the messages, then one plain question.
_TASK = "You are a helpful assistant that summarizes conversations."
_QUESTION = "Summarize what the user said, with names, numbers and places, and what was answered, in a few sentences."
_WORDS = {"user": "- The user said:", "assistant": "Answered:", "tool": "A tool returned:", "system": "Told:"}
ANSWER_TOKENS = 64
"""Maximum tokens of an answer or tool result in a transcript: the summary is mostly about what the user said."""
_HEADING = "Notes on the earlier part of this conversation:"


@dataclass(frozen=True, slots=True)
class SummaryBudget:
    """Token limits of a summary."""

    note: int
    """One note."""
    notes: int
    """All notes together."""
    transcript: int
    """The part of the conversation in one request to the model."""


@dataclass(frozen=True, slots=True)
class Tokens:
    """The two tokenizer functions that a summary needs."""

    count: Callable[[str], int]
    cut: Callable[[str, int], str]
    """Truncates a text to a number of tokens."""


def with_notes(system: str, summary: Summary) -> list[Message]:
    """The system message with the system prompt and the notes; none when both are empty."""
    notes = f"{_HEADING}\n{summary.text}" if summary.notes else ""
    content = "\n\n".join(part for part in (system, notes) if part)
    return [{"role": "system", "content": content}] if content else []


async def _at_once(work: Callable[[], list[str]]) -> list[str]:
    return work()


async def condense(
    conversation: Conversation,
    summary: Summary,
    upto: int,
    *,
    ask: Ask,
    tokens: Tokens,
    room: SummaryBudget,
    in_thread: Callable[[Callable[[], list[str]]], Awaitable[list[str]]] = _at_once,
) -> Summary:
    """Notes on everything before turn `upto`. Turns for which the model returns nothing count as covered too.
    `in_thread` runs what takes long."""
    notes = list(summary.notes)
    waiting = conversation.turns[max(0, summary.covers - conversation.first) : max(0, upto - conversation.first)]
    for transcript in await in_thread(lambda: list(transcripts(waiting, tokens, room.transcript))):
        note = (await ask(question(transcript), room.note)).strip()
        if note:
            notes.append(tokens.cut(note, room.note))
    while len(notes) > 1 and sum(map(tokens.count, notes)) > room.notes:
        merged = (await ask(question("\n".join(notes[:2])), room.note)).strip()
        notes[:2] = [tokens.cut(merged or "\n".join(notes[:2]), room.note)]
    return Summary(max(upto, summary.covers), tuple(notes), conversation.epoch)


def transcripts(turns: Sequence[Turn], tokens: Tokens, most: int) -> Iterable[str]:
    """The turns as text, in pieces of at most `most` tokens; longer turns are truncated."""
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
    """The messages that ask the model to summarise a part of a conversation."""
    return [
        {"role": "system", "content": _TASK},
        {"role": "user", "content": f"{transcript}\n\n{_QUESTION}"},
    ]
