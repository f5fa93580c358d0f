"""Text to token ids without blocking the event loop: short text at once, longer text in a small thread pool."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any, ParamSpec, TypeVar

from penstock.protocol.errors import InvalidRequest
from penstock.routing.registry import ServedModel
from penstock.text import ChatTemplateError, TemplateTooHeavy

P = ParamSpec("P")
T = TypeVar("T")

INLINE_CHARACTERS = 4096
"""Text up to this size is tokenized on the event loop: that takes less time than a thread's round trip."""


class Tokenization:
    """The text threads of one gateway process."""

    def __init__(self) -> None:
        self._threads = ThreadPoolExecutor(max_workers=2, thread_name_prefix="text")

    def close(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)

    async def encode(self, model: ServedModel, text: str, *, add_special_tokens: bool = True) -> list[int]:
        if len(text) <= INLINE_CHARACTERS:
            return model.text.encode(text, add_special_tokens=add_special_tokens)
        return await self.run(model.text.encode, text, add_special_tokens=add_special_tokens)

    async def encode_chat(
        self,
        model: ServedModel,
        messages: list[dict[str, Any]],
        *,
        tools: list[dict[str, Any]] | None = None,
        add_generation_prompt: bool = True,
    ) -> list[int]:
        """The token ids of a conversation, rendered with the model's chat template."""
        if not model.text.has_chat_template:
            raise InvalidRequest(
                f"`{model.name}` has no chat template; use /v1/completions.",
                param="model",
                code="no_chat_template",
            )
        size = sum(len(message["content"]) for message in messages)
        encode = functools.partial(
            model.text.encode_chat, messages, tools=tools, add_generation_prompt=add_generation_prompt
        )
        try:
            if size <= INLINE_CHARACTERS and not tools:
                with suppress(TemplateTooHeavy):  # a template may take long for a short chat
                    return encode(quick=True)
            return await self.run(encode)
        except ChatTemplateError as error:
            message = str(error)
            raise InvalidRequest(message[:1].upper() + message[1:], param="messages") from error

    async def run(self, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Call `function` in one of the text threads."""
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._threads, functools.partial(function, *args, **kwargs))
