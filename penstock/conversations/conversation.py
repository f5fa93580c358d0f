"""A conversation: a system prompt, turns, and a summary of the turns that no longer fit.

A turn begins with a user message and ends before the next one, so tool calls and their results are never separated.
Turns are numbered from the first one ever (`first` of them are no longer stored), so a summary made in the background
still knows what it covers when turns were added or deleted meanwhile. Messages are numbered likewise: a number is never
used again. Values are immutable: every step makes a new one.
"""

from __future__ import annotations

import hashlib
import zlib
from collections.abc import Iterable, Sequence
from typing import Any, Literal

import msgspec

Message = dict[str, Any]
"""In the format of chat templates: `role`, `content`, and optionally `name`, `tool_calls`, `tool_call_id`."""
Turn = list[Message]
Overflow = Literal["truncate", "summarise"]
"""What happens to turns that do not fit the window: omitted, or summarised by the model."""
_FORMAT = b"\x01"


class Owner(msgspec.Struct, frozen=True):
    """The owner of a conversation. Nobody else can find it, by any id."""

    tenant: str
    user: str = ""

    @property
    def digest(self) -> str:
        """An unambiguous name for store keys, whatever the tenant and user are called."""
        return hashlib.sha256(f"{len(self.tenant)}:{self.tenant}{self.user}".encode()).hexdigest()[:32]


class Summary(msgspec.Struct, frozen=True):
    """A summary: notes on the turns before `covers`, oldest first. Belongs to one `epoch` of its conversation."""

    covers: int = 0
    notes: tuple[str, ...] = ()
    epoch: int = 0

    @property
    def text(self) -> str:
        return "\n".join(self.notes)


class Conversation(msgspec.Struct, frozen=True):
    """The stored history of a conversation."""

    system: str = ""
    turns: tuple[Turn, ...] = ()
    first: int = 0
    """Number of turns before the first stored one."""
    start: int = 0
    """Turns before this one are no longer in the prompt. Stored, so that successive prompts share their prefix in the
    cache."""
    room: int = 0
    """Tokens available for the prompt when `start` was chosen; in a much larger window it is chosen again."""
    epoch: int = 0
    """Incremented when a client replaces or deletes what was said, which invalidates the summary."""
    messages: int = 0
    """Messages so far; each stored one has its number as `number`, which nobody but this module and `numbered` sees."""
    metadata: dict[str, str] = {}
    arms: dict[str, str] = {}
    """By experiment, the arm that answers in it."""

    @property
    def end(self) -> int:
        """Number of turns so far, including deleted ones."""
        return self.first + len(self.turns)

    def since(self, start: int) -> list[Message]:
        """The messages from turn `start` on."""
        return [_plain(message) for turn in self.turns[max(0, start - self.first) :] for message in turn]

    def numbered(self) -> list[tuple[int, Message]]:
        """All stored messages with their numbers. Those of an older version have none, and are counted."""
        stored = [message for turn in self.turns for message in turn]
        return [(message.get("number", place), _plain(message)) for place, message in enumerate(stored)]

    def with_messages(self, kept: Sequence[tuple[int, Message]]) -> Conversation:
        """The conversation with `kept` instead of what is stored; for deleting messages, and parts of them."""
        turns = split_turns({**message, "number": number} for number, message in kept)
        return msgspec.structs.replace(self, turns=turns, start=self.first, epoch=self.epoch + 1)

    def extended(self, messages: Sequence[Message], *, keep_system: bool = True) -> Conversation:
        """The conversation with the client's next messages.

        Leading system messages become the system prompt. If the messages begin with a user message and contain an
        assistant message, the client keeps its own history, which replaces this one. An assistant message that is
        already stored (sent again before the results of its calls) is not added twice.
        """
        head = leading_system(messages)
        rest = list(messages[head:])
        system = "\n\n".join(str(message["content"]) for message in messages[:head])
        kept = self
        if rest and rest[0]["role"] == "user" and any(message["role"] == "assistant" for message in rest):
            kept = msgspec.structs.replace(self, turns=(), first=0, start=0, epoch=self.epoch + 1)
        said = kept.since(kept.first)
        if said and rest and rest[0] == said[-1] and rest[0]["role"] == "assistant":
            rest = rest[1:]
        kept = msgspec.structs.replace(kept, system=system if system and keep_system else self.system)
        return kept.followed_by(rest)

    def followed_by(self, messages: Sequence[Message]) -> Conversation:
        """The conversation with more messages: of the client, or the assistant's and tools' of the last turn."""
        if not messages:
            return self
        stored = [message for turn in self.turns for message in turn]
        count = max(self.messages, len(stored))
        added = [{**message, "number": count + place} for place, message in enumerate(messages)]
        return msgspec.structs.replace(self, turns=split_turns([*stored, *added]), messages=count + len(added))

    def own(self, summary: Summary) -> Summary:
        """The summary, or an empty one when the history was replaced since it was made."""
        return summary if summary.epoch == self.epoch else Summary(epoch=self.epoch)

    def bounded(self, most_bytes: int) -> Conversation:
        """The conversation without its oldest turns, so that it fits `most_bytes`; the last turn always stays."""
        sizes = [len(msgspec.msgpack.encode(turn)) for turn in self.turns]
        total, drop = sum(sizes), 0
        while total > most_bytes and drop < len(sizes) - 1:
            total -= sizes[drop]
            drop += 1
        if not drop:
            return self
        first = self.first + drop
        return msgspec.structs.replace(self, turns=self.turns[drop:], first=first, start=max(self.start, first))


def _plain(message: Message) -> Message:
    return {name: value for name, value in message.items() if name != "number"}


def leading_system(messages: Sequence[Message]) -> int:
    """The number of leading system messages."""
    return next((i for i, message in enumerate(messages) if message["role"] != "system"), len(messages))


def split_turns(messages: Iterable[Message]) -> tuple[Turn, ...]:
    turns: list[Turn] = []
    for message in messages:
        if not turns or (message["role"] == "user" and turns[-1][-1]["role"] != "user"):
            turns.append([])
        turns[-1].append(message)
    return tuple(turns)


def pack(value: Conversation | Summary) -> bytes:
    """The stored form: compressed MessagePack."""
    return _FORMAT + zlib.compress(msgspec.msgpack.encode(value))


_conversation = msgspec.msgpack.Decoder(Conversation)
_summary = msgspec.msgpack.Decoder(Summary)


def unpack_conversation(data: bytes) -> Conversation:
    return _conversation.decode(_inflated(data))


def unpack_summary(data: bytes) -> Summary:
    return _summary.decode(_inflated(data)) if data else Summary()


def _inflated(data: bytes) -> bytes:
    if data[:1] != _FORMAT:
        raise ValueError("a stored conversation has a format that this version does not know")
    return zlib.decompress(data[1:])
