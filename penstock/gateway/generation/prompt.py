"""The prompt of a conversation: messages and tools, rendered with the chat template of a model, or measured for one
that another server renders.

`ChatPrompt` and `MessagePrompt` answer the same questions about lengths, so that what decides by them (which turns of a
conversation fit, how much room there is for sources) need not know where a model runs.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from contextlib import suppress

from msgspec import Struct

from penstock.gateway.generation.chat_messages import Message
from penstock.gateway.generation.estimates import (
    CHARACTERS_PER_TOKEN,
    MARGIN,
    MESSAGE_TOKENS,
    estimated_text,
    estimated_tokens,
)
from penstock.gateway.generation.prompt_options import USUAL, PromptOptions
from penstock.gateway.generation.tokenization import Tokenization, encoded_chat, messages_size, tools_size
from penstock.gateway.generation.tokenized_model import TokenizedModel, remote_text
from penstock.gateway.generation.tool_choice import tool_of
from penstock.gateway.generation.tool_schemas import (
    ToolDefinition,
)
from penstock.routing.remotes import RemoteModel
from penstock.text import ChatTemplateError, TextModel
from penstock.tools.toolbox import Tool


class ChatPrompt(Struct, frozen=True):
    """How conversations become the token ids of one model."""

    tokenization: Tokenization
    model: TokenizedModel
    tools: tuple[Tool, ...] = ()
    tenant: str = ""
    """Whose conversations they are."""
    most: int = sys.maxsize
    """Tokens that a prompt may have; of a longer one only the first are made, more than `most`."""
    options: PromptOptions = USUAL

    async def tokens(self, messages: list[Message]) -> list[int]:
        return await self.tokenization.encode_chat(
            self.model, messages, tenant=self.tenant, most=self.most, tools=self.tools, options=self.options
        )

    def length(self, messages: Sequence[Message]) -> int:
        """The number of tokens, as far as they are made; blocks, so it is to be called in a thread."""
        return len(encoded_chat(self.model, list(messages), self.tools, self.options, most=self.most))

    async def measured(self, messages: list[Message]) -> int:
        return len(await self.tokens(messages))

    def count(self, text: str) -> int:
        """Tokens of a text; blocks if it is long."""
        return len(self.model.text.encode(text, special=False))

    def cut(self, text: str, most: int) -> str:
        """A text up to its first `most` tokens; blocks if it is long."""
        return cut_text(self.model.text, text, most)


class MessagePrompt(Struct, frozen=True):
    """How long conversations are for a remote model: by its tokenizer where one is configured, or else estimated."""

    tokenization: Tokenization
    model: RemoteModel
    tools: Sequence[ToolDefinition] = ()
    tenant: str = ""
    most: int = sys.maxsize

    @property
    def exact(self) -> bool:
        """Whether lengths come from a tokenizer. A server may render messages in a way of its own, though."""
        return self.model.text is not None

    async def measured(self, messages: list[Message]) -> int:
        if self.model.text is None:
            return self.length(messages)
        return await self.tokenization.run(self.tenant, messages_size(messages), self.length, messages)

    def length(self, messages: Sequence[Message]) -> int:
        text = remote_text(self.model)
        if text is None:
            described = estimated_text(" " * tools_size(self.tools)) if self.tools else 0
            return sum(map(estimated_tokens, messages)) + described
        if text.text.has_chat_template:
            with suppress(ChatTemplateError):
                tools = tuple(map(tool_of, self.tools))
                return len(encoded_chat(text, list(messages), tools, USUAL, most=self.most))
        words = [str(message["content"]) for message in messages] + [
            call["function"]["arguments"] for message in messages for call in message.get("tool_calls") or ()
        ]
        return sum(map(self.count, words)) + MESSAGE_TOKENS * len(messages)

    def count(self, text: str) -> int:
        known = self.model.text
        return estimated_text(text) if known is None else len(known.encode(text, special=False))

    def cut(self, text: str, most: int) -> str:
        if self.model.text is not None:
            return cut_text(self.model.text, text, most)
        return text[: int(max(most - 1, 0) * CHARACTERS_PER_TOKEN / MARGIN)]


def cut_text(model: TextModel, text: str, most: int) -> str:
    ids = model.encode(text, special=False, most=most)
    return text if len(ids) <= most else model.decode(ids[:most])
