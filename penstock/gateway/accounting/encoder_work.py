"""Encoder work for a request: counted, limited, charged, and cancelled when the client disconnects."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine, Iterable
from contextlib import AbstractAsyncContextManager
from typing import Any, TypeVar

from penstock.backends.embedder import Embedder
from penstock.gateway.accounting.answer_ids import AnswerIds
from penstock.gateway.accounting.attribution import note_model
from penstock.gateway.accounting.batch_line import batch_line
from penstock.gateway.accounting.charges import AccountBook
from penstock.gateway.accounting.cost_limit import check_cost
from penstock.gateway.accounting.metered import FixedWork, ModelName
from penstock.gateway.accounting.quotas import Quotas, TextWork
from penstock.gateway.accounting.targets import TTFT, check_targets, in_time
from penstock.gateway.app.background import BackgroundTasks
from penstock.gateway.app.data_rules import permit
from penstock.gateway.app.exchange import ClientDisconnected, Exchange
from penstock.protocol.errors import ContextQuotaExceeded, DataRuleForbids, TimeLimitReached
from penstock.routing.encoders import Encoders
from penstock.routing.remote_embedder import RemoteEmbedder
from penstock.telemetry.encoder_metrics import EncoderMetrics

T = TypeVar("T")


class EncoderWork:
    """Runs encoder work of one gateway process."""

    def __init__(
        self,
        encoders: Encoders,
        quotas: Quotas,
        accounts: AccountBook,
        metrics: EncoderMetrics,
        background: BackgroundTasks,
    ) -> None:
        self._encoders = encoders
        self._quotas = quotas
        self._accounts = accounts
        self._metrics = metrics
        self._background = background

    def find(self, exchange: Exchange, name: str | None) -> Embedder:
        """The encoder of this name that exists for the caller; None: the first one."""
        access = exchange.caller.access
        if name is None:
            first = self._encoders.first(access)
            if first is None:
                raise self._encoders.unknown("", access)
            name = first.name
        embedder = self._encoders.find(name, access)
        note_model(exchange, name, embedder.name, "direct" if name == embedder.name else "alias")
        return embedder

    def remote(self, exchange: Exchange, name: str) -> RemoteEmbedder | None:
        """The encoder under `name`, if another server runs it."""
        found = self._encoders.remote(name, exchange.caller.access)
        if found is not None:
            note_model(exchange, name, found.name, "direct" if name == found.name else "alias")
        return found

    def text_work(
        self, exchange: Exchange, embedder: Embedder | RemoteEmbedder, characters: int
    ) -> AbstractAsyncContextManager[TextWork]:
        """Tokenizing before the work itself; see `Quotas.text_work`."""
        return self._quotas.text_work(exchange, embedder.name, characters)

    def check_context(
        self, exchange: Exchange, embedder: Embedder | RemoteEmbedder, lengths: Iterable[int], param: str
    ) -> None:
        """Texts of so many tokens must be within what the caller may send."""
        cap = self._quotas.requests.cap(exchange.caller, "context_tokens", embedder.name)
        if cap is not None and (longest := max(lengths, default=0)) > cap.most:
            raise ContextQuotaExceeded(
                limit=cap.most, prompt_tokens=longest, param=param, whose=cap.whose, scope=cap.scope
            )

    async def run(
        self,
        exchange: Exchange,
        embedder: Embedder | RemoteEmbedder,
        texts: int,
        tokens: int,
        work: Coroutine[Any, Any, T],
        told: Callable[[T], int] | None = None,
    ) -> T:
        """Run `work`, which encodes `texts` of `tokens` together; the client pays when it succeeds. `told`: what the
        result says about the tokens, where they were only estimated."""
        if exchange.demand:
            try:
                asked = embedder.model if isinstance(embedder, RemoteEmbedder) else embedder
                permit(exchange, "encoder", embedder.name, asked.unmet(exchange.demand))
            except DataRuleForbids:
                work.close()
                raise
        counted = FixedWork(ModelName(embedder.name), tokens, id=AnswerIds(exchange).next())
        begin = time.monotonic()
        exchange.timeline.follow("prepare")
        try:
            check_targets(exchange, followed=(TTFT,))
            check_cost(self._quotas, exchange, counted.model, tokens)
            reservation = await self._quotas.reserve(exchange, counted)
        except BaseException:
            work.close()
            raise
        account = self._accounts.open(exchange, counted)
        task = asyncio.create_task(work, name="encoding")
        cap = self._quotas.requests.cap(exchange.caller, "time_limit_s", embedder.name)
        if cap is not None and batch_line(exchange) is not None:
            cap = None
        left = False

        def leave(error: Exception) -> None:
            nonlocal left
            left = True
            task.cancel()

        try:
            with exchange.watched(leave):
                async with in_time(exchange):
                    try:
                        result = await asyncio.wait_for(task, None if cap is None else cap.value)
                    except TimeoutError:
                        if cap is None or not task.cancelled():
                            raise
                        raise TimeLimitReached(cap.whose, cap.value, cap.scope) from None
                    except asyncio.CancelledError:
                        task.cancel()
                        if left:
                            raise ClientDisconnected from None
                        raise
            if told is not None:
                tokens = counted.prompt_tokens = told(result)
            counted.billable = True
            exchange.record.prompt_tokens = tokens
            exchange.record.finish_reason = "stop"
            self._metrics.encoded(embedder.name, texts, tokens, time.monotonic() - begin)
            await account.ended("stop")
            return result
        finally:
            exchange.timeline.note("encode", begin)
            account.settle(exchange.record.finish_reason or "error")
            if reservation is not None:
                self._background.start(self._quotas.settle(reservation, counted))
