"""A turn that brings its whole conversation and lets the server leave out the oldest of it (`truncation: auto`)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from penstock.conversations import Conversation, Message, Summary
from penstock.conversations.conversation import leading_system, split_turns
from penstock.conversations.window import fit_turns
from penstock.gateway.conversations.summary import ConversationPrompt, Rendered
from penstock.gateway.generation.attempt import Attempt
from penstock.gateway.generation.chat_messages import call_names
from penstock.gateway.generation.prompt import ChatPrompt, MessagePrompt
from penstock.gateway.generation.turn import StatelessTurn, TurnInput

REPLY_TOKENS = 1024
"""Left free for an answer that names no limit, where the window has them."""


class TruncatedTurn(StatelessTurn):
    """`history`: what was said before the messages of the request; its oldest turns are left out as far as needed."""

    __slots__ = ("history",)

    def __init__(self, history: Sequence[Message]) -> None:
        self.history = history

    @property
    def calls(self) -> Mapping[str, str]:  # type: ignore[override]
        return call_names(self.history)

    async def tokens(self, attempt: Attempt, prompt: ChatPrompt, added: TurnInput) -> list[int]:
        return (await self._fitted(attempt, prompt, added)).tokens

    async def messages(self, attempt: Attempt, prompt: MessagePrompt, added: TurnInput) -> list[Message]:
        return (await self._fitted(attempt, prompt, added)).messages

    async def _fitted(self, attempt: Attempt, prompt: ChatPrompt | MessagePrompt, added: TurnInput) -> Rendered:
        """The conversation from the first turn on with which it fits."""
        system, conversation = self._joined(added)
        draft = ConversationPrompt(prompt, system, conversation, added.sources)
        room = _room(added)
        whole = await draft.rendered(Summary(), 0)
        if whole.length <= room:
            return whole
        start = await prompt.tokenization.run(
            prompt.tenant,
            0,
            fit_turns,
            conversation.end,
            start=0,
            keep=1,
            budget=room,
            target=room,
            count=draft.counter(Summary()),
        )
        _tell(attempt, conversation.end, start)
        return await draft.rendered(Summary(), start)

    def _joined(self, added: TurnInput) -> tuple[str, Conversation]:
        """The system prompt, and all turns."""
        head = leading_system(added.messages)
        system = "\n\n".join(str(message["content"]) for message in added.messages[:head])
        said = [*self.history, *added.messages[head:], *added.following]
        return system, Conversation(turns=split_turns(said))


def _room(added: TurnInput) -> int:
    reply = added.limit.max_tokens
    if reply is None:
        reply = min(added.limit.default or REPLY_TOKENS, added.window // 4)
    return max(1, added.window - reply)


def _tell(attempt: Attempt, turns: int, dropped: int) -> None:
    if dropped:
        told = f"turns={turns}, dropped_turns={dropped}, summarised_turns=0"
        attempt.exchange.extra_headers.append((b"x-penstock-context", told.encode()))
