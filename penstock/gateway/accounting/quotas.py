"""Rate limits and budgets: reserved before a request reaches an engine, settled with what it really used.

The limits of a tier hold per tenant, unless the tenant has limits of its own; a key may have additional ones, and
entries under `limits` add others per user, key or model. A reservation counts the prompt and the most tokens that may
be generated; the difference is given back when the answer ends, however it ends.
"""

from __future__ import annotations

import asyncio
import dataclasses
import datetime
import uuid
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import msgspec

from penstock.config.schema import LimitConfig, TierConfig
from penstock.gateway.accounting.batch_line import batch_line
from penstock.gateway.accounting.metered import FixedWork, Metered, ModelName, NamedModel
from penstock.gateway.accounting.request_limits import RequestLimits
from penstock.gateway.accounting.targets import check_targets
from penstock.gateway.app.dialects import Dialect
from penstock.gateway.app.exchange import ClientDisconnected, Exchange
from penstock.identity import Caller
from penstock.identity.allowance import NO_ALLOWANCE, Allowance
from penstock.limits import Amounts, Decision, Limit, LimitState, LimitStore
from penstock.metering.prices import NANOS, Price, PriceBook, Usage, dollars
from penstock.protocol.errors import (
    ApiError,
    ContextLengthExceeded,
    InsufficientQuota,
    InvalidRequest,
    RateLimitExceeded,
)

_MINUTE = 60.0
_LIFE_S = 3600.0
"""A request that is never settled stops counting as running after this long."""
_DAY = 86400.0
LONG_CHARACTERS = 32 << 10
"""Text above this size is tokenized only for callers with something left of their limits."""


@dataclass(slots=True)
class Reservation:
    """What one request holds of its limits."""

    id: str
    limits: list[Limit]
    reserved: Amounts
    price: Price
    percent: int
    left: float = 1.0
    """Share of the tightest limit that is left."""


@dataclass(frozen=True, slots=True)
class BudgetLeft:
    """What is left of a budget, in nanodollars."""

    remaining: int
    most: int


@dataclass(slots=True)
class TextWork:
    """Tokenizing for one request; `tokens`: how many it made."""

    tokens: int = 0


@dataclass(slots=True)
class FileWork:
    """Reading of files for one request; `counted`: it counts as a request, because no counted one follows."""

    counted: bool = False


class Quotas:
    """Applies the configured limits to requests."""

    def __init__(
        self, store: LimitStore, tiers: Sequence[TierConfig], limits: Sequence[LimitConfig], prices: PriceBook
    ) -> None:
        self._store = store
        self._tiers = {tier.name: tier for tier in tiers}
        self._limits = limits
        self._prices = prices
        self.requests = RequestLimits(tiers, limits)
        """What a single request may ask for."""

    async def reserve(self, exchange: Exchange, generation: Metered, *, counted: bool = True) -> Reservation | None:
        """Reserve what the request may use; raises when that is too much. None when nothing limits the caller.

        `counted`: it counts as a request. Otherwise it is part of a counted one, and takes tokens and money only.
        """
        limits = self.limits_of(exchange, generation)
        if not limits:
            return None
        model = generation.model
        price = self._prices.price(model.base_name, model.adapter, exchange.caller.tier)
        price = price.recalled() if generation.from_cache else price
        prompt, most = generation.prompt_tokens, generation.most_completion_tokens
        percent = self._prices.percent(price, exchange.caller.tier, batch=batch_line(exchange) is not None)
        count = int(counted)
        amounts = Amounts(count, prompt + most, count, price.cost(Usage(prompt, 0, most), percent=percent))
        # A client may send the same x-request-id twice, also to several gateways.
        id = generation.id if generation.resumable else uuid.uuid4().hex
        if (before := generation.before) is not None:
            # Its first reservation, unless its gateway has settled it; what it used then stays counted.
            spent = price.cost(before, percent=percent)
            earlier = Amounts(1, before.prompt + before.completion, 1, spent)
            await self._store.settle(id, limits, amounts, earlier)
            rest = max(most - before.completion, 0)
            amounts = Amounts(0, rest, 1, price.cost(Usage(0, 0, rest), percent=percent))
            id = uuid.uuid4().hex
        decision = await self._store.reserve(id, limits, amounts)
        if counted:
            exchange.extra_headers += _headers(decision, exchange.dialect)
        if decision.refusal is not None:
            raise _refused(decision, amounts)
        left = min(state.remaining / max(state.limit.most, 1) for state in decision.states)
        return Reservation(id, limits, amounts, price, percent, left)

    async def settle(self, reservation: Reservation, generation: Metered) -> None:
        used = Usage()
        if generation.billable:
            used = Usage(generation.prompt_tokens, generation.cached_tokens, generation.completion_tokens)
        reserved, tokens = reservation.reserved, used.prompt + used.completion
        cost = reservation.price.cost(used, percent=reservation.percent)
        if (before := generation.before) is not None:
            tokens = max(tokens - before.prompt - before.completion, 0)
            cost = max(cost - reservation.price.cost(before, percent=reservation.percent), 0)
        amounts = Amounts(reserved.requests, tokens, reserved.concurrent, cost)
        await self._store.settle(reservation.id, reservation.limits, reserved, amounts)

    @asynccontextmanager
    async def text_work(
        self, exchange: Exchange, model: str, characters: int, *, only: bool = False
    ) -> AsyncIterator[TextWork]:
        """Tokenizing of so many characters that precedes a request, or (`only`) is all it asks for.

        A caller whose limits are used up is refused before it, unless it is little. A prompt that turns out to be too
        long, or that the client gives up, counts as a request with its tokens; what succeeds is counted with the
        request itself. Requests that only ask for tokens are free, and have the same limits again for themselves:
        counting a prompt leaves what it takes to send it.
        """
        work = TextWork()
        if only:
            check_targets(exchange, followed=())
        if characters <= LONG_CHARACTERS and not only:
            try:
                yield work
            except ContextLengthExceeded as error:
                if limits := self._text_limits(exchange, model):
                    refused = Amounts(1, error.prompt_tokens, 0)
                    decision = await self._store.reserve(id := uuid.uuid4().hex, limits, refused)
                    exchange.extra_headers += _headers(decision, exchange.dialect)
                    await self._store.settle(id, limits, refused, refused)
                raise
            return
        limits = self._text_limits(exchange, model, suffix=":text" if only else "")
        if not limits:
            yield work
            return
        id, reserved, used = uuid.uuid4().hex, Amounts(1, 1, 1), Amounts(0, 0, 0)
        decision = await self._store.reserve(id, limits, reserved)
        if only or decision.refusal is not None:
            exchange.extra_headers += _headers(decision, exchange.dialect)
        if decision.refusal is not None:
            raise _refused(decision, reserved)
        try:
            yield work
            if only:
                used = Amounts(1, work.tokens, 0)
        except InvalidRequest as error:
            used = Amounts(1, error.prompt_tokens if isinstance(error, ContextLengthExceeded) else work.tokens, 0)
            if not only:
                exchange.extra_headers += _headers(decision, exchange.dialect)
            raise
        except asyncio.CancelledError:
            used = Amounts(1, work.tokens, 0)
            raise
        finally:
            await self._store.settle(id, limits, reserved, used)

    @asynccontextmanager
    async def file_work(
        self, exchange: Exchange, model: NamedModel | None, *, only: bool = False
    ) -> AsyncIterator[FileWork]:
        """Reading of files that precedes a request to `model` (None: not known yet), or (`only`) one that is free.

        A caller whose limits are used up is refused before it. How many tokens the files have is not known yet: the
        least that they may have is reserved meanwhile, with a place among the running requests, and given back when
        they are read; what follows counts all of them. Files that cannot be read, or that the client gives up, count
        as a request.
        """
        work, name = FileWork(), "" if model is None else model.base_name
        if only:
            limits = self._text_limits(exchange, name, suffix=":text")
        else:
            limits = self.limits_of(exchange, FixedWork(ModelName(name), 1))
        if model is None:
            limits = [limit for limit in limits if not limit.subject.startswith("model:")]
        if not limits:
            yield work
            return
        least = 0 if model is None else self.cost(exchange, model, Usage(1, 0, 1))
        id, reserved, used = uuid.uuid4().hex, Amounts(1, 1, 1, least), Amounts(0, 0, 0)
        decision = await self._store.reserve(id, limits, reserved)
        if decision.refusal is not None:
            exchange.extra_headers += _headers(decision, exchange.dialect)
            raise _refused(decision, reserved)
        try:
            yield work
            used = Amounts(int(work.counted), 0, 0)
        except (InvalidRequest, ClientDisconnected, asyncio.CancelledError):
            used = Amounts(1, 0, 0)
            raise
        finally:
            await self._store.settle(id, limits, reserved, used)

    def _text_limits(self, exchange: Exchange, model: str, suffix: str = "") -> list[Limit]:
        """What limits tokenizing: all but money."""
        return [
            dataclasses.replace(limit, subject=limit.subject + suffix) if suffix else limit
            for limit in self.limits_of(exchange, FixedWork(ModelName(model), 1))
            if limit.metric != "budget"
        ]

    async def problem(self) -> str | None:
        """Why every request is refused at the moment; None: they are not."""
        return await self._store.problem()

    async def close(self) -> None:
        await self._store.close()

    def cost(self, exchange: Exchange, model: NamedModel, usage: Usage) -> int:
        """What the caller pays for so many tokens, in nanodollars."""
        price = self._prices.price(model.base_name, model.adapter, exchange.caller.tier)
        percent = self._prices.percent(price, exchange.caller.tier, batch=batch_line(exchange) is not None)
        return price.cost(usage, percent=percent)

    async def budget_left(self, exchange: Exchange, model: str) -> BudgetLeft | None:
        """The tightest budget that a request to `model` counts against, in nanodollars; None: there is none."""
        limits = self.limits_of(exchange, FixedWork(ModelName(model), 1))
        budgets = [limit for limit in limits if limit.metric == "budget"]
        if not budgets:
            return None
        states = await self._store.states(budgets)
        return min((BudgetLeft(state.remaining, state.limit.most) for state in states), key=lambda left: left.remaining)

    def pricing(self, caller: Caller, model: str, adapter: str = "") -> dict[str, float]:
        """What the caller pays for a model, in dollars per million tokens."""
        price = self._prices.price(model, adapter, caller.tier)
        percent = self._prices.percent(price, caller.tier, batch=False)
        nanos = {"input": price.input, "cached_input": price.cached, "output": price.output}
        return {f"{name}_per_million": value * percent / 100_000 for name, value in nanos.items()}

    def describe(self, caller: Caller) -> dict[str, Any] | None:
        """The limits of the caller's tier, for the caller; None when nothing limits it."""
        tier = self._tiers.get(caller.tier)
        if tier is None or not caller.key:
            return None
        fields = {**dataclasses.asdict(tier), **_set(caller.limits)}
        del fields["allow"]  # it may name what does not exist for this caller
        return {"tier": fields.pop("name"), **fields, **({"key": own} if (own := _set(caller.key_limits)) else {})}

    def allowed(self, tier: str, own: Allowance) -> dict[str, Any]:
        """The limits of a tenant: its own, and its tier's where it has none."""
        rules = self._tiers.get(tier)
        return {name: getattr(_either(own, rules), name) for name in Allowance.__struct_fields__}

    async def standing(
        self, tenant: str, tier: str, own: Allowance, key: str = "", key_own: Allowance = NO_ALLOWANCE
    ) -> list[dict[str, Any]]:
        """How much of the limits of a tenant, and of one of its keys, is used now; money is in dollars."""
        limits = _limits(f"tenant:{tenant}", _either(own, self._tiers.get(tier)))
        of_tenant = len(limits)
        if key:
            limits += _limits(f"key:{tenant}:{key}:own", key_own)
        if not limits:
            return []
        return [
            {"per": "tenant" if index < of_tenant else "key", **_shown(state)}
            for index, state in enumerate(await self._store.states(limits))
        ]

    def limits_of(self, exchange: Exchange, generation: Metered) -> list[Limit]:
        """Everything that limits this request."""
        if exchange.shadow:
            return []
        caller, model = exchange.caller, generation.model.base_name
        user = exchange.record.user_id or ""
        found: list[Limit] = []
        tier = self._tiers.get(caller.tier)
        if caller.key:  # callers without a key cannot be told apart
            if tier is not None or caller.limits is not NO_ALLOWANCE:
                found += _limits(f"tenant:{caller.tenant}", _either(caller.limits, tier))
            if caller.key_limits is not NO_ALLOWANCE:
                found += _limits(f"key:{caller.tenant}:{caller.key}:own", caller.key_limits)
        for entry in self._limits:
            if (entry.tier and entry.tier != caller.tier) or (entry.tenant and entry.tenant != caller.tenant):
                continue
            if entry.model and entry.model != model:
                continue
            subject = {"tenant": "", "user": user, "key": caller.key, "model": model}[entry.per]
            if entry.per in ("user", "key") and not subject:
                continue
            within = f":{entry.model}" if entry.model else ""
            found += _limits(f"{entry.per}:{caller.tenant}:{subject}{within}", entry)
        return found


def _set(allowance: Allowance) -> dict[str, Any]:
    return {name: value for name, value in msgspec.structs.asdict(allowance).items() if value is not None}


def _either(own: Allowance, tier: TierConfig | None) -> TierConfig | Allowance:
    """A tenant's limits: its own before its tier's."""
    if tier is None or own is NO_ALLOWANCE:
        return own if tier is None else tier
    return dataclasses.replace(tier, **_set(own))


def _limits(subject: str, source: TierConfig | LimitConfig | Allowance) -> list[Limit]:
    found: list[Limit] = []
    if source.requests_per_minute is not None:
        found.append(Limit(f"{subject}:requests", "requests", source.requests_per_minute, _MINUTE))
    if source.tokens_per_minute is not None:
        found.append(Limit(f"{subject}:tokens", "tokens", source.tokens_per_minute, _MINUTE))
    if source.concurrent_requests is not None:
        found.append(Limit(f"{subject}:running", "concurrent", source.concurrent_requests, _LIFE_S))
    # Calendar periods: the date is part of the name, and the window long enough never to slide inside the period.
    for budget, period, days in ((source.daily_budget, "%Y-%m-%d", 2), (source.monthly_budget, "%Y-%m", 62)):
        if budget is not None:
            name = f"{subject}:budget:{datetime.datetime.now(datetime.UTC).strftime(period)}"
            found.append(Limit(name, "budget", round(budget * NANOS), days * _DAY))
    return found


def _shown(state: LimitState) -> dict[str, Any]:
    limit = state.limit
    if limit.metric == "budget":
        name = "daily_budget" if limit.window_s < 30 * _DAY else "monthly_budget"
        return {"limit": name, "most": limit.most / NANOS, "used": state.used / NANOS}
    name = "concurrent_requests" if limit.metric == "concurrent" else f"{limit.metric}_per_minute"
    return {"limit": name, "most": limit.most, "used": state.used}


def _refused(decision: Decision, amounts: Amounts) -> ApiError:
    refusal = decision.refusal
    assert refusal is not None
    limit, state = refusal.limit, next(s for s in decision.states if s.limit == refusal.limit)
    what = limit.subject.partition(":")[0]
    if limit.metric == "budget":
        return InsufficientQuota(
            f"The budget of this {what} is {dollars(limit.most)} for the period, {dollars(state.used)} is spent or "
            f"reserved, and this request may cost {dollars(amounts.budget)}."
        )
    asked, unit = amounts.of(limit.metric), {"concurrent": "requests at one time"}.get(limit.metric, limit.metric)
    if refusal.retry_s is None:
        return InvalidRequest(
            f"This request needs {asked:,} {unit}; this {what} may use {limit.most:,} in a minute, so it can never "
            "run. Send a shorter prompt or a smaller `max_tokens`.",
            code="rate_limit_exceeded",
            reason="rate_limit",
        )
    per = "" if limit.metric == "concurrent" else " per minute"
    return RateLimitExceeded(
        f"This {what} may use {limit.most:,} {unit}{per}; {state.used:,} are used and this request needs {asked:,}.",
        retry_after=1.0 if limit.metric == "concurrent" else refusal.retry_s,
    )


def _headers(decision: Decision, dialect: Dialect) -> list[tuple[bytes, bytes]]:
    """The state of the tightest limit on requests and on tokens."""
    headers: list[tuple[bytes, bytes]] = []
    for metric in ("requests", "tokens"):
        states = [state for state in decision.states if state.limit.metric == metric]
        if states:
            tightest = min(states, key=lambda state: state.remaining / state.limit.most)
            described = dialect.limit_headers(tightest)
            headers += [(name.encode(), value.encode()) for name, value in described.items()]
    return headers
