"""How long an answer may be for what it may cost (`x-penstock-max-cost`).

Invariant: an answer never costs more, as far as its prompt can be counted. A request whose `max_tokens` cost more is
refused with the estimate; one that gives no `max_tokens` ends where the money does.
"""

from __future__ import annotations

from penstock.gateway.accounting.cost_limit import HEADER, max_cost, too_expensive
from penstock.gateway.accounting.metered import NamedModel
from penstock.gateway.accounting.quotas import Quotas
from penstock.gateway.app.exchange import Exchange
from penstock.gateway.generation.sampling import TokenLimit
from penstock.metering.prices import Usage


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
