"""The oldest turns of a conversation, condensed by the model that answers it.

It happens in the background as soon as a conversation fills most of its room, so that the next turn finds the summary
ready; a turn that arrives earlier waits for it. What the model is asked is in `penstock.conversations.summaries`.
When it fails, for whatever reason, turns are left out instead: no answer depends on a summary.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

from penstock.config.context import ConversationsConfig
from penstock.conversations import Conversation, HeldConversation, Message, Sessions, Summary
from penstock.conversations.conversation import pack
from penstock.conversations.summaries import SummaryBudget, Tokens, condense, question, with_notes
from penstock.conversations.window import fit_turns
from penstock.engine.request import SamplingParams
from penstock.gateway.generation.attempt import Attempt
from penstock.gateway.generation.base import Generation
from penstock.gateway.generation.engine import EngineGeneration
from penstock.gateway.generation.lifecycle import GenerationLifecycle
from penstock.gateway.generation.prompt import ChatPrompt, MessagePrompt
from penstock.gateway.generation.remote import RemoteGeneration
from penstock.gateway.generation.remote_request import internal_call
from penstock.gateway.generation.settings import GenerationSettings
from penstock.gateway.generation.sources import Sources
from penstock.gateway.generation.spec import internal_spec
from penstock.protocol.errors import ApiError
from penstock.routing.registry import ServedModel
from penstock.storage import DatabaseError
from penstock.telemetry.metrics import Metrics

log = logging.getLogger(__name__)

FEATURE = "conversation summary"
"""What the ledger calls the tokens of summaries."""
LEFT = 0.5
"""Share of the room that the turns which are not condensed may fill."""
_AHEAD_PRIORITY = 1


class Rendered(NamedTuple):
    """A prompt as messages, the number of its tokens, and these for a model that runs here."""

    length: int
    messages: list[Message]
    tokens: list[int] = []  # noqa: RUF012 (never changed)


@dataclass(frozen=True, slots=True)
class ConversationPrompt:
    """How a stored conversation becomes a prompt."""

    chat: ChatPrompt | MessagePrompt
    system: str
    conversation: Conversation
    sources: Sources | None = None
    """For the last question."""

    async def rendered(self, summary: Summary, start: int) -> Rendered:
        """The prompt from turn `start` on, with a summary of earlier turns."""
        messages = self.messages(summary, start)
        if isinstance(self.chat, ChatPrompt):
            tokens = await self.chat.tokens(messages)
            return Rendered(len(tokens), messages, tokens)
        return Rendered(await self.chat.measured(messages), messages)

    def counter(self, summary: Summary) -> Callable[[int], int]:
        """Counts the tokens of the prompt by its first turn; to be called in a thread."""
        return lambda start: self.chat.length(self.messages(summary, start))

    def messages(self, summary: Summary, start: int) -> list[Message]:
        messages = [*with_notes(self.system, summary), *self.conversation.since(start)]
        return messages if self.sources is None else self.sources.in_prompt(messages)


class Summariser:
    """Condenses turns."""

    def __init__(
        self,
        sessions: Sessions,
        config: ConversationsConfig,
        settings: GenerationSettings,
        lifecycle: GenerationLifecycle,
        metrics: Metrics,
    ) -> None:
        self._sessions = sessions
        self._config = config
        self._settings = settings
        self._lifecycle = lifecycle
        self._metrics = metrics

    async def summarise(
        self, attempt: Attempt, prompt: ConversationPrompt, held: HeldConversation, summary: Summary, room: int
    ) -> Summary:
        """A summary with which the conversation fits, or the current one. Waits for one that is being made in the
        background."""
        sessions = self._sessions
        if await sessions.wait_background(held.owner, held.id):
            newer = await sessions.get(held.owner, held.id)
            if newer is not None:
                summary = prompt.conversation.own(newer[2])
                if (await prompt.rendered(summary, summary.covers)).length <= room:
                    return summary
        try:
            summary = await self._condensed(attempt, prompt, summary, room, priority=0)
            await sessions.store.summarise(held.owner, held.id, held.created_at, pack(summary))
        except (ApiError, DatabaseError) as error:
            log.warning(
                "turns could not be condensed, or their summary not be stored: %s",
                error,
                extra={"request_id": attempt.exchange.request_id},
            )
            self._metrics.context.summary("waited", "failed")
        else:
            self._metrics.context.summary("waited", "done")
        return summary

    async def summarise_ahead(
        self, attempt: Attempt, prompt: ConversationPrompt, held: HeldConversation, summary: Summary, room: int
    ) -> None:
        """The same after a request, in the background."""
        store, stored_summary = self._sessions.store, False
        try:
            summary = await self._condensed(attempt, prompt, summary, room, priority=_AHEAD_PRIORITY)
            stored = await store.get(held.owner, held.id)
            if stored is not None:
                stored_summary = await store.summarise(held.owner, held.id, stored.created_at, pack(summary))
        except (ApiError, DatabaseError) as error:
            about = {"request_id": attempt.exchange.request_id}
            log.warning("turns could not be condensed ahead: %s", error, extra=about)
        self._metrics.context.summary("ahead", "done" if stored_summary else "failed")

    async def _condensed(
        self, attempt: Attempt, prompt: ConversationPrompt, summary: Summary, room: int, *, priority: int
    ) -> Summary:
        config, chat, conversation = self._config, prompt.chat, prompt.conversation
        tokenization, tenant = chat.tokenization, chat.tenant
        plain: ChatPrompt | MessagePrompt
        if isinstance(chat, ChatPrompt):
            plain = ChatPrompt(tokenization, chat.model, tenant=tenant, most=chat.most)
        else:
            plain = MessagePrompt(tokenization, chat.model, tenant=tenant, most=chat.most)
        note = min(config.note_tokens, max(16, room // 8))
        budget = max(1, int(room * LEFT) - note)
        upto = await tokenization.run(
            tenant,
            0,
            fit_turns,
            conversation.end,
            start=max(conversation.first, summary.covers),
            keep=config.keep_turns,
            budget=budget,
            target=budget,
            count=prompt.counter(summary),
        )

        async def ask(messages: list[Message], tokens: int) -> str:
            generation = await self._question(attempt, plain, messages, tokens, priority)
            return await self._lifecycle.complete(attempt, generation, feature=FEATURE)

        frame = await plain.measured(question(""))
        transcript = max(64, room - note - frame)
        return await condense(
            conversation,
            summary,
            upto,
            ask=ask,
            tokens=Tokens(count=chat.count, cut=chat.cut),
            room=SummaryBudget(note, max(note, room // 4), transcript),
            in_thread=partial(tokenization.run, tenant, 0),
        )

    async def _question(
        self, attempt: Attempt, chat: ChatPrompt | MessagePrompt, messages: list[Message], tokens: int, priority: int
    ) -> Generation:
        """A question to the model that answers the conversation."""
        exchange, settings = attempt.exchange, self._settings
        caller = exchange.caller
        if isinstance(chat, MessagePrompt):
            call = internal_call(
                attempt.ids.next(),
                chat.model,
                messages,
                {"temperature": 0},
                tokens,
                request_id=exchange.request_id,
                started_at=exchange.started_at,
                prompt_tokens=await chat.measured(messages),
                time_limit_s=settings.time_limit(exchange, chat.model.base_name),
                demand=exchange.demand,
            )
            return RemoteGeneration(call, self._metrics)
        model = chat.model
        assert isinstance(model, ServedModel), "the tokenizer of a remote model is in a `MessagePrompt`"
        spec = internal_spec(
            attempt.ids.next(),
            model,
            await chat.tokens(messages),
            [SamplingParams(max_tokens=tokens, temperature=0.0, stop_token_ids=model.text.eos_token_ids)],
            started_at=exchange.started_at,
            priority=priority,
            cache_salt=settings.cache_salt(caller),
            time_limit_s=settings.time_limit(exchange, model.base_name),
            caller=(caller.tenant, caller.tier),
            demand=exchange.demand,
        )
        return EngineGeneration(spec, self._metrics)
