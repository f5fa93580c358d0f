"""The events of a response in the background, written into its run as the model answers, and its end into the store."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from penstock.gateway.api.openai.responses.background_run import BackgroundRun
from penstock.gateway.api.openai.responses.background_store import split_events
from penstock.gateway.api.openai.responses.renderer import ResponseRenderer
from penstock.gateway.api.openai.responses.store import ResponseRecord
from penstock.gateway.app.exchange import Exchange
from penstock.gateway.generation.base import Generation
from penstock.gateway.generation.choice import Piece
from penstock.gateway.server_tools.steps import StepsRenderer
from penstock.protocol.errors import ApiError

if TYPE_CHECKING:
    from penstock.gateway.api.openai.responses.background import BackgroundResponses


class BackgroundRenderer(StepsRenderer):
    """Writes the events of a response into its run. `exchange`: of the request in memory."""

    def __init__(
        self,
        responses: BackgroundResponses,
        run: BackgroundRun,
        exchange: Exchange,
        inner: ResponseRenderer,
        record: ResponseRecord,
    ) -> None:
        self._responses = responses
        self._run = run
        self._exchange = exchange
        self._inner = inner
        self._record = record
        self._head = inner.head
        if run.response:  # of an earlier attempt
            self._head["created_at"] = run.response["created_at"]
        self._last = b""
        self.admitted = self._accept

    async def _accept(self) -> None:
        run, exchange = self._run, self._exchange
        if not run.accepted.done():
            await self._responses.accept(run, self._head, self._record)
            run.ignored = list(exchange.ignored)
            run.accepted.set_result(list(exchange.extra_headers))

    def opening(self) -> bytes:
        run, opened = self._run, self._inner.opening()
        run.begun = True
        run.response = {**self._head, "status": "in_progress"}
        run.record(split_events(opened))
        self._responses.wake()
        return opened

    def event(self, piece: Piece) -> bytes:
        written = self._inner.event(piece)
        self._run.record(split_events(written))
        return written

    def tool_event(self, event: dict[str, Any]) -> bytes:
        written = self._inner.tool_event(event)
        self._run.record(split_events(written))
        return written

    def follow(self, generation: Generation) -> None:
        self._inner.follow(generation)

    async def keep(self) -> None:
        await self.before_end()

    def closing(self) -> bytes:
        self._last = self._inner.closing()
        return self._last

    def whole(self, pieces: list[list[Piece]]) -> bytes:
        raise NotImplementedError("a response in the background is always streamed")

    def failure(self, error: ApiError) -> bytes:
        self._last = self._inner.failure(error)
        if self._responses.hands_over(self._run):
            return self._last
        self._run.failure = self._inner.body
        self._run.record(split_events(self._last))
        return self._last

    async def before_end(self) -> None:
        """Stores the end; the last event is sent when that is done."""
        await self._inner.before_end()
        conversation = [*self._record.conversation, *self._inner.messages()]
        await self._responses.finish(self._run, self._inner.body, conversation, split_events(self._last))
