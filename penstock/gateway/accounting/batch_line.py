"""Marks a request as a line of a batch: it runs after all others, at the batch price, and is billed once answered."""

from __future__ import annotations

from typing import NamedTuple

from penstock.gateway.app.exchange import Exchange

BATCH_LINE = "penstock.batch_line"
"""Where the ASGI scope of such a request has its `BatchLine`."""


class BatchLine(NamedTuple):
    batch: str
    number: int


def batch_line(exchange: Exchange) -> BatchLine | None:
    """The line of a batch that a request is; None for requests of clients."""
    line: BatchLine | None = exchange.scope.get(BATCH_LINE)
    return line
