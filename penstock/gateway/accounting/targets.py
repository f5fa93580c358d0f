"""Latency targets that a client may set for a request, in milliseconds, as headers."""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncIterator, Collection
from contextlib import asynccontextmanager

from penstock.gateway.app.decoding import not_supported
from penstock.gateway.app.exchange import Exchange
from penstock.protocol.errors import InvalidRequest, Overloaded

TTFT, GAP = "x-slo-ttft-ms", "x-slo-tpot-ms"


def ttft_target(exchange: Exchange) -> float | None:
    """Seconds to the first token after which the answer is of no use to the client (`x-slo-ttft-ms`)."""
    return None if exchange.answering else _seconds(exchange, TTFT)


def gap_target(exchange: Exchange) -> float | None:
    """Seconds between tokens that prompts of other requests may not exceed (`x-slo-tpot-ms`)."""
    return _seconds(exchange, GAP)


def time_left(exchange: Exchange) -> float:
    """Seconds that a request may still wait: what is left of its `x-slo-ttft-ms` since it arrived, or any number."""
    target = ttft_target(exchange)
    return math.inf if target is None else max(target - exchange.elapsed_s, 0.0)


@asynccontextmanager
async def in_time(exchange: Exchange) -> AsyncIterator[None]:
    """Inside, work whose answer comes whole, such as vectors, is cancelled when `x-slo-ttft-ms` is over."""
    check_targets(exchange, followed=(TTFT,))
    left = time_left(exchange)
    limit = asyncio.timeout(None if left == math.inf else left)
    try:
        async with limit:
            yield
    except TimeoutError:
        if not limit.expired():
            raise
        raise Overloaded(
            f"The answer was not there in the time that {TTFT} allows; try again later.",
            reason="queue_timeout",
            retry_after=2.0,
        ) from None


def check_targets(exchange: Exchange, *, followed: Collection[str] = (TTFT, GAP)) -> None:
    """Both must be numbers. `followed`: those that can be honoured; others are named as ignored."""
    for name in (TTFT, GAP):
        if _seconds(exchange, name) is None or name in followed:
            continue
        if exchange.refuses_unknown:
            raise not_supported(name)
        if name not in exchange.ignored:
            exchange.ignored.append(name)


def _seconds(exchange: Exchange, name: str) -> float | None:
    sent = exchange.header(name.encode())
    if sent is None:
        return None
    try:
        milliseconds = 0.0 if b"_" in sent else float(sent)  # Python alone reads 1_000 as a number
    except ValueError:
        milliseconds = 0.0
    if not 0 < milliseconds < math.inf:
        raise InvalidRequest(f"The header {name} must be a number above 0.", param=name)
    return milliseconds / 1000.0
