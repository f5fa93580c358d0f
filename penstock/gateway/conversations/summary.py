"""The oldest turns of a conversation, condensed by the model that answers it.

It happens in the background as soon as a conversation fills most of its room, so that the next turn finds the notes
ready; a turn that arrives earlier waits for them. What the model is asked is in `penstock.conversations.summaries`.
When it fails, for whatever reason, turns are left out instead: no answer depends on a summary.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass

from penstock.conversations import Conversation, HeldConversation, Message, Summary
from penstock.conversations.conversation import pack
from penstock.conversations.summaries import SummaryBudget, Tokens, condense, question, with_notes
from penstock.conversations.window import fit_turns
from penstock.engine.request import SamplingParams
from penstock.gateway.generation.attempt import Attempt
from penstock.gateway.generation.engine import EngineGeneration
from penstock.gateway.generation.engine import Prompt as Tokenized
from penstock.gateway.generation.respond import complete
from penstock.gateway.generation.tool_choice import for_template
from penstock.gateway.process.service import Service
from penstock.gateway.rag.retrieval import Retrieved
from penstock.protocol.errors import ApiError
from penstock.routing.registry import ServedModel
from penstock.storage import DatabaseError
from penstock.tools.toolbox import Toolbox

log = logging.getLogger(__name__)

FEATURE = "conversation summary"
"""What the ledger calls the tokens of summaries."""
LEFT = 0.5
"""Share of the room that the turns which are not condensed may fill."""
_AHEAD_PRIORITY = 1


@dataclass(frozen=True, slots=True)
class Prompt:
    """How a conversation becomes a prompt."""

    service: Service
    model: ServedModel
    toolbox: Toolbox | None
    system: str
    conversation: Conversation
    retrieved: Retrieved | None = None
    """Sources for the last question."""

    async def encoded(self, summary: Summary, start: int) -> list[int]:
        messages, tools = self._template(summary, start)
        return await self.service.encode_chat(self.model, messages, tools=tools)

    def counter(self, summary: Summary) -> Callable[[int], int]:
        """The prompt's length by its first turn; to be used in a thread."""

        def count(start: int) -> int:
            messages, tools = self._template(summary, start)
            return len(self.model.text.encode_chat(messages, tools=tools))

        return count

    def _template(self, summary: Summary, start: int) -> tuple[list[Message], list[Message] | None]:
        messages = [*with_notes(self.system, summary), *self.conversation.since(start)]
        if self.retrieved is not None:
            messages = self.retrieved.dressed(messages)
        return for_template(messages, self.toolbox.tools if self.toolbox is not None else (), self.model)


async def summarise(prompt: Prompt, attempt: Attempt, held: HeldConversation, summary: Summary, room: int) -> Summary:
    """Notes that make the conversation fit, or the ones there are. Waits for those under way in the background."""
    service = prompt.service
    assert service.sessions is not None
    if await service.sessions.wait_background(held.owner, held.id):
        newer = await service.sessions.get(held.owner, held.id)
        if newer is not None:
            summary = prompt.conversation.own(newer[2])
            if len(await prompt.encoded(summary, summary.covers)) <= room:
                return summary
    try:
        summary = await _condensed(prompt, attempt, summary, room, priority=0)
        await service.sessions.store.summarise(held.owner, held.id, held.created_at, pack(summary))
    except (ApiError, DatabaseError) as error:
        log.warning(
            "turns could not be condensed, or their notes not kept: %s",
            error,
            extra={"request_id": attempt.exchange.request_id},
        )
        service.metrics.context.summary("waited", "failed")
    else:
        service.metrics.context.summary("waited", "done")
    return summary


async def summarise_ahead(
    prompt: Prompt, attempt: Attempt, held: HeldConversation, summary: Summary, room: int
) -> None:
    """The same behind the request's back."""
    service = prompt.service
    assert service.sessions is not None
    outcome = "failed"
    try:
        summary = await _condensed(prompt, attempt, summary, room, priority=_AHEAD_PRIORITY)
        stored = await service.sessions.store.get(held.owner, held.id)
        if stored is not None and await service.sessions.store.summarise(
            held.owner, held.id, stored.created_at, pack(summary)
        ):
            outcome = "done"
    except (ApiError, DatabaseError) as error:
        log.warning("turns could not be condensed ahead: %s", error, extra={"request_id": attempt.exchange.request_id})
    service.metrics.context.summary("ahead", "done" if outcome == "done" else "failed")


async def _condensed(prompt: Prompt, attempt: Attempt, summary: Summary, room: int, *, priority: int) -> Summary:
    service, model = prompt.service, prompt.model
    config, text = service.settings.conversations, model.text
    note = min(config.note_tokens, max(16, room // 8))
    budget = max(1, int(room * LEFT) - note)
    conversation = prompt.conversation
    upto = await service.in_thread(
        fit_turns,
        conversation.end,
        start=max(conversation.first, summary.covers),
        keep=config.keep_turns,
        budget=budget,
        target=budget,
        count=prompt.counter(summary),
    )

    async def ask(messages: list[Message], tokens: int) -> str:
        asked = await service.encode_chat(model, messages)
        params = SamplingParams(max_tokens=tokens, temperature=0.0, stop_token_ids=text.eos_token_ids)
        generation = EngineGeneration(
            model,
            [Tokenized(asked, [params])],
            id=attempt.ids.next(),
            metrics=service.metrics,
            started_at=attempt.exchange.started_at,
            stops=[],
            priority=priority,
            cache_salt=service.cache_salt(attempt.exchange.caller),
            time_limit_s=service.settings.time_limit_s,
        )
        return await complete(service, attempt, generation, aside=FEATURE)

    def cut(words: str, most: int) -> str:
        ids = text.encode(words, special=False)
        return words if len(ids) <= most else text.decode(ids[:most])

    tokens = Tokens(count=lambda words: len(text.encode(words, special=False)), cut=cut)
    frame = len(await service.encode_chat(model, question("")))
    transcript = max(64, room - note - frame)
    return await condense(
        conversation, summary, upto, ask=ask, tokens=tokens, room=SummaryBudget(note, max(note, room // 4), transcript)
    )
