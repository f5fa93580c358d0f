"""What every endpoint shares: settings, models, metrics, the drain state, and text work kept off the event loop."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, ParamSpec, TypeVar

from penstock.backends.base import Backend
from penstock.gateway.generation import Generation
from penstock.gateway.readiness import Readiness
from penstock.gateway.settings import GatewaySettings
from penstock.gateway.structure import GrammarDesk
from penstock.protocol.errors import Draining, EngineLost, InvalidRequest
from penstock.routing.registry import Registry, ServedModel
from penstock.telemetry.metrics import EngineView, Metrics
from penstock.text import ChatTemplateError

P = ParamSpec("P")
T = TypeVar("T")

CUT_S = 1.0
"""After the drain: how long requests that were cut may take to say so."""
INLINE_CHARACTERS = 4096
"""Text up to this size is tokenized on the event loop: it takes less time than a thread's round trip."""


class Service:
    """One gateway process."""

    def __init__(self, settings: GatewaySettings, registry: Registry) -> None:
        self.settings = settings
        self.registry = registry
        self.metrics = Metrics(self._views)
        self.readiness = Readiness()
        self.draining = False
        self._generations: set[Generation] = set()
        self._requests = 0
        self._idle = asyncio.Event()
        self._idle.set()
        self.grammars = GrammarDesk()
        self._threads = ThreadPoolExecutor(max_workers=2, thread_name_prefix="text")

    async def start(self) -> None:
        for backend in self._backends():
            await backend.start()

    async def close(self) -> None:
        for backend in self._backends():
            await backend.close()
        self._threads.shutdown(wait=False, cancel_futures=True)
        self.grammars.close()

    async def drain(self, seconds: float) -> None:
        """Take nothing new; let what runs finish for `seconds`, then cut it and let it say so."""
        self.draining = True
        self.metrics.draining.set(1)
        for wait in (seconds, CUT_S):
            try:
                async with asyncio.timeout(wait):
                    await self._idle.wait()
                return
            except TimeoutError:
                for generation in list(self._generations):
                    generation.fail(
                        EngineLost("The server is shutting down and could not finish this request in time.")
                    )

    def enter(self) -> None:
        """A request for tokens begins; refused while draining."""
        if self.draining:
            raise Draining
        self._requests += 1
        self._idle.clear()

    def leave(self) -> None:
        self._requests -= 1
        if not self._requests:
            self._idle.set()

    def track(self, generation: Generation) -> None:
        self._generations.add(generation)

    def untrack(self, generation: Generation) -> None:
        self._generations.discard(generation)

    async def encode(self, model: ServedModel, text: str, *, add_special_tokens: bool = True) -> list[int]:
        if len(text) <= INLINE_CHARACTERS:
            return model.text.encode(text, add_special_tokens=add_special_tokens)
        return await self._in_thread(model.text.encode, text, add_special_tokens=add_special_tokens)

    async def encode_chat(
        self,
        model: ServedModel,
        messages: list[dict[str, Any]],
        *,
        tools: list[dict[str, Any]] | None = None,
        add_generation_prompt: bool = True,
    ) -> list[int]:
        """The token ids of a conversation, as the model's template writes it."""
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
            return encode() if size <= INLINE_CHARACTERS and not tools else await self._in_thread(encode)
        except ChatTemplateError as error:
            message = str(error)
            raise InvalidRequest(message[:1].upper() + message[1:], param="messages") from error

    async def _in_thread(self, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._threads, functools.partial(function, *args, **kwargs))

    def _backends(self) -> Iterator[Backend]:
        return (model.backend for model in self.registry)

    def _views(self) -> Iterator[EngineView]:
        for model in self.registry:
            backend = model.backend
            yield EngineView(model.name, backend.name, backend.ready, backend.info, backend.load)
