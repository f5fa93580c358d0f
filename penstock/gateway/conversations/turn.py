"""A turn of a stored conversation: from the request that names it to the answer that is stored.

The prompt is the system prompt, a summary of condensed turns, the turns that fit, and the new messages. A turn is
stored when its answer is complete, before the end of the answer is sent; a turn that failed or whose client left is
not. A header and the answer say how much was left out of the prompt.
"""

from __future__ import annotations

import re
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager, nullcontext
from typing import Any

import msgspec

from penstock.config.context import ConversationsConfig
from penstock.conversations import HeldConversation, Message, Owner, SessionBusy, Sessions
from penstock.conversations.conversation import Overflow, leading_system
from penstock.conversations.summaries import with_notes
from penstock.conversations.window import fit_turns
from penstock.gateway.accounting.detached import detached_work
from penstock.gateway.app.exchange import Exchange
from penstock.gateway.conversations.summary import ConversationPrompt, Rendered, Summariser
from penstock.gateway.generation.assistant_message import THOUGHTS, AssistantMessage
from penstock.gateway.generation.attempt import Attempt
from penstock.gateway.generation.base import Generation
from penstock.gateway.generation.chat_messages import call_names
from penstock.gateway.generation.choice import Piece
from penstock.gateway.generation.lifecycle import GenerationLifecycle
from penstock.gateway.generation.prompt import ChatPrompt, MessagePrompt
from penstock.gateway.generation.schemas import NamedConversation
from penstock.gateway.generation.settings import GenerationSettings
from penstock.gateway.generation.tokenization import Tokenization
from penstock.gateway.generation.turn import STATELESS, ReplayedTurn, Turn, TurnInput
from penstock.protocol.errors import ConversationBusy, InvalidRequest, ServiceUnavailable
from penstock.routing.registry import ServedModel
from penstock.routing.remotes import RemoteModel
from penstock.storage import DatabaseError
from penstock.telemetry.metrics import Metrics

TARGET = 0.75
"""Share of the room that a prompt fills after turns were left out, so that the next turns fit."""
WIDER = 1.5
"""How much more room there must be before turns that were left out are considered again."""
AHEAD = 0.7
"""Share of the room from which turns are condensed in the background, before they have to be."""
_HEADER = b"x-session-id"
_ID = re.compile("[A-Za-z0-9._:-]{1,128}")


class StatelessConversations:
    """A gateway without a store for conversations."""

    def open(
        self,
        exchange: Exchange,
        conversation: str | NamedConversation | None,
        *,
        keep_system: bool = True,
        choices: int = 1,
    ) -> AbstractAsyncContextManager[Turn]:
        if conversation is not None:
            raise InvalidRequest(
                "`conversation` needs a store, and this gateway stores no conversations; send all messages.",
                param="conversation",
                code="unsupported_parameter",
            )
        return nullcontext(STATELESS)


class StoredConversations:
    """The conversations that the gateway stores."""

    def __init__(
        self,
        sessions: Sessions,
        config: ConversationsConfig,
        settings: GenerationSettings,
        lifecycle: GenerationLifecycle,
        tokenization: Tokenization,
        metrics: Metrics,
    ) -> None:
        self.sessions = sessions
        self.config = config
        self.tokenization = tokenization
        self.metrics = metrics.context
        self.summariser = Summariser(sessions, config, settings, lifecycle, metrics)

    def open(
        self,
        exchange: Exchange,
        conversation: str | NamedConversation | None,
        *,
        keep_system: bool = True,
        choices: int = 1,
    ) -> AbstractAsyncContextManager[Turn]:
        """The turn of the conversation that a request names, as soon as no other turn of it runs."""
        sent = exchange.header(_HEADER)
        if conversation is None and sent is None:
            return nullcontext(STATELESS)
        id, overflow = _named(sent, conversation)
        if choices > 1:
            raise InvalidRequest("A conversation goes on with one answer; `n` must be 1.", param="n")
        exchange.session = id
        return self._turn(exchange, owner_of(exchange), id, overflow or self.config.overflow, keep_system)

    @asynccontextmanager
    async def _turn(
        self, exchange: Exchange, owner: Owner, id: str, overflow: Overflow, keep_system: bool
    ) -> AsyncIterator[Turn]:
        try:
            async with self.sessions.turn(owner, id) as held:
                exchange.arms = held.conversation.arms
                yield StoredTurn(self, held, overflow, keep_system=keep_system)
        except SessionBusy as busy:
            raise ConversationBusy(f"The conversation `{id}` is busy: {busy}; send this one again.") from busy
        except DatabaseError as error:
            raise _unavailable() from error


class StoredTurn:
    """A turn that is being answered."""

    stored = True

    def __init__(
        self, conversations: StoredConversations, held: HeldConversation, overflow: Overflow, *, keep_system: bool
    ) -> None:
        self._conversations = conversations
        self.held = held
        self._overflow = overflow
        self._keep_system = keep_system
        self._draft = held.conversation
        self._summary = held.summary
        self._system = ""
        self._start = 0
        self._taken = False
        """The client's messages are added once, however many steps the answer takes."""
        self._room = self._window = 0

    @property
    def history(self) -> list[Message]:
        return self.held.conversation.since(0)

    @property
    def calls(self) -> Mapping[str, str]:
        return call_names(self.history)

    @property
    def report(self) -> dict[str, Any]:
        """What the answer says about the conversation: turns that the prompt has only as a summary, or not at all."""
        return {
            "id": self.held.id,
            "turns": self._draft.end,
            "dropped_turns": self._start,
            "summarised_turns": min(self._summary.covers, self._start),
        }

    def source_room(self, room: int, window: int) -> int:
        return min(room, window // 2)

    async def tokens(self, attempt: Attempt, prompt: ChatPrompt, added: TurnInput) -> list[int]:
        """Without the oldest turns, if they do not fit."""
        return (await self._rendered(attempt, prompt, added)).tokens

    async def messages(self, attempt: Attempt, prompt: MessagePrompt, added: TurnInput) -> list[Message]:
        return (await self._rendered(attempt, prompt, added)).messages

    async def _rendered(self, attempt: Attempt, prompt: ChatPrompt | MessagePrompt, added: TurnInput) -> Rendered:
        conversations = self._conversations
        room = self._take(added)
        draft = ConversationPrompt(prompt, self._system, self._draft.followed_by(added.following), added.sources)
        before = self._start
        rendered = await draft.rendered(self._summary, self._start)
        if rendered.length > room and self._overflow == "summarise":
            self._summary = await conversations.summariser.summarise(attempt, draft, self.held, self._summary, room)
            self._start = max(self._start, self._summary.covers)
            conversations.metrics.dropped("summarised", self._start - before)
            before = self._start
            rendered = await draft.rendered(self._summary, self._start)
        if rendered.length > room:
            self._start = await prompt.tokenization.run(
                prompt.tenant,
                0,
                fit_turns,
                self._draft.end,
                start=self._start,
                keep=conversations.config.keep_turns,
                budget=room,
                target=int(room * TARGET),
                count=draft.counter(self._summary),
            )
            conversations.metrics.dropped("truncated", self._start - before)
            rendered = await draft.rendered(self._summary, self._start)
        self._set_header(attempt.exchange)
        return rendered

    def replayed(self) -> Turn:
        return ReplayedTurn([*with_notes(self._system, self._summary), *self._draft.since(self._start)])

    def recorder(self, attempt: Attempt, generation: Generation) -> StoredTurnRecorder:
        return StoredTurnRecorder(attempt, generation, self)

    def _set_header(self, exchange: Exchange) -> None:
        told = ", ".join(f"{key}={value}" for key, value in self.report.items() if key != "id")
        exchange.extra_headers.append((b"x-penstock-context", told.encode()))

    def _take(self, added: TurnInput) -> int:
        """Add the client's messages to the conversation, the first time; returns the room for the prompt."""
        reply, messages = added.limit.max_tokens, added.messages
        if reply is None:
            reply = min(self._conversations.config.reply_tokens, added.window // 4)
        self._room = room = max(1, added.window - reply)
        self._window = added.window
        if self._taken:
            return room
        self._taken = True
        kept = self.held.conversation
        self._draft = kept.extended(messages, keep_system=self._keep_system)
        sent = "\n\n".join(str(message["content"]) for message in messages[: leading_system(messages)])
        self._system = sent or self._draft.system
        self._summary = self._draft.own(self.held.summary)
        self._start = max(self._draft.first, self._summary.covers)
        if room <= WIDER * self._draft.room:
            self._start = max(self._start, self._draft.start)
        return room

    async def store(self, attempt: Attempt, generation: Generation, said: Sequence[Message]) -> None:
        """Store the turn with its answer; the next one may begin. Work that another gateway has taken over is stored by
        that one."""
        conversations, held = self._conversations, self.held
        conversation = msgspec.structs.replace(self._draft.followed_by(said), start=self._start, room=self._room)
        if attempt.exchange.arms != conversation.arms:
            conversation = msgspec.structs.replace(conversation, arms=attempt.exchange.arms)
        try:
            detached = detached_work(attempt.exchange)
            if detached is not None and not await detached.counts():
                return
            if not await conversations.sessions.commit(held, conversation):
                return
        except DatabaseError as error:
            raise _unavailable() from error
        conversations.metrics.turns.inc()
        used = generation.prompt_tokens + generation.completion_tokens
        ahead = self._overflow == "summarise" and used > AHEAD * self._room
        if ahead:
            tokenization, tenant, model = conversations.tokenization, held.owner.tenant, generation.model
            chat: ChatPrompt | MessagePrompt
            if isinstance(model, RemoteModel):
                chat = MessagePrompt(tokenization, model, tenant=tenant, most=self._window)
            else:
                assert isinstance(model, ServedModel)
                chat = ChatPrompt(tokenization, model, tenant=tenant, most=self._window)
            prompt = ConversationPrompt(chat, self._system, held.conversation)
            work = conversations.summariser.summarise_ahead(attempt, prompt, held, self._summary, self._room)
            conversations.sessions.start_background(held.owner, held.id, work)


class StoredTurnRecorder:
    """Writes down what the assistant says in a turn, and stores it at the end."""

    def __init__(self, attempt: Attempt, generation: Generation, turn: StoredTurn) -> None:
        self._attempt = attempt
        self.generation = generation
        """The last generation of the turn."""
        self._turn = turn
        self._message = AssistantMessage()
        self.report = turn.report

    def add(self, piece: Piece) -> None:
        self._message.add(piece)

    async def store(self, said: Sequence[Message] | None = None) -> None:
        messages = [self._message.body()] if said is None else said
        # Thoughts are no part of a stored conversation.
        messages = [{name: held for name, held in message.items() if name != THOUGHTS} for message in messages]
        await self._turn.store(self._attempt, self.generation, messages)


def _named(sent: bytes | None, conversation: str | NamedConversation | None) -> tuple[str, Overflow | None]:
    overflow: Overflow | None = None
    if isinstance(conversation, NamedConversation):
        overflow = conversation.overflow
        conversation = conversation.id
    header = None if sent is None else sent.decode("latin-1")
    if header is not None and not _ID.fullmatch(header):
        raise InvalidRequest("`x-session-id` must be 1 to 128 letters, digits, `.`, `_`, `:` or `-`.")
    if header is not None and conversation is not None and header != conversation:
        raise InvalidRequest("`x-session-id` and `conversation` differ; send one of them.", param="conversation")
    id = conversation if conversation is not None else header
    assert id is not None
    return id, overflow


def owner_of(exchange: Exchange) -> Owner:
    return Owner(exchange.caller.tenant, exchange.record.user_id or "")


def _unavailable() -> ServiceUnavailable:
    return ServiceUnavailable("The store of conversations cannot be reached at the moment.")
