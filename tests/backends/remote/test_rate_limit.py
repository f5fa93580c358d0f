"""Limits of providers: nothing is sent into one that is used up (R-RT-8)."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

import pytest

from penstock.backends.remote.rate_limit import LONGEST_S, RateLimits


def test_openai_headers_refill_evenly() -> None:
    limits = RateLimits()
    assert limits.wait_s(0.0) == 0.0
    limits.seen(
        {
            "x-ratelimit-limit-requests": "60",
            "x-ratelimit-remaining-requests": "0",
            "x-ratelimit-reset-requests": "1m0s",
            "x-ratelimit-limit-tokens": "1000",
            "x-ratelimit-remaining-tokens": "400",
            "x-ratelimit-reset-tokens": "600ms",
        },
        100.0,
    )
    assert limits.wait_s(100.0) == pytest.approx(1.0), "one of 60 requests is back after a second"
    assert limits.wait_s(101.0) == pytest.approx(0.0, abs=1e-6)
    assert limits.wait_s(101.0, 300) == pytest.approx(0.0, abs=1e-6)
    assert limits.remaining == {"requests": 0, "tokens": 400}
    limits.seen({"x-ratelimit-remaining-requests": "5"}, 101.0)
    assert limits.wait_s(101.0, 700) == 0.0 and limits.wait_s(100.0, 700) == pytest.approx(0.3)
    limits.sent(300)
    assert limits.remaining == {"requests": 4, "tokens": 100}, "until the next answer tells"


def test_anthropic_headers() -> None:
    limits = RateLimits()
    until = (datetime.now(UTC) + timedelta(seconds=20)).isoformat().replace("+00:00", "Z")
    limits.seen(
        {"anthropic-ratelimit-input-tokens-remaining": "0", "anthropic-ratelimit-input-tokens-reset": until}, 5.0
    )
    assert limits.wait_s(5.0) == pytest.approx(20, abs=1) and limits.wait_s(26.0) == 0.0


def test_a_refusal_counts_for_as_long_as_it_says_but_not_for_ever() -> None:
    limits = RateLimits()
    limits.refused(7.0, 1.0)
    assert limits.wait_s(3.0) == 5.0 and limits.wait_s(8.0) == 0.0
    limits.refused(1e9, 10.0)
    assert limits.wait_s(10.0) == LONGEST_S


@pytest.mark.parametrize("value", ["", "x", "-1", "nan", "inf", "1e999"])
def test_odd_values_are_passed_over(value: str) -> None:
    limits = RateLimits()
    limits.seen({"x-ratelimit-remaining-requests": value, "x-ratelimit-reset-requests": value}, 0.0)
    assert limits.wait_s(0.0) == 0.0
    limits.seen({"x-ratelimit-remaining-requests": "0", "x-ratelimit-reset-requests": value}, 0.0)
    assert 0.0 < limits.wait_s(0.0) <= 1.0, "a short wait where nothing sensible is said"
