"""Marks a request as work that outlives the process it runs in: another gateway takes it over and begins anew, so it is
billed for the run that comes to an end, and for no other."""

from __future__ import annotations

from typing import Protocol

from penstock.gateway.app.exchange import Exchange

DETACHED = "penstock.detached"
"""Where the ASGI scope of such a request has its `DetachedWork`."""


class DetachedWork(Protocol):
    """What the ledger needs to know about it."""

    def next_charge_id(self) -> str:
        """Of its next generation that comes to an end: in every run the same ids, in the same order. Empty: it has none
        yet."""

    async def counts(self) -> bool:
        """Whether the end of this run is the end of the work: nobody has cancelled it, or taken it over, meanwhile."""

    @property
    def goes_on(self) -> bool:
        """Whether this run ends only here, and another one will answer."""


def detached_work(exchange: Exchange) -> DetachedWork | None:
    """None for requests of clients."""
    work: DetachedWork | None = exchange.scope.get(DETACHED)
    return work
