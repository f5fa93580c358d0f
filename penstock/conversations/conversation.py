"""What a conversation is: a system prompt, turns, and notes on the turns that no longer fit.

A turn begins with what a user says and ends before the next user speaks, so calls and their results are never parted.
Turns are counted from the first one ever said (`first` of them are no longer stored), so that a summary made in the
background still knows what it covers when turns were added or forgotten meanwhile. Values here are not changed in
place: every step makes a new one.
"""

from __future__ import annotations

import hashlib
import zlib
from collections.abc import Iterable, Sequence
from typing import Any, Literal

import msgspec

Message = dict[str, Any]
"""As chat templates read it: `role`, `content`, and where they apply `name`, `tool_calls`, `tool_call_id`."""
Turn = list[Message]
Overflow = Literal["truncate", "summarise"]
"""What becomes of turns that do not fit the window: forgotten, or condensed by the model."""
_FORMAT = b"\x01"


class Owner(msgspec.Struct, frozen=True):
    """Whose conversation it is. Nobody else finds it, by any id."""

    tenant: str
    user: str = ""

    @property
    def digest(self) -> str:
        """A name for keys in stores, which no choice of tenant and user can make ambiguous."""
        return hashlib.sha256(f"{len(self.tenant)}:{self.tenant}{self.user}".encode()).hexdigest()[:32]


class Summary(msgspec.Struct, frozen=True):
    """Notes on the turns up to `covers`, oldest first. It belongs to one `epoch` of its conversation."""

    covers: int = 0
    notes: tuple[str, ...] = ()
    epoch: int = 0

    @property
    def text(self) -> str:
        return "\n".join(self.notes)


class Conversation(msgspec.Struct, frozen=True):
    """Everything said, as far as it is kept."""

    system: str = ""
    turns: tuple[Turn, ...] = ()
    first: int = 0
    """How many turns were said before the first one that is stored."""
    start: int = 0
    """Turns before this one have left the prompt. Kept, so that prompts go on beginning alike and find their prefix
    in the cache."""
    room: int = 0
    """How many tokens there were for the prompt when `start` was chosen: in a much larger window it is chosen anew."""
    epoch: int = 0
    """Raised when a client replaces the whole history: what was noted of the old one is void."""

    @property
    def end(self) -> int:
        """How many turns were ever said."""
        return self.first + len(self.turns)

    def since(self, start: int) -> list[Message]:
        """The messages from turn `start` on."""
        return [message for turn in self.turns[max(0, start - self.first) :] for message in turn]

    def extended(self, messages: Sequence[Message], *, keep_system: bool = True) -> Conversation:
        """With what a client sends next.

        System messages at the beginning are the system prompt from now on. Messages in which a user speaks first and
        the assistant answers are a whole conversation: the client keeps its own history, which replaces this one. An
        assistant's message that was stored already (sent again before the results of its calls) is not taken twice.
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
        return msgspec.structs.replace(
            kept, system=system if system and keep_system else self.system, turns=split_turns([*said, *rest])
        )

    def followed_by(self, messages: Sequence[Message]) -> Conversation:
        """With what the assistant and its tools say in the last turn."""
        if not messages:
            return self
        return msgspec.structs.replace(self, turns=split_turns([*self.since(0), *messages]))

    def own(self, summary: Summary) -> Summary:
        """The summary, or an empty one when the history was replaced since it was made."""
        return summary if summary.epoch == self.epoch else Summary(epoch=self.epoch)

    def bounded(self, most_bytes: int) -> Conversation:
        """Without the oldest turns that make it larger than `most_bytes`; the last one stays in any case."""
        sizes = [len(msgspec.msgpack.encode(turn)) for turn in self.turns]
        total, drop = sum(sizes), 0
        while total > most_bytes and drop < len(sizes) - 1:
            total -= sizes[drop]
            drop += 1
        if not drop:
            return self
        first = self.first + drop
        return msgspec.structs.replace(self, turns=self.turns[drop:], first=first, start=max(self.start, first))


def leading_system(messages: Sequence[Message]) -> int:
    """How many system messages a conversation begins with."""
    return next((i for i, message in enumerate(messages) if message["role"] != "system"), len(messages))


def split_turns(messages: Iterable[Message]) -> tuple[Turn, ...]:
    turns: list[Turn] = []
    for message in messages:
        if not turns or (message["role"] == "user" and turns[-1][-1]["role"] != "user"):
            turns.append([])
        turns[-1].append(message)
    return tuple(turns)


def pack(value: Conversation | Summary) -> bytes:
    """For a store: MessagePack, compressed."""
    return _FORMAT + zlib.compress(msgspec.msgpack.encode(value))


_conversation = msgspec.msgpack.Decoder(Conversation)
_summary = msgspec.msgpack.Decoder(Summary)


def unpack_conversation(data: bytes) -> Conversation:
    return _conversation.decode(_inflated(data))


def unpack_summary(data: bytes) -> Summary:
    return _summary.decode(_inflated(data)) if data else Summary()


def _inflated(data: bytes) -> bytes:
    if data[:1] != _FORMAT:
        raise ValueError("a stored conversation is in a format that this version does not know")
    return zlib.decompress(data[1:])
