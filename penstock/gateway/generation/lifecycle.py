"""The life of a generation: limits reserved, admitted, charged, run, and settled however it ends."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from time import monotonic

from penstock.gateway.accounting.admission import Admissions
from penstock.gateway.accounting.charges import AccountBook, OpenAccount
from penstock.gateway.accounting.quotas import Quotas
from penstock.gateway.app.background import BackgroundTasks
from penstock.gateway.app.drain import Drain
from penstock.gateway.app.exchange import ClientDisconnected, Exchange
from penstock.gateway.generation.attempt import FAILURES, Attempt
from penstock.gateway.generation.base import Generation
from penstock.gateway.generation.permissions import Permissions
from penstock.routing.admission.controller import Ticket
from penstock.routing.admission.pools import PoolTicket

RECORDED_CHARACTERS = 16384
"""Characters of a prompt or an answer that are recorded, where the configuration asks for that."""


class GenerationLifecycle:
    """Runs generations under the limits of their callers."""

    def __init__(
        self,
        quotas: Quotas,
        admissions: Admissions,
        accounts: AccountBook,
        drain: Drain,
        background: BackgroundTasks,
        permissions: Permissions,
        *,
        record_text: bool,
    ) -> None:
        self._quotas = quotas
        self._admissions = admissions
        self._accounts = accounts
        self._drain = drain
        self._background = background
        self._permissions = permissions
        self._record_text = record_text

    @asynccontextmanager
    async def running(
        self, attempt: Attempt, generation: Generation, *, feature: str = "", further: bool = False
    ) -> AsyncIterator[OpenAccount]:
        """A generation that runs, with its charge.

        `feature`: what it is for, when it is not the answer to the request. Limits then do not count it as a request,
        the ledger has it under that feature, and the request does not end as it does. `further`: it is another step of
        an answer: no request of its own either, but part of what the client asked for.
        """
        exchange = attempt.exchange
        self._permissions.gate(exchange, generation.model, feature or "model")
        timeline = exchange.timeline
        timeline.follow("prepare")
        try:
            reservation = await self._quotas.reserve(exchange, generation, counted=not (feature or further))
        finally:
            timeline.follow("limits")
        if self._record_text:
            generation.keep_text()
        account: OpenAccount | None = None
        ticket: Ticket | PoolTicket | None = None
        self._drain.track(generation)
        try:
            generation.asked_at = monotonic()
            ticket = await self._admissions.enter(exchange, generation, reservation)
            if isinstance(ticket, PoolTicket):
                generation.pools = lambda: ticket.pools
            if not (feature or further):
                generation.on_submit = attempt.note_replica
            try:
                generation.submit(None if ticket is None or ticket.granted else ticket)
            finally:  # behind it: the engine need not wait for the books
                account = self._accounts.open(exchange, generation, feature=feature)
            yield account
        except ClientDisconnected as error:
            generation.fail(error)
            raise
        except FAILURES:
            generation.superseded = not feature and attempt.replaceable
            raise
        finally:
            generation.close()
            try:
                if generation.moderated is not None:
                    await generation.moderated.close()
                await generation.settled()
            finally:
                self._drain.untrack(generation)
                if ticket is not None:
                    _leave(ticket, generation)
                _record(exchange, generation, feature)
                if attempt.trial is not None and not feature:
                    attempt.trial.ran(exchange.caller.tier, generation)
                if self._record_text and (texts := generation.texts(RECORDED_CHARACTERS)) is not None:
                    timeline.texts = [*(timeline.texts or ()), *texts]
                if account is not None and generation.left:
                    account.leave()
                elif account is not None:
                    account.settle((generation.outcome if feature else exchange.record.finish_reason) or "abort")
                if reservation is not None:
                    self._background.start(self._quotas.settle(reservation, generation))

    async def complete(self, attempt: Attempt, generation: Generation, *, feature: str) -> str:
        """The text of a generation that serves the request without being its answer; see `running`."""
        parts: list[str] = []
        async with self.running(attempt, generation, feature=feature) as account:
            while not generation.done:
                parts += (piece.text for piece in await generation.next())
                account.note()
            await account.ended(generation.outcome or "stop")
        return "".join(parts)


def _leave(ticket: Ticket | PoolTicket, generation: Generation) -> None:
    """Give back the place in the engine, with what the generation really took."""
    produced = generation.completion_tokens
    ticket.close(
        generation.prompt_tokens - generation.cached_tokens, produced, len(generation.choices) if produced else 0
    )


def _record(exchange: Exchange, generation: Generation, feature: str) -> None:
    """Add the usage to the record of the request, which may have taken several generations."""
    record = exchange.record
    record.prompt_tokens += generation.prompt_tokens
    record.cached_tokens += generation.cached_tokens
    record.completion_tokens += generation.completion_tokens
    record.reasoning_tokens += generation.reasoning_tokens
    exchange.timeline.ran(generation.runs(feature))
    if feature:
        return
    if generation.first_token_at is not None and record.ttft_ms is None:
        record.ttft_ms = round((generation.first_token_at - exchange.started_at) * 1000, 3)
    if record.finish_reason is None:
        record.finish_reason = generation.outcome
