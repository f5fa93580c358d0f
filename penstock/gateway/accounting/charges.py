"""Charges of the requests that this gateway answers.

A charge is opened while the engine already works on the prompt; no token is delivered before it is in the ledger, and
the end of an answer is not sent before its settlement is. A request that ends in any other way (the client left, an
error, a drain) is settled with the tokens produced until it ended.

While the ledger cannot be written (its disk is full, its server is down), a request that has not got any token is
refused and free; the end of one that has is kept in memory until it can be written.

Charges that a dead gateway left open are settled by any gateway that notices, with what the engine reports. An engine
that does not know a charge has been restarted since, or never saw it; then the last count that the gateway noted
stands. Engines count tokens, not thoughts: the reasoning tokens of such a charge are the last that were noted.
"""

from __future__ import annotations

import asyncio
import logging
import time
import uuid
from collections import defaultdict
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Protocol

import msgspec

from penstock.gateway.accounting.attribution import route_arm, route_name
from penstock.gateway.accounting.batch_line import batch_line
from penstock.gateway.accounting.detached import DetachedWork, detached_work
from penstock.gateway.accounting.metered import Metered
from penstock.gateway.app.exchange import Exchange
from penstock.metering.engine_counts import merged, usage_of
from penstock.metering.journal import PATIENCE_S, Journal
from penstock.metering.ledger import Charge, Ledger, OpenCharge, Settlement, cost_of
from penstock.metering.prices import PriceBook, Usage
from penstock.protocol.errors import ApiError, LedgerUnavailable
from penstock.protocol.messages import TALLY_KEEP_S, Produced, charge_of
from penstock.routing.registry import ModelRegistry
from penstock.storage import DatabaseError
from penstock.telemetry.usage_metrics import UsageMetrics

log = logging.getLogger(__name__)

ASK_S = 5.0
"""How long an engine may take to report; it is asked again later."""
RETRY_S = 1.0
"""How soon a heartbeat that failed is tried again."""
MOST_ASKED = 500
_FEATURE_LENGTH = 64
SHADOW = "shadow"
SHADOW_TENANT = "(shadow)"
"""Who the ledger charges for shadow requests: no tenant can have this name."""
_USER_LENGTH = 256


class OpenAccount(Protocol):
    """The charge of one request while the request runs."""

    @property
    def begun(self) -> bool:
        """Whether its beginning is in the ledger."""

    async def opened(self) -> None:
        """Returns when the charge is in the ledger; `LedgerUnavailable` when it cannot be written."""

    def note(self) -> None:
        """Note the tokens so far, in case this gateway dies."""

    async def ended(self, finish_reason: str) -> None:
        """Returns when the end of the charge is written, or will be written as soon as that is possible."""

    def settle(self, finish_reason: str) -> object:
        """Write the end of the charge, once; the first reason stands."""

    def leave(self) -> None:
        """The client is gone, but may come back for the rest: the charge stays open until it can no longer do so."""


class AccountBook(Protocol):
    """Opens the charges of a gateway."""

    def open(self, exchange: Exchange, generation: Metered, *, feature: str = "") -> OpenAccount:
        """`feature`: what the work is for; by default what the client says."""


class HeldStreams(Protocol):
    """Streams that this gateway itself keeps for clients that may come back."""

    def holds(self, charge: str) -> bool:
        """Whether the client of a charge may still come back, or has."""

    def used(self, charge: str) -> Usage | None:
        """What a stream took for which nobody came back; None: it is not known. It is told once."""


class NoAccount:
    """The charge of a request where there is no ledger."""

    __slots__ = ()
    begun = False

    async def opened(self) -> None:
        return

    def note(self) -> None:
        return

    async def ended(self, finish_reason: str) -> None:
        return

    def settle(self, finish_reason: str) -> None:
        return

    def leave(self) -> None:
        return


class NoAccounts:
    """Without a ledger nothing is charged."""

    _account = NoAccount()

    async def problem(self) -> None:
        return

    def open(self, exchange: Exchange, generation: Metered, *, feature: str = "") -> NoAccount:
        return self._account


class Account:
    """The charge of one request, in the ledger."""

    __slots__ = ("_charge", "_generation", "_journal", "_left", "_metrics", "_opened", "_settled", "_void")

    def __init__(
        self,
        journal: Journal,
        charge: Charge,
        generation: Metered,
        metrics: UsageMetrics | None = None,
        left: dict[str, OpenCharge] | None = None,
    ) -> None:
        """`left`: where charges go whose clients may come back."""
        self._left = left
        self._journal = journal
        self._metrics = metrics
        self._charge = charge
        self._generation = generation
        self._opened: asyncio.Future[bool] | None = None
        self._settled: asyncio.Future[bool] | None = None
        self._void = False
        """It could not be written, so the request was refused."""

    def open(self) -> None:
        self._opened = self._journal.open(self._charge)

    @property
    def begun(self) -> bool:
        return self._opened is not None and self._opened.done() and self._opened.result()

    async def opened(self) -> None:
        """Returns when the charge is in the ledger; `LedgerUnavailable` when it cannot be written."""
        if self._opened is None:
            return
        if not self._opened.done():
            self._journal.hurry()
        written = await asyncio.shield(self._opened)
        if not written:
            self._void = True
            raise LedgerUnavailable

    def note(self) -> None:
        work = self._generation
        self._journal.note(self._charge.id, work.cached_tokens, work.completion_tokens, work.reasoning_tokens)

    async def ended(self, finish_reason: str) -> None:
        """Write the end of the charge; returns when it is written, or will be written as soon as that is possible.
        Raises `LedgerUnavailable` when not even its beginning could be written."""
        if await self.settle(finish_reason) or self._opened is None:
            return
        if not (self._opened.done() and self._opened.result()):
            self._void = True
            assert self._settled is not None
            self._journal.amend(self._settled, self._settlement(finish_reason))
            raise LedgerUnavailable

    def settle(self, finish_reason: str) -> asyncio.Future[bool]:
        """Write the end of the charge, once; the first reason stands. The result: whether it was written in time."""
        if self._settled is None:
            settlement = self._settlement(finish_reason)
            self._settled = self._journal.settle(settlement)
            self._count(settlement)
        return self._settled

    def leave(self) -> None:
        if self._settled is None and self._left is not None:
            settlement = self._settlement("abort")
            self.note()
            self._count(settlement)
            self._left[self._charge.id] = OpenCharge(
                settlement.charge,
                settlement.cached_tokens,
                settlement.completion_tokens,
                settlement.reasoning_tokens,
            )
            self._settled = asyncio.get_running_loop().create_future()
            self._settled.set_result(True)

    def _count(self, settlement: Settlement) -> None:
        """Count what was used since metrics last heard of this charge."""
        if self._metrics is None:
            return
        charge, before, cost = settlement.charge, self._generation.before, settlement.cost_nanos
        if before is None:
            before = Usage()
        else:
            cost = max(cost - cost_of(charge, before.cached, before.completion), 0)
        self._metrics.settled(
            charge.tenant,
            charge.model,
            charge.adapter,
            charge.feature,
            prompt=charge.prompt_tokens - before.prompt,
            cached=max(settlement.cached_tokens - before.cached, 0),
            completion=max(settlement.completion_tokens - before.completion, 0),
            reasoning=max(settlement.reasoning_tokens - before.reasoning, 0),
            nanodollars=cost,
        )

    def _settlement(self, finish_reason: str) -> Settlement:
        cached, completion = self._generation.cached_tokens, self._generation.completion_tokens
        charge, prompt = self._charge, self._generation.prompt_tokens
        if charge.prompt_tokens != prompt:  # a remote server reports its prompt tokens only now
            charge = msgspec.structs.replace(charge, prompt_tokens=prompt)
        pays = self._generation.billable and not self._void
        cost = cost_of(charge, cached, completion) if pays else 0
        thought = min(self._generation.reasoning_tokens, completion)
        return Settlement(charge, time.time(), cached, completion, cost, finish_reason, reasoning_tokens=thought)


class LineAccount(Account):
    """The charge of a batch line. It is opened only once the line is answered: a line that breaks off is run again, and
    is not charged twice."""

    __slots__ = ()

    def note(self) -> None:
        return

    def settle(self, finish_reason: str) -> asyncio.Future[bool]:
        if self._settled is None:
            if not self._generation.complete:
                self._settled = asyncio.get_running_loop().create_future()
                self._settled.set_result(True)
                return self._settled
            self.open()
        return super().settle(finish_reason)


class DetachedAccount(Account):
    """The charge of a request that other gateways may take over. It is opened at the end of the run: one that goes on
    elsewhere, or died with its gateway, leaves nothing to pay. What comes to its end has the same id in all runs, so
    that the first is billed, even where a slow gateway finishes what another has taken over."""

    __slots__ = ("_work",)

    def __init__(
        self, journal: Journal, charge: Charge, generation: Metered, metrics: UsageMetrics | None, work: DetachedWork
    ) -> None:
        super().__init__(journal, charge, generation, metrics)
        self._work = work

    def note(self) -> None:
        return

    def settle(self, finish_reason: str) -> asyncio.Future[bool]:
        if self._settled is None:
            generation = self._generation
            if self._work.goes_on or not generation.billable:
                self._settled = asyncio.get_running_loop().create_future()
                self._settled.set_result(True)
                return self._settled
            if generation.complete and (id := self._work.next_charge_id()):
                self._charge = msgspec.structs.replace(self._charge, id=id)
            self.open()
        return super().settle(finish_reason)


class Accounts:
    """The charges of one gateway process."""

    def __init__(
        self,
        ledger: Ledger,
        prices: PriceBook,
        registry: ModelRegistry,
        metrics: UsageMetrics | None = None,
        *,
        dead_after_s: float = 20.0,
        patience_s: float = PATIENCE_S,
        announce: Callable[[Settlement], None] | None = None,
    ) -> None:
        """`dead_after_s`: a gateway that has not been seen for this long has died. `patience_s`: how long a request
        waits for the ledger. `announce` is told of every settlement that was written."""
        self.ledger = ledger
        self._metrics = metrics
        self.prices = prices
        self._registry = registry
        self._dead_after_s = dead_after_s
        self.journal = Journal(ledger, patience_s=patience_s, announce=announce)
        self.gateway = uuid.uuid4().hex
        self._keeper: asyncio.Task[None] | None = None
        self._beats = True
        """Whether the last heartbeat was written."""
        self.streams: HeldStreams | None = None
        """Those of models that other servers run."""
        self._left: dict[str, OpenCharge] = {}
        """Charges of streams whose clients are gone and may come back."""

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

    async def problem(self) -> str | None:
        """Why requests cannot be charged, which refuses all of them; None: they can."""
        return self.journal.problem or (None if self._beats else "the ledger cannot be written")

    def open(self, exchange: Exchange, generation: Metered, *, feature: str = "") -> Account:
        """`feature`: what it is for; what the client says when empty."""
        caller, model, record = exchange.caller, generation.model, exchange.record
        in_batch = batch_line(exchange) is not None
        price = self.prices.price(model.base_name, model.adapter, caller.tier)
        price = price.recalled() if generation.from_cache else price
        sent = exchange.header(b"x-feature")
        named = sent.decode("latin-1") if sent is not None else (record.metadata or {}).get("feature", "")
        why = exchange.timeline.selection
        charge = Charge(
            id=generation.id,
            request_id=exchange.request_id,
            gateway=self.gateway,
            opened_at=time.time(),
            tenant=SHADOW_TENANT if exchange.shadow else caller.tenant,
            user="" if exchange.shadow else _storable(record.user_id or ""),
            key="" if exchange.shadow else caller.key,
            feature=SHADOW if exchange.shadow else _storable(feature or named)[:_FEATURE_LENGTH],
            model=model.base_name,
            adapter=model.adapter,
            tier=caller.tier,
            prompt_tokens=generation.prompt_tokens,
            percent=self.prices.percent(price, caller.tier, batch=in_batch),
            price_input=price.input,
            price_cached=price.cached,
            price_output=price.output,
            selection=_storable(f"{route_name(why)}/{route_arm(why)}"),
            experiment=_storable(record.experiment or ""),
        )
        if in_batch:
            return LineAccount(self.journal, charge, generation, self._metrics)
        if (work := detached_work(exchange)) is not None and not feature:
            return DetachedAccount(self.journal, charge, generation, self._metrics, work)
        account = Account(self.journal, charge, generation, self._metrics, self._left)
        account.open()
        self._left.pop(charge.id, None)
        return account

    async def recover(self) -> int:
        """Settle what dead gateways left open; returns how many charges. Those whose engine does not answer wait."""
        settled = 0
        abandoned = await self.ledger.open_charges(abandoned_since=time.time() - self._dead_after_s)
        abandoned += self._left.values()
        by_model: defaultdict[str, list[OpenCharge]] = defaultdict(list)
        for entry in abandoned:
            if self.streams is not None and self.streams.holds(entry.charge.id):
                continue
            by_model[entry.charge.model].append(entry)
        for model, entries in by_model.items():
            for start in range(0, len(entries), MOST_ASKED):
                part = entries[start : start + MOST_ASKED]
                known = await self._ask(model, [entry.charge.id for entry in part])
                settled += sum(self._settle_abandoned(entry, known) for entry in part)
        if settled:
            log.warning("settled %d charges that a gateway left open when it died", settled)
        return settled

    async def _ask(self, model: str, charges: Sequence[str]) -> dict[str, list[Produced]] | None:
        """What the model's engine produced, by charge; None when the engine does not answer."""
        served = next((served for served in self._registry if served.name == model), None)
        if served is None:
            return {}  # the model is no longer served here
        try:
            entries = await asyncio.wait_for(served.backend.produced(charges), ASK_S)
        except (ApiError, TimeoutError) as error:
            log.info("the engine of %s does not answer about open charges: %s", model, error or "no answer")
            return None
        found: defaultdict[str, list[Produced]] = defaultdict(list)
        for entry in merged(entries):
            found[charge_of(entry.request_id)].append(entry)
        return found

    def _settle_abandoned(self, entry: OpenCharge, known: dict[str, list[Produced]] | None) -> bool:
        now, charge = time.time(), entry.charge
        if known is None and now - charge.opened_at < TALLY_KEEP_S:
            return False  # the engine is asked again, until it would have dropped the counts
        produced = (known or {}).get(charge.id, [])
        if any(run.finish_reason is None or run.resumable for run in produced):
            return False  # still running: its gateway may be alive after all; or the client may resume it
        counted = usage_of(produced)
        # The noted tokens had arrived at the gateway; after a failover they may be more than one engine produced.
        used = Usage(
            charge.prompt_tokens,
            max(entry.cached_tokens, counted.cached),
            max(entry.completion_tokens, counted.completion),
            entry.reasoning_tokens,
        )
        if (told := None if self.streams is None else self.streams.used(charge.id)) is not None:
            used = told
            charge = msgspec.structs.replace(charge, prompt_tokens=told.prompt)
        ended = bool(produced) and all(run.finish_reason not in ("abort", "error") for run in produced)
        cost = cost_of(charge, used.cached, used.completion) if used.completion or ended else 0
        # A stream that was resumed has been settled by the gateway that resumed it, and the first settlement stands.
        left = self._left.pop(charge.id, None) is not None
        settlement = Settlement(
            charge, now, used.cached, used.completion, cost, "abort", reasoning_tokens=used.reasoning
        )
        if not left:
            settlement = msgspec.structs.replace(settlement, finish_reason="lost", settled_by="recovery")
        self.journal.settle(settlement)
        return not left

    async def _keep(self) -> None:
        while True:
            try:
                await self.ledger.beat(self.gateway, time.time())
                self._beats = True
                self.journal.hurry()
                await self.recover()
            except DatabaseError as error:
                if self._beats:
                    log.warning("the ledger cannot be reached: %s", error)
                self._beats = False
            # A heartbeat also finds out whether there is space again, when no request tries to.
            await asyncio.sleep(self._dead_after_s / 4 if self._beats else min(RETRY_S, self._dead_after_s / 4))


def _storable(text: str) -> str:
    """Text that every store accepts: odd characters from one client must not stop the ledger."""
    return text.replace("\0", "").encode("utf-8", "replace").decode()[:_USER_LENGTH]
