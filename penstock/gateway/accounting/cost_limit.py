"""`x-penstock-max-cost`: what a request may cost at most, in dollars."""

from __future__ import annotations

import math
from collections.abc import Sequence

from penstock.gateway.accounting.metered import NamedModel
from penstock.gateway.accounting.quotas import Quotas
from penstock.gateway.app.exchange import Exchange
from penstock.metering.prices import NANOS, Usage, dollars
from penstock.protocol.errors import CostLimitExceeded, InvalidRequest

HEADER = "x-penstock-max-cost"
_KEY = HEADER.encode()


def max_cost(exchange: Exchange) -> int | None:
    """In nanodollars; None: the request sets no limit."""
    sent = exchange.header(_KEY)
    if sent is None:
        return None
    try:
        amount = float(sent)
    except ValueError:
        amount = math.nan
    if not 0 <= amount < 1e9:
        raise InvalidRequest(
            f"The header {HEADER} must be an amount in dollars, such as 0.01; it is {_shown(sent)!r}.",
            param=HEADER,
            code="invalid_max_cost",
        )
    return round(amount * NANOS)


def check_cost(quotas: Quotas, exchange: Exchange, model: NamedModel, tokens: int) -> None:
    """Refuses work on so many tokens that costs more than the request allows."""
    most = max_cost(exchange)
    if most is not None and (cost := quotas.cost(exchange, model, Usage(tokens))) > most:
        raise too_expensive(most, [(model.base_name, tokens, 0, cost)])


def too_expensive(most: int, estimates: Sequence[tuple[str, int, int, int]]) -> CostLimitExceeded:
    """`estimates`: for each model its name, prompt tokens, completion tokens, and the cost of both."""
    each = []
    for name, prompt, completion, cost in estimates:
        tokens = f"{prompt:,} prompt tokens" + (f" and up to {completion:,} completion tokens" if completion else "")
        each.append(f"${dollars(cost)} with `{name}` ({tokens})")
    return CostLimitExceeded(
        f"This request may cost {' and '.join(each)}; the header {HEADER} allows ${dollars(most)}. "
        "Ask for fewer tokens or allow more.",
        param=HEADER,
    )


def _shown(sent: bytes) -> str:
    return sent.decode("latin-1")[:64]
