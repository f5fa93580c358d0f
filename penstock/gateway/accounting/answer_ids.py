"""Ids of answers: their name in the ledger, in the engine and to the client. An id is never used twice."""

from __future__ import annotations

import uuid

from penstock.gateway.accounting.batch_line import batch_line
from penstock.gateway.app.exchange import Exchange
from penstock.gateway.http.request_id import new_id


class AnswerIds:
    """The ids of everything that one request generates, in order.

    A line of a batch gets the same ids however often it is tried, so that it is billed once.
    """

    __slots__ = ("_count", "_line")

    def __init__(self, exchange: Exchange) -> None:
        self._line = batch_line(exchange)
        self._count = 0

    def next(self) -> str:
        if self._line is None:
            return new_id()
        self._count += 1
        return uuid.uuid5(uuid.NAMESPACE_URL, f"{self._line.batch}/{self._line.number}/{self._count}").hex
