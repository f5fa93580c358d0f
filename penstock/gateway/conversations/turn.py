"""A turn of a stored conversation: from the request that names it to the answer that is kept.

The prompt is the system prompt, notes on turns that were condensed, the turns that fit, and what the client sends now.
A turn is kept when its answer is complete, before the end of the answer is sent; one that failed or whose client left
never happened. What was left out of the prompt is told in a header and in the answer.
"""

from __future__ import annotations

import logging
import re
from collections.abc import AsyncIterator, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager, nullcontext
from typing import Any

import msgspec

from penstock.conversations import HeldConversation, Message, Owner, SessionBusy, Sessions
from penstock.conversations.conversation import Overflow, leading_system
from penstock.conversations.summaries import with_notes
from penstock.conversations.window import fit_turns
from penstock.gateway.app.exchange import Exchange
from penstock.gateway.conversations.summary import Prompt, summarise, summarise_ahead
from penstock.gateway.generation.attempt import Attempt
from penstock.gateway.generation.base import Generation
from penstock.gateway.generation.choice import Piece
from penstock.gateway.generation.engine import EngineGeneration
from penstock.gateway.generation.sampling import Limits
from penstock.gateway.generation.schemas import NamedConversation
from penstock.gateway.process.service import Service
from penstock.gateway.rag.retrieval import Retrieved
from penstock.protocol.errors import ConversationBusy, InvalidRequest, ServiceUnavailable
from penstock.routing.registry import ServedModel
from penstock.storage import DatabaseError
from penstock.tools.toolbox import Toolbox

log = logging.getLogger(__name__)

TARGET = 0.75
"""Share of the room that a prompt fills after turns were left out, so that the next ones need not be."""
CHARACTERS_PER_TOKEN, MESSAGE_TOKENS = 3, 8
"""For estimates: characters of a token, and tokens around a message."""
WIDER = 1.5
"""How much more room there must be for turns that were left out to be looked at again."""
AHEAD = 0.7
"""Share of the room from which turns are condensed in the background, before they have to be."""
_HEADER = b"x-session-id"
_ID = re.compile("[A-Za-z0-9._:-]{1,128}")


class OpenTurn:
    """A turn that is being answered."""

    def __init__(self, held: HeldConversation, overflow: Overflow, *, keep_system: bool) -> None:
        self.held = held
        self._overflow = overflow
        self._keep_system = keep_system
        self._draft = held.conversation
        self._summary = held.summary
        self._system = ""
        self._start = 0
        self._taken = False
        """What the client sends is added once, however many steps the answer takes."""
        self._room = 0

    @property
    def history(self) -> list[Message]:
        """What was said before this turn, as far as it is stored."""
        return self.held.conversation.since(0)

    @property
    def report(self) -> dict[str, Any]:
        """What the answer says of the conversation: turns that are in the prompt only as notes, or not at all."""
        return {
            "id": self.held.id,
            "turns": self._draft.end,
            "dropped_turns": self._start,
            "summarised_turns": min(self._summary.covers, self._start),
        }

    async def tokens(
        self,
        service: Service,
        attempt: Attempt,
        messages: list[Message],
        model: ServedModel,
        toolbox: Toolbox | None,
        window: int,
        limit: Limits,
        following: Sequence[Message] = (),
        retrieved: Retrieved | None = None,
    ) -> list[int]:
        """The prompt of the conversation with `messages` added, without the oldest turns if it must be.

        `following`: what the assistant and its tools have said in this turn already. `retrieved`: sources for this
        answer, which are in its prompt and not in the conversation.
        """
        config, metrics = service.settings.conversations, service.metrics.context
        reply = min(config.reply_tokens, window // 4) if limit.max_tokens is None else limit.max_tokens
        self._room = room = max(1, window - reply)
        if not self._taken:
            self._take(messages, room)
        draft = self._draft.followed_by(following)
        prompt = Prompt(service, model, toolbox, self._system, draft, retrieved)
        before = self._start
        tokens = await prompt.encoded(self._summary, self._start)
        if len(tokens) > room and self._overflow == "summarise":
            self._summary = await summarise(prompt, attempt, self.held, self._summary, room)
            self._start = max(self._start, self._summary.covers)
            metrics.dropped("summarised", self._start - before)
            before = self._start
            tokens = await prompt.encoded(self._summary, self._start)
        if len(tokens) > room:
            self._start = await service.in_thread(
                fit_turns,
                self._draft.end,
                start=self._start,
                keep=config.keep_turns,
                budget=room,
                target=int(room * TARGET),
                count=prompt.counter(self._summary),
            )
            metrics.dropped("truncated", self._start - before)
            tokens = await prompt.encoded(self._summary, self._start)
        self._tell(attempt.exchange)
        return tokens

    def messages(
        self,
        service: Service,
        attempt: Attempt,
        messages: list[Message],
        window: int,
        limit: Limits,
        following: Sequence[Message] = (),
    ) -> list[Message]:
        """The same for a model that others run, whose tokens are not known here: lengths are estimated, and what does
        not fit is left out, whatever the conversation says about notes."""
        config = service.settings.conversations
        reply = min(config.reply_tokens, window // 4) if limit.max_tokens is None else limit.max_tokens
        self._room = room = max(1, window - reply)
        if not self._taken:
            self._take(messages, room)
        draft = self._draft.followed_by(following)
        before = self._start

        def prompt(start: int) -> list[Message]:
            return [*with_notes(self._system, self._summary), *draft.since(start)]

        self._start = fit_turns(
            draft.end,
            start=before,
            keep=config.keep_turns,
            budget=room,
            target=int(room * TARGET),
            count=lambda start: sum(map(estimated_tokens, prompt(start))),
        )
        service.metrics.context.dropped("truncated", self._start - before)
        self._tell(attempt.exchange)
        return prompt(self._start)

    def _tell(self, exchange: Exchange) -> None:
        told = ", ".join(f"{key}={value}" for key, value in self.report.items() if key != "id")
        exchange.extra_headers.append((b"x-penstock-context", told.encode()))

    def _take(self, messages: list[Message], room: int) -> None:
        self._taken = True
        kept = self.held.conversation
        self._draft = kept.extended(messages, keep_system=self._keep_system)
        sent = "\n\n".join(str(message["content"]) for message in messages[: leading_system(messages)])
        self._system = sent or self._draft.system
        self._summary = self._draft.own(self.held.summary)
        self._start = max(self._draft.first, self._summary.covers)
        if room <= WIDER * self._draft.room:
            self._start = max(self._start, self._draft.start)

    async def keep(self, service: Service, attempt: Attempt, generation: Generation, said: Sequence[Message]) -> None:
        """Store the turn with its answer; the next one may begin."""
        conversation = msgspec.structs.replace(self._draft.followed_by(said), start=self._start, room=self._room)
        sessions = _sessions(service)
        try:
            if not await sessions.commit(self.held, conversation):
                return
        except DatabaseError as error:
            raise _away() from error
        service.metrics.context.turns.inc()
        used = generation.prompt_tokens + generation.completion_tokens
        ahead = self._overflow == "summarise" and used > AHEAD * self._room
        if ahead and isinstance(generation, EngineGeneration):
            prompt = Prompt(service, generation.model, None, self._system, self.held.conversation)
            work = summarise_ahead(prompt, attempt, self.held, self._summary, self._room)
            sessions.start_background(self.held.owner, self.held.id, work)


class Recorder:
    """Writes down what the assistant says in a turn, and keeps it at the end."""

    def __init__(self, service: Service, attempt: Attempt, generation: Generation, turn: OpenTurn) -> None:
        self._service = service
        self._attempt = attempt
        self.generation = generation
        """The last one of the turn."""
        self._turn = turn
        self._parts: list[str] = []
        self._calls: list[dict[str, Any]] = []
        self.report = turn.report

    def hear(self, piece: Piece) -> None:
        self._parts.append(piece.text)
        for call in piece.calls or ():
            if call.id is not None:
                function = {"name": call.name, "arguments": ""}
                self._calls.append({"id": call.id, "type": "function", "function": function})
            else:
                self._calls[call.index]["function"]["arguments"] += call.arguments

    async def keep(self, said: Sequence[Message] | None = None) -> None:
        """`said`: the messages of the answer, when it has several; one with what was heard otherwise."""
        if said is None:
            message: Message = {"role": "assistant", "content": "".join(self._parts)}
            if self._calls:
                message["tool_calls"] = self._calls
            said = [message]
        await self._turn.keep(self._service, self._attempt, self.generation, said)


def open_turn(
    service: Service,
    exchange: Exchange,
    conversation: str | NamedConversation | None,
    *,
    keep_system: bool = True,
    choices: int = 1,
) -> AbstractAsyncContextManager[OpenTurn | None]:
    """The turn of the conversation that a request names, once it is its turn; None when it names none."""
    sent = exchange.header(_HEADER)
    if conversation is None and (sent is None or service.sessions is None):
        return nullcontext()
    if service.sessions is None:
        raise InvalidRequest(
            "`conversation` needs a store, and this gateway keeps no conversations; send all messages.",
            param="conversation",
            code="unsupported_parameter",
        )
    id, overflow = _named(sent, conversation)
    if choices > 1:
        raise InvalidRequest("A conversation goes on with one answer; `n` must be 1.", param="n")
    return _turn(service, exchange, id, overflow or service.settings.conversations.overflow, keep_system)


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


@asynccontextmanager
async def _turn(
    service: Service, exchange: Exchange, id: str, overflow: Overflow, keep_system: bool
) -> AsyncIterator[OpenTurn]:
    try:
        async with _sessions(service).turn(owner_of(exchange), id) as held:
            yield OpenTurn(held, overflow, keep_system=keep_system)
    except SessionBusy as busy:
        raise ConversationBusy(f"The conversation `{id}` is busy: {busy}; send this one again.") from busy
    except DatabaseError as error:
        raise _away() from error


def estimated_tokens(message: Message) -> int:
    """More than most tokenizers make of a message, in most languages."""
    calls = sum(len(call["function"]["arguments"]) for call in message.get("tool_calls") or ())
    return (len(str(message["content"])) + calls) // CHARACTERS_PER_TOKEN + MESSAGE_TOKENS


def owner_of(exchange: Exchange) -> Owner:
    return Owner(exchange.caller.tenant, exchange.record.user_id or "")


def known_calls(turn: OpenTurn | None) -> set[str]:
    """Ids of the calls that results may answer."""
    if turn is None:
        return set()
    return {call["id"] for message in turn.history for call in message.get("tool_calls") or ()}


def _sessions(service: Service) -> Sessions:
    assert service.sessions is not None
    return service.sessions


def _away() -> ServiceUnavailable:
    return ServiceUnavailable("The store of conversations cannot be reached at the moment.")
