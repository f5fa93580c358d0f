"""Sources of an answer (`rag`), as generation and renderers see them: who searches, and what was found.

A search begins while the request is still prepared. Sources go into the prompt of this request only: what the client
sent, and what is stored of a conversation, stays as it was.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import Any, Protocol

from penstock.gateway.app.exchange import Exchange
from penstock.gateway.generation.chat_messages import Message
from penstock.gateway.generation.schemas import RagRequest
from penstock.identity import Caller
from penstock.knowledge.citations import Citation, Citer
from penstock.protocol.errors import ContentBlocked

TextCheck = Callable[[str], Awaitable[str]]
"""The text as a model may see it; raises when it is refused."""


def source_check(prompt: Callable[[Exchange, str], Awaitable[str]], exchange: Exchange) -> TextCheck:
    """Checks sources like the text of a request, by `prompt` of its content filter."""

    async def check(text: str) -> str:
        try:
            return await prompt(exchange, text)
        except ContentBlocked as error:
            raise ContentBlocked(error.message, param="rag") from error

    return check


class Sources(Protocol):
    """What an answer was given to draw from."""

    def citer(self, *, attribute: bool) -> Citer | None:
        """Resolves the citations of one choice. `attribute`: text may be added to the answer."""

    def in_prompt(self, messages: Sequence[Message]) -> list[Message]:
        """The conversation as the model gets it: with instructions, and the sources before the last question."""

    def report(self) -> dict[str, Any]:
        """The `rag` of a reply."""

    def annotation(self, citation: Citation, *, flat: bool = False) -> dict[str, Any]:
        """A citation and where it leads, as chat completions have it; `flat`: as responses do."""

    def texts(self) -> dict[int, str]:
        """The text of each source, by its number."""


class PendingSources(Protocol):
    """A search that runs while the rest of a request is prepared. It must be closed."""

    def instructed(self, messages: Sequence[Message]) -> list[Message]:
        """The conversation with the instructions on sources, but without any."""

    async def result(self, count: Callable[[str], int], room: int, check: TextCheck) -> Sources:
        """`count`: tokens of a text for the model that answers; `room`: tokens left in its window; `check`: what the
        model may see of the text of a source."""

    async def close(self) -> None: ...


class SourceSearch(Protocol):
    """Searches collections for sources."""

    def permit(self, exchange: Exchange) -> None:
        """Raises where what searches may not see the request."""

    async def expected_tokens(self, caller: Caller, wanted: RagRequest) -> int:
        """About how many tokens of sources a search would add to the prompt."""

    def begin(self, caller: Caller, wanted: RagRequest, messages: Sequence[Message]) -> PendingSources: ...
