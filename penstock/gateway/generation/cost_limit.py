"""`x-penstock-max-cost`: what an answer may cost at most, in dollars.

Invariant: an answer never costs more, as far as its prompt can be counted. A request whose `max_tokens` cost more is
refused with the estimate; one that gives no `max_tokens` ends where the money does.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from penstock.gateway.accounting.metered import NamedModel
from penstock.gateway.accounting.quotas import Quotas
from penstock.gateway.app.exchange import Exchange
from penstock.gateway.generation.sampling import TokenLimit
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


def within_cost(
    quotas: Quotas, exchange: Exchange, model: NamedModel, prompt_tokens: int, limit: TokenLimit, choices: int = 1
) -> TokenLimit:
    """The limit of an answer's tokens that keeps it within the cost that the request allows; raises where even a
    shortest answer, or the one that was asked for, would cost more."""
    most = max_cost(exchange)
    if most is None:
        return limit
    prompt = quotas.cost(exchange, model, Usage(prompt_tokens))
    answer = (limit.max_tokens or 1) * choices
    shortest = quotas.cost(exchange, model, Usage(prompt_tokens, 0, answer))
    if shortest > most:
        raise too_expensive(most, [(model.adapter or model.base_name, prompt_tokens, answer, shortest)])
    if limit.max_tokens is not None:
        return limit
    # A million tokens, so that rounding does not count.
    each = quotas.cost(exchange, model, Usage(0, 0, 1_000_000 * choices)) / 1_000_000
    return limit if each == 0 else limit.lowered(max(int((most - prompt) / each), 1), HEADER)


def too_expensive(most: int, estimates: Sequence[tuple[str, int, int, int]]) -> CostLimitExceeded:
    """`estimates`: for each model its name, prompt tokens, completion tokens, and the cost of both."""
    each = " and ".join(
        f"${dollars(cost)} with `{name}` ({prompt:,} prompt tokens and up to {completion:,} completion tokens)"
        for name, prompt, completion, cost in estimates
    )
    return CostLimitExceeded(
        f"This request may cost {each}; the header {HEADER} allows ${dollars(most)}. Ask for fewer completion tokens, "
        "shorten the prompt or allow more.",
        param=HEADER,
    )


def _shown(sent: bytes) -> str:
    return sent.decode("latin-1")[:64]
