"""Latency targets that a client may set for a request, in milliseconds, as headers."""

from __future__ import annotations

import math

from penstock.gateway.app.decoding import not_supported
from penstock.gateway.app.exchange import Exchange
from penstock.protocol.errors import InvalidRequest


def ttft_target(exchange: Exchange) -> float | None:
    """Seconds to the first token after which the answer is of no use to the client (`x-slo-ttft-ms`)."""
    return None if exchange.answering else _seconds(exchange, "x-slo-ttft-ms")


def gap_target(exchange: Exchange) -> float | None:
    """Seconds between tokens that prompts of other requests may not exceed (`x-slo-tpot-ms`)."""
    return _seconds(exchange, "x-slo-tpot-ms")


def time_left(exchange: Exchange) -> float:
    """Seconds that a request may still wait: what is left of its `x-slo-ttft-ms` since it arrived, or any number."""
    target = ttft_target(exchange)
    return math.inf if target is None else max(target - exchange.elapsed_s, 0.0)


def check_targets(exchange: Exchange, *, followed: bool = True) -> None:
    """Both must be numbers. `followed`: whether they can be honoured; otherwise they are named as ignored."""
    for name in ("x-slo-ttft-ms", "x-slo-tpot-ms"):
        if _seconds(exchange, name) is None or followed:
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
        milliseconds = float(sent)
    except ValueError:
        milliseconds = 0.0
    if not 0 < milliseconds < math.inf:
        raise InvalidRequest(f"The header {name} must be a number above 0.", param=name)
    return milliseconds / 1000.0
