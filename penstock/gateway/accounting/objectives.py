"""What a client says of the latency that is of use to it: `x-slo-ttft-ms` and `x-slo-tpot-ms`.

A request that cannot meet them is refused before it begins, so that the client can go elsewhere: the first bounds the
wait for a place, the second chooses among replicas by their measured time per token. Neither stops an answer that has
begun.
"""

from __future__ import annotations

from penstock.gateway.app.decoding import not_supported
from penstock.gateway.app.exchange import Exchange
from penstock.protocol.errors import InvalidRequest

TTFT = b"x-slo-ttft-ms"
TPOT = b"x-slo-tpot-ms"


def longest_wait(exchange: Exchange) -> float | None:
    """Seconds to the first token; None: not said."""
    return _seconds(exchange, TTFT)


def longest_gap(exchange: Exchange) -> float | None:
    """Seconds from one token to the next; None: not said."""
    return _seconds(exchange, TPOT)


def check_objectives(exchange: Exchange, *, followed: bool = True) -> None:
    """Both must be numbers. `followed`: whether they can be honoured; otherwise they are named as ignored."""
    for name in (TTFT, TPOT):
        if _seconds(exchange, name) is not None and not followed:
            if exchange.refuses_unknown:
                raise not_supported(name.decode())
            if name.decode() not in exchange.ignored:
                exchange.ignored.append(name.decode())


def _seconds(exchange: Exchange, name: bytes) -> float | None:
    sent = exchange.header(name)
    if sent is None:
        return None
    try:
        milliseconds = float(sent)
    except ValueError:
        milliseconds = 0.0
    if not 0 < milliseconds < float("inf"):
        text = name.decode()
        raise InvalidRequest(f"The header {text} must be a number above 0.", param=text)
    return milliseconds / 1000.0
