"""Charges of the requests this gateway answers.

A charge is opened while the engine already works on the prompt; no token is delivered before it is in the ledger, and
the end of an answer is not sent before its settlement is. A request that ends in any other way (the client left, an
error, a drain) is settled with the tokens produced so far. What dead gateways left open is settled by whoever notices.
"""

from __future__ import annotations

import asyncio
import logging
import time
import uuid
from contextlib import suppress

from penstock.gateway.exchange import Exchange
from penstock.gateway.metered import Metered
from penstock.metering.journal import Journal
from penstock.metering.ledger import Charge, Ledger, Settlement, cost_of
from penstock.metering.prices import PriceBook
from penstock.storage import DatabaseError
from penstock.telemetry.usage_metrics import UsageMetrics

log = logging.getLogger(__name__)

BEAT_S = 5.0
DEAD_S = 20.0
"""A gateway that has not been seen for this long has died."""
_FEATURE_LENGTH = 64
_USER_LENGTH = 256


class Account:
    """The charge of one request."""

    __slots__ = ("_charge", "_generation", "_journal", "_metrics", "_opened", "_settled")

    def __init__(
        self, journal: Journal, charge: Charge, generation: Metered, metrics: UsageMetrics | None = None
    ) -> None:
        self._journal = journal
        self._metrics = metrics
        self._charge = charge
        self._generation = generation
        self._opened = journal.open(charge)
        self._settled: asyncio.Future[None] | None = None

    async def opened(self) -> None:
        """Returns when the charge is in the ledger."""
        if not self._opened.done():
            await asyncio.shield(self._opened)

    def note(self) -> None:
        self._journal.note(self._charge.id, self._generation.cached_tokens, self._generation.completion_tokens)

    def settle(self, finish_reason: str) -> asyncio.Future[None]:
        """Write the end of the charge, once; the first reason stands."""
        if self._settled is None:
            cached, completion = self._generation.cached_tokens, self._generation.completion_tokens
            cost = cost_of(self._charge, cached, completion) if self._generation.billable else 0
            settlement = Settlement(self._charge, time.time(), cached, completion, cost, finish_reason)
            self._settled = self._journal.settle(settlement)
            if self._metrics is not None:
                _count(self._metrics, settlement)
        return self._settled


class Accounts:
    """One per gateway process."""

    def __init__(self, ledger: Ledger, prices: PriceBook, metrics: UsageMetrics | None = None) -> None:
        self.ledger = ledger
        self._metrics = metrics
        self.prices = prices
        self.journal = Journal(ledger)
        self.gateway = uuid.uuid4().hex
        self._keeper: asyncio.Task[None] | None = None

    async def start(self) -> None:
        await self.ledger.prepare()
        await self.ledger.beat(self.gateway, time.time())
        self.journal.start()
        self._keeper = asyncio.create_task(self._keep(), name="ledger keeper")

    async def close(self) -> None:
        if self._keeper is not None:
            self._keeper.cancel()
            with suppress(asyncio.CancelledError):
                await self._keeper
            await self.journal.close()
            with suppress(DatabaseError):
                await self.ledger.leave(self.gateway)

    def open(self, exchange: Exchange, generation: Metered, *, feature: str = "") -> Account:
        """`feature`: what it is for; what the client says when empty."""
        caller, model, record = exchange.caller, generation.model, exchange.record
        price = self.prices.price(model.base_name, model.adapter, caller.tier)
        sent = exchange.header(b"x-feature")
        named = sent.decode("latin-1") if sent is not None else (record.metadata or {}).get("feature", "")
        charge = Charge(
            id=uuid.uuid4().hex,
            request_id=exchange.request_id,
            gateway=self.gateway,
            opened_at=time.time(),
            tenant=caller.tenant,
            user=_storable(record.user_id or ""),
            key=caller.key,
            feature=_storable(feature or named)[:_FEATURE_LENGTH],
            model=model.base_name,
            adapter=model.adapter,
            tier=caller.tier,
            prompt_tokens=generation.prompt_tokens,
            percent=100,
            price_input=price.input,
            price_cached=price.cached,
            price_output=price.output,
        )
        return Account(self.journal, charge, generation, self._metrics)

    async def recover(self) -> int:
        """Settle what dead gateways left open, with the tokens last noted; how many charges that were."""
        abandoned = await self.ledger.open_charges(abandoned_since=time.time() - DEAD_S)
        for entry in abandoned:
            produced = entry.completion_tokens > 0
            cost = cost_of(entry.charge, entry.cached_tokens, entry.completion_tokens) if produced else 0
            self.journal.settle(
                Settlement(
                    entry.charge, time.time(), entry.cached_tokens, entry.completion_tokens, cost, "lost", "recovery"
                )
            )
        if abandoned:
            log.warning("settled %d charges that a gateway left open when it died", len(abandoned))
        return len(abandoned)

    async def _keep(self) -> None:
        while True:
            try:
                await self.ledger.beat(self.gateway, time.time())
                await self.recover()
            except DatabaseError as error:
                log.warning("the ledger cannot be reached: %s", error)
            await asyncio.sleep(BEAT_S)


def _count(metrics: UsageMetrics, settlement: Settlement) -> None:
    charge = settlement.charge
    metrics.settled(
        charge.tenant,
        charge.model,
        charge.adapter,
        charge.feature,
        prompt=charge.prompt_tokens,
        cached=settlement.cached_tokens,
        completion=settlement.completion_tokens,
        nanodollars=settlement.cost_nanos,
    )


def _storable(text: str) -> str:
    """What every store can hold: one client's odd characters must not stop the ledger for all."""
    return text.replace("\0", "").encode("utf-8", "replace").decode()[:_USER_LENGTH]
