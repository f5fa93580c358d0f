"""The prompt of a conversation: messages and tools, rendered with the chat template of a model."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from msgspec import Struct

from penstock.gateway.generation.chat_messages import Message
from penstock.gateway.generation.prompt_options import USUAL, PromptOptions
from penstock.gateway.generation.tokenization import Tokenization, encoded_chat
from penstock.routing.registry import ServedModel
from penstock.tools.toolbox import Tool


class ChatPrompt(Struct, frozen=True):
    """How conversations become the token ids of one model."""

    tokenization: Tokenization
    model: ServedModel
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
