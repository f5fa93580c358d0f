"""Which limits apply to whom, over which period, and what a request takes and gives back; without a server."""

from __future__ import annotations

import asyncio
import datetime
from types import SimpleNamespace
from typing import Any

import pytest

from penstock.config.schema import LimitConfig, TierConfig
from penstock.gateway.accounting.batch_line import BATCH_LINE
from penstock.gateway.accounting.metered import FixedWork, ModelName
from penstock.gateway.accounting.quotas import LONG_CHARACTERS, Quotas
from penstock.gateway.app.dialects import OPENAI
from penstock.gateway.app.exchange import ClientDisconnected
from penstock.identity import Caller
from penstock.identity.allowance import Allowance
from penstock.limits import Limit
from penstock.limits.memory import MemoryLimits
from penstock.metering.prices import NANOS, Price, PriceBook, PriceEntry
from penstock.protocol.errors import ContextLengthExceeded, InsufficientQuota, InvalidRequest, RateLimitExceeded

FREE = TierConfig(name="free", requests_per_minute=3, tokens_per_minute=100, concurrent_requests=2)
DAY_S = 86400.0


class Clock:
    now = 1_000_000.0

    def __call__(self) -> float:
        return self.now


def quotas(*tiers: TierConfig, limits: tuple[LimitConfig, ...] = (), price: Price | None = None) -> Quotas:
    prices = PriceBook([PriceEntry(price or Price(10, 5, 20))])
    return Quotas(MemoryLimits(Clock()), tiers, limits, prices)


def exchange(user: str = "", batch: bool = False, **caller: Any) -> Any:
    who = Caller(**{"tenant": "acme", "key": "k1", "tier": "free", **caller})
    scope = {BATCH_LINE: ("b", 1)} if batch else {}
    record = SimpleNamespace(user_id=user)
    return SimpleNamespace(
        caller=who, record=record, dialect=OPENAI, scope=scope, extra_headers=[], shadow=False, header=lambda name: None
    )


def work(prompt: int = 10, most: int = 20, **more: Any) -> FixedWork:
    return FixedWork(ModelName("tiny"), prompt, most_completion_tokens=most, **more)


def subjects(limits: list[Limit]) -> list[str]:
    return [limit.subject for limit in limits]


def test_a_tier_limits_its_tenants_by_minute_and_by_calendar() -> None:
    tier = TierConfig(
        name="free",
        requests_per_minute=3,
        tokens_per_minute=100,
        concurrent_requests=2,
        daily_budget=1.5,
        monthly_budget=20.0,
    )
    today = datetime.datetime.now(datetime.UTC)
    found = quotas(tier).limits_of(exchange(), work())
    if datetime.datetime.now(datetime.UTC).date() == today.date():
        assert found == [
            Limit("tenant:acme:requests", "requests", 3, 60.0),
            Limit("tenant:acme:tokens", "tokens", 100, 60.0),
            Limit("tenant:acme:running", "concurrent", 2, 3600.0),
            Limit(f"tenant:acme:budget:{today:%Y-%m-%d}", "budget", 3 * NANOS // 2, 2 * DAY_S),
            Limit(f"tenant:acme:budget:{today:%Y-%m}", "budget", 20 * NANOS, 62 * DAY_S),
        ]
    day, month = found[3:]
    assert day.window_s > DAY_S and month.window_s > 31 * DAY_S, "they never slide inside their period"


def test_a_tenants_own_limits_replace_those_of_its_tier_one_by_one() -> None:
    own = Allowance(tokens_per_minute=7)
    found = quotas(FREE).limits_of(exchange(limits=own), work())
    assert [(limit.metric, limit.most) for limit in found] == [("requests", 3), ("tokens", 7), ("concurrent", 2)]
    assert [limit.most for limit in quotas().limits_of(exchange(limits=own), work())] == [7]
    assert quotas().limits_of(exchange(), work()) == []
    assert quotas(FREE).limits_of(exchange(key="", limits=own), work()) == [], "nobody can be told apart without a key"


def test_a_keys_own_limits_apply_besides() -> None:
    found = quotas(FREE).limits_of(exchange(key_limits=Allowance(requests_per_minute=1)), work())
    assert subjects(found)[-1] == "key:acme:k1:own:requests" and len(found) == 4


@pytest.mark.parametrize(
    ("entry", "user", "expected"),
    [
        (LimitConfig(per="user", requests_per_minute=1), "ann", ["user:acme:ann:requests"]),
        (LimitConfig(per="user", requests_per_minute=1), "", []),
        (LimitConfig(per="key", tokens_per_minute=1), "", ["key:acme:k1:tokens"]),
        (LimitConfig(per="tenant", tokens_per_minute=1), "", ["tenant:acme::tokens"]),
        (LimitConfig(per="model", tokens_per_minute=1), "", ["model:acme:tiny:tokens"]),
        (LimitConfig(per="tenant", model="tiny", tokens_per_minute=1), "", ["tenant:acme::tiny:tokens"]),
        (LimitConfig(per="tenant", model="large", tokens_per_minute=1), "", []),
        (LimitConfig(per="tenant", tier="free", tokens_per_minute=1), "", ["tenant:acme::tokens"]),
        (LimitConfig(per="tenant", tier="paid", tokens_per_minute=1), "", []),
        (LimitConfig(per="tenant", tenant="acme", tokens_per_minute=1), "", ["tenant:acme::tokens"]),
        (LimitConfig(per="tenant", tenant="other", tokens_per_minute=1), "", []),
        (LimitConfig(per="tenant", tenant="other", tier="free", tokens_per_minute=1), "", []),
    ],
)
def test_an_entry_limits_those_it_names(entry: LimitConfig, user: str, expected: list[str]) -> None:
    last = LimitConfig(per="tenant", concurrent_requests=9)
    found = quotas(limits=(entry, last)).limits_of(exchange(user), work())
    assert subjects(found) == [*expected, "tenant:acme::running"], "and the entries after it still count"


def test_entries_of_keys_leave_out_callers_without_one() -> None:
    entry = LimitConfig(per="key", tokens_per_minute=1)
    assert quotas(limits=(entry,)).limits_of(exchange(key=""), work()) == []


async def test_a_request_takes_its_most_and_gives_back_what_it_did_not_use() -> None:
    tier = TierConfig(name="free", tokens_per_minute=100, requests_per_minute=3, daily_budget=1.0)
    rules, asked = quotas(tier, price=Price(10, 5, 20)), exchange()
    ran = work(10, 20, cached_tokens=4, completion_tokens=3)
    held = await rules.reserve(asked, ran)
    assert held is not None
    assert (held.reserved.requests, held.reserved.tokens, held.reserved.concurrent) == (1, 30, 1)
    assert held.reserved.budget == 10 * 10 + 20 * 20 and held.percent == 100
    assert held.left == pytest.approx(2 / 3), "the tightest"
    assert (b"x-ratelimit-remaining-tokens", b"70") in asked.extra_headers
    assert (b"x-ratelimit-remaining-requests", b"2") in asked.extra_headers
    ran.billable = True
    await rules.settle(held, ran)
    again = exchange()
    more = await rules.reserve(again, work(0, 0))
    assert more is not None and (b"x-ratelimit-remaining-tokens", b"87") in again.extra_headers
    spent = 1.0 - (6 * 10 + 4 * 5 + 3 * 20) / NANOS
    assert more.left == pytest.approx(1 / 3) and spent < 1.0
    await rules.settle(more, work())  # not billable: nothing was used, but it was a request
    last = exchange()
    assert await rules.reserve(last, work(0, 0)) is not None
    assert (b"x-ratelimit-remaining-requests", b"0") in last.extra_headers
    assert (b"x-ratelimit-remaining-tokens", b"87") in last.extra_headers


async def test_a_part_of_a_counted_request_takes_tokens_and_money_only() -> None:
    rules, asked = quotas(FREE), exchange()
    part = await rules.reserve(asked, work(10, 20), counted=False)
    assert part is not None and (part.reserved.requests, part.reserved.concurrent, part.reserved.tokens) == (0, 0, 30)
    assert asked.extra_headers == []


async def test_batches_and_recalled_answers_have_their_price() -> None:
    tier = TierConfig(name="free", daily_budget=1.0)
    rules = quotas(tier, price=Price(10, 5, 20, batch_percent=30))
    line = await rules.reserve(exchange(batch=True), work(10, 20))
    assert line is not None and (line.percent, line.reserved.budget) == (30, 150)
    recalled = await rules.reserve(exchange(), work(10, 20, from_cache=True))
    assert recalled is not None and recalled.reserved.budget == 30 * 5


async def test_a_refusal_says_what_and_when() -> None:
    rules = quotas(FREE)
    with pytest.raises(InvalidRequest, match=r"needs 101 tokens; this tenant may use 100 in a minute"):
        await rules.reserve(exchange(), work(81, 20))
    assert await rules.reserve(exchange(), work(60, 20)) is not None
    with pytest.raises(RateLimitExceeded, match=r"may use 100 tokens per minute; 80 are used and .* needs 21") as late:
        await rules.reserve(exchange(), work(1, 20))
    assert late.value.retry_after == 61.0
    assert await rules.reserve(exchange(), work(1, 1)) is not None
    with pytest.raises(RateLimitExceeded, match=r"may use 2 requests at one time; 2 are used") as busy:
        await rules.reserve(exchange(), work(1, 1))
    assert busy.value.retry_after == 1.0
    poor = quotas(TierConfig(name="free", daily_budget=0.000001))
    with pytest.raises(InsufficientQuota, match=r"budget of this tenant is 0.000001 .* 0.00 is spent"):
        await poor.reserve(exchange(), work(1000, 20))


async def test_headers_show_the_tightest_limit() -> None:
    roomy = LimitConfig(per="tenant", tokens_per_minute=1000)
    tight = LimitConfig(per="key", tokens_per_minute=40)
    asked = exchange()
    await quotas(limits=(roomy, tight, LimitConfig(per="model", tokens_per_minute=500))).reserve(asked, work(10, 20))
    assert (b"x-ratelimit-limit-tokens", b"40") in asked.extra_headers
    assert (b"x-ratelimit-remaining-tokens", b"10") in asked.extra_headers


def test_what_a_caller_is_told_about_its_limits() -> None:
    rules = quotas(TierConfig(name="free", context_tokens=64, requests_per_minute=3))
    with_key, without = exchange().caller, exchange(key="").caller
    cap = rules.requests.cap(with_key, "context_tokens")
    assert cap is not None and (cap.most, cap.scope) == (64, "tier")
    for caller in (without, exchange(tier="x").caller):
        assert rules.requests.cap(caller, "context_tokens") is None
    assert rules.describe(without) is None and rules.describe(exchange(tier="x").caller) is None
    described = rules.describe(exchange(limits=Allowance(requests_per_minute=1)).caller)
    assert described is not None and (described["tier"], described["requests_per_minute"]) == ("free", 1)
    assert "key" not in described and "name" not in described
    own = rules.describe(exchange(key_limits=Allowance(tokens_per_minute=5)).caller)
    assert own is not None and own["key"] == {"tokens_per_minute": 5}
    allowed = rules.allowed("free", Allowance(tokens_per_minute=5))
    assert {name: allowed[name] for name in list(allowed)[:5]} == {
        "requests_per_minute": 3,
        "tokens_per_minute": 5,
        "concurrent_requests": None,
        "daily_budget": None,
        "monthly_budget": None,
    }


async def left(rules: Quotas) -> dict[str, int]:
    """What remains of each limit, as a request that can never run hears."""
    asked = exchange()
    with pytest.raises((InvalidRequest, RateLimitExceeded)):
        await rules.reserve(asked, work(10**6, 0))
    told = {name.decode(): int(value) for name, value in asked.extra_headers if b"remaining" in name}
    return {name.removeprefix("x-ratelimit-remaining-"): value for name, value in told.items()}


LIMITED = TierConfig(name="free", requests_per_minute=10, tokens_per_minute=100, concurrent_requests=2)


async def test_a_short_text_that_succeeds_takes_nothing_for_itself() -> None:
    rules = quotas(LIMITED)
    async with rules.text_work(exchange(), "tiny", LONG_CHARACTERS) as done:
        done.tokens = 50
    assert await left(rules) == {"requests": 10, "tokens": 100}


@pytest.mark.parametrize("characters", [LONG_CHARACTERS, LONG_CHARACTERS + 1])
async def test_a_prompt_that_is_too_long_counts_as_a_request_with_its_tokens(characters: int) -> None:
    rules = quotas(LIMITED)
    with pytest.raises(ContextLengthExceeded):
        async with rules.text_work(exchange(), "tiny", characters):
            raise ContextLengthExceeded(limit=20, prompt_tokens=30)
    assert await left(rules) == {"requests": 9, "tokens": 70}


async def test_a_long_text_holds_its_place_and_gives_it_back() -> None:
    rules = quotas(TierConfig(name="free", requests_per_minute=9, tokens_per_minute=100, concurrent_requests=1))
    async with rules.text_work(exchange(), "tiny", LONG_CHARACTERS + 1) as done:
        done.tokens = 40
        assert await left(rules) == {"requests": 8, "tokens": 99}
        with pytest.raises(RateLimitExceeded, match="1 requests at one time"):
            async with rules.text_work(exchange(), "tiny", LONG_CHARACTERS + 1):
                pass
    assert await left(rules) == {"requests": 9, "tokens": 100}, "the request itself counts later"
    with pytest.raises(InvalidRequest):
        async with rules.text_work(exchange(), "tiny", LONG_CHARACTERS + 1) as done:
            done.tokens = 40
            raise InvalidRequest("no")
    assert await left(rules) == {"requests": 8, "tokens": 60}
    with pytest.raises(asyncio.CancelledError):
        async with rules.text_work(exchange(), "tiny", LONG_CHARACTERS + 1) as done:
            done.tokens = 20
            raise asyncio.CancelledError
    assert await left(rules) == {"requests": 7, "tokens": 40}


async def test_counting_tokens_has_the_same_limits_again_for_itself() -> None:
    rules, asked = quotas(LIMITED), exchange()
    async with rules.text_work(asked, "tiny", 1, only=True) as done:
        done.tokens = 30
    assert (b"x-ratelimit-remaining-requests", b"9") in asked.extra_headers
    assert await left(rules) == {"requests": 10, "tokens": 100}
    again = exchange()
    async with rules.text_work(again, "tiny", 1, only=True):
        pass
    assert (b"x-ratelimit-remaining-tokens", b"69") in again.extra_headers
    assert (b"x-ratelimit-remaining-requests", b"8") in again.extra_headers
    async with quotas().text_work(exchange(), "tiny", LONG_CHARACTERS + 1) as free:
        free.tokens = 1


async def test_files_are_read_only_for_callers_with_something_left() -> None:
    """They hold a place and the least that they may cost, and give both back; what fails counts as a request."""
    one = TierConfig(name="free", requests_per_minute=3, tokens_per_minute=100, concurrent_requests=1)
    rules, model = quotas(one), ModelName("tiny")
    async with rules.file_work(exchange(), model):
        assert await left(rules) == {"requests": 2, "tokens": 99}
        refused = exchange()
        with pytest.raises(RateLimitExceeded, match="1 requests at one time"):
            async with rules.file_work(refused, model):
                pytest.fail("nothing is read")
        assert refused.extra_headers, "a refusal says what is left"
    assert await left(rules) == {"requests": 3, "tokens": 100}, "the request itself counts later"
    for error in (InvalidRequest("no"), ClientDisconnected(), asyncio.CancelledError()):
        with pytest.raises(type(error)):
            async with rules.file_work(exchange(), model):
                raise error
    assert await left(rules) == {"requests": 0, "tokens": 100}
    with pytest.raises(RateLimitExceeded):
        async with rules.file_work(exchange(), model):
            pytest.fail("nothing is read")
    async with rules.file_work(exchange(), model, only=True) as kept:  # has limits of its own
        kept.counted = True
    async with quotas().file_work(exchange(), None):
        pass


async def test_limits_of_each_model_hold_for_files_once_it_is_known() -> None:
    """Routes and what is stored have none yet; they do not share the limits of one without a name."""
    rules = quotas(limits=(LimitConfig(per="model", concurrent_requests=1, requests_per_minute=1),))
    async with rules.file_work(exchange(), None) as first, rules.file_work(exchange(), None, only=True) as second:
        first.counted = second.counted = True
        async with rules.file_work(exchange(), None):
            pass
    async with rules.file_work(exchange(), ModelName("tiny")):
        with pytest.raises(RateLimitExceeded):
            async with rules.file_work(exchange(), ModelName("tiny")):
                pytest.fail("nothing is read")


async def test_files_are_not_read_for_a_budget_that_is_spent() -> None:
    tier = TierConfig(name="free", daily_budget=30 / NANOS)
    rules, model = quotas(tier), ModelName("tiny")
    assert await rules.reserve(exchange(), work(1, 1)) is not None
    with pytest.raises(InsufficientQuota):
        async with rules.file_work(exchange(), model):
            pytest.fail("nothing is read")
    async with rules.file_work(exchange(), None):  # it may be one that is free
        pass
    free = quotas(tier, price=Price(0, 0, 0))
    await free.reserve(exchange(), work(1, 1))
    async with free.file_work(exchange(), model):
        pass
