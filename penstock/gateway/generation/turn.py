"""A turn: what was said before a request, and what becomes of its answer.

`StatelessTurn` is the turn of a request that brings its whole conversation. The package of stored conversations
implements the same interface for those that the gateway keeps.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from types import MappingProxyType
from typing import Any, Protocol

from msgspec import Struct

from penstock.gateway.app.exchange import Exchange
from penstock.gateway.generation.attempt import Attempt
from penstock.gateway.generation.base import Generation
from penstock.gateway.generation.chat_messages import Message, call_names
from penstock.gateway.generation.choice import Piece
from penstock.gateway.generation.prompt import ChatPrompt, MessagePrompt
from penstock.gateway.generation.sampling import TokenLimit
from penstock.gateway.generation.schemas import NamedConversation
from penstock.gateway.generation.sources import Sources


class TurnInput(Struct, frozen=True):
    """What a request adds to its conversation, and the room for the prompt."""

    messages: list[Message]
    """The client's new messages."""
    following: Sequence[Message]
    """What the assistant and its tools have said in this turn already."""
    window: int
    """Tokens of the prompt and the answer together."""
    limit: TokenLimit
    sources: Sources | None = None
    """For this prompt; they do not become part of the conversation."""


class TurnRecorder(Protocol):
    """Writes down what the assistant says in a turn, and stores it at the end."""

    generation: Generation
    """The last generation of the turn."""
    report: dict[str, Any]
    """What the reply says about the conversation; empty when nothing is stored."""

    def add(self, piece: Piece) -> None: ...

    async def store(self, said: Sequence[Message] | None = None) -> None:
        """`said`: the messages of the answer when it has several; otherwise one message with what was added."""


class Turn(Protocol):
    """The place of a request in its conversation."""

    @property
    def stored(self) -> bool:
        """Whether the gateway keeps the conversation."""

    @property
    def history(self) -> Sequence[Message]:
        """What was said before this turn, as far as it is stored."""

    @property
    def calls(self) -> Mapping[str, str]:
        """Functions that were called earlier, by the id of the call; tool results may answer them."""

    def source_room(self, room: int, window: int) -> int:
        """How many of `room` free tokens sources may fill."""

    async def tokens(self, attempt: Attempt, prompt: ChatPrompt, added: TurnInput) -> list[int]:
        """The prompt of the whole conversation."""

    async def messages(self, attempt: Attempt, prompt: MessagePrompt, added: TurnInput) -> list[Message]:
        """The same as messages, for a model that another server runs."""

    def replayed(self) -> Turn:
        """The same prompt for another model, once this turn is over; nothing is stored of it."""

    def recorder(self, attempt: Attempt, generation: Generation) -> TurnRecorder: ...


class Conversations(Protocol):
    """Opens turns."""

    def open(
        self,
        exchange: Exchange,
        conversation: str | NamedConversation | None,
        *,
        keep_system: bool = True,
        choices: int = 1,
    ) -> AbstractAsyncContextManager[Turn]:
        """The turn of a request, as soon as the conversation it names is free."""


class StatelessTurn:
    """A request whose messages are the whole conversation."""

    __slots__ = ()

    stored = False
    history: Sequence[Message] = ()
    calls: Mapping[str, str] = MappingProxyType({})

    def source_room(self, room: int, window: int) -> int:
        return room

    async def tokens(self, attempt: Attempt, prompt: ChatPrompt, added: TurnInput) -> list[int]:
        return await prompt.tokens(_all(added))

    async def messages(self, attempt: Attempt, prompt: MessagePrompt, added: TurnInput) -> list[Message]:
        return _all(added)

    def replayed(self) -> Turn:
        return self

    def recorder(self, attempt: Attempt, generation: Generation) -> TurnRecorder:
        return UnstoredAnswer(generation)


class ReplayedTurn(StatelessTurn):
    """`prompt`: everything that the model of a stored turn was given, the messages of the request too."""

    __slots__ = ("prompt",)

    def __init__(self, prompt: Sequence[Message]) -> None:
        self.prompt = prompt

    @property
    def calls(self) -> Mapping[str, str]:  # type: ignore[override]
        return call_names(self.prompt)

    async def tokens(self, attempt: Attempt, prompt: ChatPrompt, added: TurnInput) -> list[int]:
        return await prompt.tokens(self._whole(added))

    async def messages(self, attempt: Attempt, prompt: MessagePrompt, added: TurnInput) -> list[Message]:
        return self._whole(added)

    def _whole(self, added: TurnInput) -> list[Message]:
        messages = [*self.prompt, *added.following]
        return messages if added.sources is None else added.sources.in_prompt(messages)


def _all(added: TurnInput) -> list[Message]:
    messages = [*added.messages, *added.following]
    return messages if added.sources is None else added.sources.in_prompt(messages)


class UnstoredAnswer:
    """The recorder of a turn that is not stored."""

    __slots__ = ("generation", "report")

    def __init__(self, generation: Generation) -> None:
        self.generation = generation
        self.report: dict[str, Any] = {}

    def add(self, piece: Piece) -> None:
        return

    async def store(self, said: Sequence[Message] | None = None) -> None:
        return


STATELESS = StatelessTurn()
