"""GET /v1/admin/requests: the newest records of a request log that is kept in a database."""

from __future__ import annotations

from typing import Annotated

import msgspec

from penstock.gateway.app.decoding import decode_query
from penstock.gateway.app.exchange import Exchange
from penstock.metering.ledger import LedgerError
from penstock.metering.reports import moment
from penstock.metering.request_store import RequestStore
from penstock.protocol.errors import InvalidRequest, ServiceUnavailable
from penstock.storage import DatabaseError

MOST = 10_000


class RequestsQuery(msgspec.Struct, forbid_unknown_fields=True):
    since: str = "1h"
    tenant: str | None = None
    finish_reason: str | None = None
    limit: Annotated[int, msgspec.Meta(ge=1, le=MOST)] = 100


class RequestLogEndpoints:
    """The request log."""

    def __init__(self, store: RequestStore) -> None:
        self._store = store

    async def list_requests(self, exchange: Exchange) -> None:
        asked = decode_query(RequestsQuery, exchange.scope)
        try:
            entries = await self._store.read(
                since=moment(asked.since),
                tenant=asked.tenant,
                finish_reason=asked.finish_reason,
                limit=asked.limit,
            )
        except LedgerError as error:
            message = str(error)
            raise InvalidRequest(f"{message[:1].upper()}{message[1:]}.", param="since") from error
        except DatabaseError as error:
            raise ServiceUnavailable("The request log cannot be read at the moment.") from error
        await exchange.reply_json({"object": "list", "data": [msgspec.to_builtins(entry) for entry in entries]})
