"""The demand of a request: what its caller's rules demand, narrowed by its header `x-penstock-require`.

Invariant: every value of a repeated header counts, and one that cannot be read is a 400: a demand is never dropped.
"""

from __future__ import annotations

from collections.abc import Sequence

from penstock.gateway.app.exchange import Exchange
from penstock.identity.data_rules import DataRules
from penstock.identity.labels import Demand, LabelError, Requirement, parse_demand
from penstock.protocol.errors import DataRuleForbids, InvalidRequest

REQUIRE = "x-penstock-require"
_HEADER = REQUIRE.encode()


def request_demand(exchange: Exchange, rules: DataRules) -> Demand:
    """The labels that whatever gets data of this request must have."""
    demand = rules.demand(exchange.caller)
    if exchange.header(_HEADER) is None:
        return demand
    for sent in exchange.headers(_HEADER):
        demand = demand.narrowed(read_require(sent))
    return demand


def permit(exchange: Exchange, kind: str, name: str, unmet: Sequence[Requirement]) -> None:
    """Called right before `name` gets data of the request: notes the decision. Raises where it does not meet the
    demand."""
    demand = exchange.demand
    if not demand:
        return
    if unmet:
        exchange.decide("refused", kind, name, demand.why(unmet))
        raise DataRuleForbids(f"`{name[:256]}` may not get this request: {demand.why(unmet)}.")
    exchange.decide("permitted", kind, name, demand.why(demand.requirements))


def withheld(exchange: Exchange, kind: str, name: str, unmet: Sequence[Requirement]) -> bool:
    """Whether `name` is left out of the request, which is noted."""
    if not unmet:
        return False
    exchange.decide("withheld", kind, name, exchange.demand.why(unmet))
    return True


def sent_require(exchange: Exchange) -> str:
    """What the request itself demands, for work that is done later; it has been read before."""
    return ", ".join(sent.decode("latin-1") for sent in exchange.headers(_HEADER))


def read_require(sent: bytes) -> Demand:
    """The demand of one header."""
    try:
        return parse_demand(sent.decode("latin-1"), REQUIRE)
    except LabelError as error:
        raise InvalidRequest(f"The header {REQUIRE} cannot be read: {error}.", param=REQUIRE) from error
