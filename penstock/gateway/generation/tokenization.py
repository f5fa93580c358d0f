"""Text to token ids without blocking the event loop: short text at once, longer text in threads.

Invariant: the work for a request is bounded by the window it has to fit, not by the size of its text. `most` is that
window: text that cannot fit is refused by its size alone (`check_size`), and of what is probably too long only
`most + 1` ids are made.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any, ParamSpec, TypeVar

from penstock.gateway.accounting.request_limits import Cap
from penstock.gateway.generation.prompt_options import USUAL, PromptOptions
from penstock.gateway.generation.tokenized_model import TokenizedModel
from penstock.gateway.generation.tool_choice import for_template
from penstock.gateway.generation.tool_schemas import (
    ToolDefinition,
)
from penstock.protocol.errors import ContextLengthExceeded, ContextQuotaExceeded, InvalidRequest, sentence
from penstock.text import ChatTemplateError, TemplateTooHeavy
from penstock.text.fair_threads import FairThreads
from penstock.tools.toolbox import Tool

P = ParamSpec("P")
T = TypeVar("T")

INLINE_CHARACTERS = 4096
"""Text up to this size is tokenized on the event loop: that takes less time than a thread's round trip."""
MOST_COUNTED = 1 << 17
"""Tokens that a request which only asks for tokens may have, whatever fits the model."""
MESSAGE_CHARACTERS = 16
"""What a message counts beside its text."""


class Tokenization:
    """The tokenizing of one gateway process."""

    def __init__(self, threads: FairThreads) -> None:
        self.threads = threads

    async def encode(
        self,
        model: TokenizedModel,
        text: str,
        *,
        tenant: str,
        most: int,
        last: int | None = None,
        add_special_tokens: bool = True,
        special: bool = True,
    ) -> list[int]:
        """The token ids of a text; if there are more than `most`, the first of them. `last`: only so many at its
        end. `special`: see `TextModel.encode`."""
        encode = functools.partial(
            model.text.encode, text, special=special, add_special_tokens=add_special_tokens, most=most, last=last
        )
        return encode() if len(text) <= INLINE_CHARACTERS else await self.run(tenant, len(text), encode)

    async def encode_chat(
        self,
        model: TokenizedModel,
        messages: list[dict[str, Any]],
        *,
        tenant: str,
        most: int,
        tools: tuple[Tool, ...] = (),
        options: PromptOptions = USUAL,
    ) -> list[int]:
        """The token ids of a conversation, rendered with the model's chat template; see `encode`."""
        if not model.text.has_chat_template and not options.template:
            raise InvalidRequest(
                f"`{model.name}` has no chat template; use /v1/completions.",
                param="model",
                code="no_chat_template",
            )
        size = messages_size(messages) + text_size(options.template_kwargs or {}) + len(options.template)

        def encode(*, quick: bool = False) -> list[int]:
            return encoded_chat(model, messages, tools, options, most=most, quick=quick)

        try:
            if size <= INLINE_CHARACTERS and not tools and not options.template:
                with suppress(TemplateTooHeavy):  # a template may take long for a short chat
                    return encode(quick=True)
            return await self.run(tenant, size, encode)
        except ChatTemplateError as error:
            raise InvalidRequest(sentence(error), param="messages") from error

    async def decode(
        self, model: TokenizedModel, tokens: Sequence[int], *, tenant: str, skip_special: bool = False
    ) -> str:
        """The text of token ids."""
        size = len(tokens)
        if size <= INLINE_CHARACTERS:
            return model.text.decode(tokens, skip_special=skip_special)
        return await self.run(tenant, size, model.text.decode, tokens, skip_special=skip_special)

    async def run(self, tenant: str, characters: int, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Call `function`, which works on a text of so many characters, in one of the text threads."""
        return await self.threads.run(tenant, characters, function, *args, **kwargs)


def encoded_chat(
    model: TokenizedModel,
    messages: list[dict[str, Any]],
    tools: tuple[Tool, ...],
    options: PromptOptions,
    *,
    most: int,
    quick: bool = False,
) -> list[int]:
    """The token ids of a conversation; blocks, unless `quick`."""
    prepared, described = for_template(messages, tools, model, options.template)
    return model.text.encode_chat(
        prepared,
        tools=described,
        add_generation_prompt=options.add_generation_prompt,
        continue_final=options.continue_final,
        template_kwargs=options.template_kwargs,
        template=model.text.other_template(options.template) if options.template else None,
        most=most,
        last=options.last,
        quick=quick,
    )


def check_size(model: TokenizedModel, characters: int, most: int, param: str, quota: Cap | None = None) -> None:
    """Refuse a text that has more than `most` tokens however it is tokenized: no token covers that many bytes.
    `quota`: the caller's limit, if that is what `most` is."""
    if characters <= INLINE_CHARACTERS:
        return
    widest = model.text.most_bytes_per_token
    if widest is not None and characters > most * widest:
        tokens = -(-characters // widest)
        if quota is not None and quota.most <= most:
            raise ContextQuotaExceeded(
                limit=most, prompt_tokens=tokens, at_least=True, param=param, whose=quota.whose, scope=quota.scope
            )
        raise ContextLengthExceeded(limit=most, prompt_tokens=tokens, at_least=True, param=param)


def most_counted(model: TokenizedModel) -> int:
    """How many tokens a request that only asks for them may have: what fits the model, and more than that."""
    return max(model.context_window or 0, MOST_COUNTED)


def check_counted(tokens: int, most: int, param: str) -> None:
    if tokens > most:
        raise InvalidRequest(
            f"`{param}` has more than {most:,} tokens, the most that one request may ask about; send it in parts.",
            param=param,
            code="context_length_exceeded",
        )


def messages_size(messages: Sequence[Mapping[str, Any]]) -> int:
    """Characters of a conversation: of everything in it, calls and their arguments too."""
    size = MESSAGE_CHARACTERS * len(messages)
    for message in messages:
        size += len(message["content"]) if len(message) == 2 else text_size(message)
    return size


def tools_size(tools: Sequence[ToolDefinition] | None) -> int:
    """Characters of the tools of a request."""
    return sum(
        len(tool.function.name) + len(tool.function.description or "") + text_size(tool.function.parameters or {})
        for tool in tools or ()
    )


def text_size(value: Any) -> int:
    """Characters of all strings in a JSON value, keys included, and one for every other value."""
    if isinstance(value, str):
        return len(value)
    if isinstance(value, Mapping):
        return sum(len(key) + text_size(item) for key, item in value.items())
    return sum(map(text_size, value)) if isinstance(value, list | tuple) else 1
