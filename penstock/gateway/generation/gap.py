"""A gap that a model fills: the text behind it, and other files that the model reads before it.

Models with infill tokens do that (`penstock.text.infill`); for others it is a 400. The text around the gap has to fit
the window. Of the other files as much is read as fits beside it: the last ones, because clients send the most relevant
last.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, replace

import msgspec

from penstock.gateway.app.exchange import Exchange
from penstock.gateway.generation.prompt_options import UNLIMITED_ANSWER
from penstock.gateway.generation.sampling import TokenLimit
from penstock.gateway.generation.schemas import CompletionRequest
from penstock.gateway.generation.tokenization import Tokenization
from penstock.protocol.errors import InvalidRequest
from penstock.routing.registry import ServedModel
from penstock.text.infill import InfillTokens

REPOSITORY = "project"
"""The name of the repository that files are said to be of: clients do not tell."""
SEPARATOR = "\n\n"
"""Between files, for models without a token for that."""


@dataclass(frozen=True, slots=True)
class SourceFile:
    """A file, or a part of one."""

    name: str
    text: str


@dataclass(frozen=True, slots=True)
class Gap:
    """See above. `param`: what clients call the text behind it."""

    after: str
    files: Sequence[SourceFile] = ()
    param: str = "suffix"

    @property
    def size(self) -> int:
        """Characters."""
        return len(self.after) + sum(len(file.name) + len(file.text) for file in self.files)

    async def filtered(self, check: Callable[[str], Awaitable[str]]) -> Gap:
        """With texts as a model may see them; `check` raises where one is refused."""
        files = [SourceFile(await check(file.name), await check(file.text)) for file in self.files]
        return replace(self, after=await check(self.after) if self.after else "", files=files)

    def tokens(self, request: CompletionRequest, model: ServedModel) -> InfillTokens:
        """How the model is asked to fill it."""
        if request.echo:
            raise InvalidRequest(
                f"`echo` shows a prompt without a gap; leave it out with `{self.param}`.", param="echo"
            )
        if model.text.infill is None:
            raise InvalidRequest(
                f"`{self.param}` is for models that fill gaps; `{model.name}` has no tokens for that.",
                param=self.param,
                code="unsupported_parameter",
            )
        return model.text.infill

    def for_remote(self, request: CompletionRequest, model: str) -> CompletionRequest:
        """The request for a server that fills gaps itself."""
        if self.files:
            raise InvalidRequest(
                f"`{model}` runs on another server, which takes no other files; leave `input_extra` out.",
                param="input_extra",
                code="remote_model",
            )
        if not self.after:
            return request
        return msgspec.structs.replace(request, suffix=self.after)

    async def prompt(
        self,
        tokenization: Tokenization,
        model: ServedModel,
        infill: InfillTokens,
        before: list[int],
        window: int,
        limit: TokenLimit,
        exchange: Exchange,
    ) -> list[int]:
        """The tokens of the prompt; `before`: those of the text before the gap."""
        bare = model.text.between(infill, before, self.after)
        if not self.files:
            return bare
        answer = limit.max_tokens or min(limit.default or UNLIMITED_ANSWER, window // 4)
        room = window - len(bare) - answer
        files = await self._files(tokenization, model, infill, room, exchange.caller.tenant)
        return model.text.between(infill, before, self.after, files)

    async def _files(
        self, tokenization: Tokenization, model: ServedModel, infill: InfillTokens, room: int, tenant: str
    ) -> list[int]:
        """The last `room` tokens of the other files, and what ends them."""

        async def encode(text: str, most: int) -> list[int]:
            if most < 1:
                return []
            return await tokenization.encode(
                model, text, tenant=tenant, most=most, last=most, add_special_tokens=False, special=False
            )

        head = [] if infill.repository is None else [infill.repository, *await encode(f"{REPOSITORY}\n", room)]
        tail = [] if infill.file is None else [infill.file, *await encode("file\n", room)]
        left = room - len(head) - len(tail)
        parts: list[list[int]] = []
        for file in reversed(self.files):
            if left < 1:
                break
            name = SEPARATOR if infill.file is None else f"{file.name}\n"
            marked = [*(() if infill.file is None else (infill.file,)), *await encode(name, left)]
            part = [*marked, *await encode(file.text, left)][-left:]
            parts.append(part)
            left -= len(part)
        return [*head, *(token for part in reversed(parts) for token in part), *tail] if parts else []
