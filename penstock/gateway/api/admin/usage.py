"""GET /v1/usage: usage reports from the ledger. A tenant sees its own, a user's key that user's; a key with the scope
`admin` sees all."""

from __future__ import annotations

import msgspec

from penstock.gateway.app.decoding import decode_query
from penstock.gateway.app.exchange import Exchange
from penstock.metering.ledger import Ledger, LedgerError
from penstock.metering.reports import dimensions, moment, rows
from penstock.protocol.errors import InvalidRequest, ServiceUnavailable
from penstock.storage import DatabaseError


class UsageQuery(msgspec.Struct, forbid_unknown_fields=True):
    by: str = "model"
    since: str | None = None
    until: str | None = None
    tenant: str | None = None


class UsageEndpoints:
    """Usage reports."""

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger

    async def usage(self, exchange: Exchange) -> None:
        asked = decode_query(UsageQuery, exchange.scope)
        tenant: str | None = exchange.caller.tenant
        if "admin" in exchange.caller.scopes:
            tenant = asked.tenant
        elif asked.tenant not in (None, tenant):
            raise InvalidRequest("A key without the scope `admin` sees its own tenant only.", param="tenant")
        try:
            by = dimensions(asked.by)
            since, until = (None if when is None else moment(when) for when in (asked.since, asked.until))
            totals = await self._ledger.totals(
                by, since=since, until=until, tenant=tenant, user=exchange.caller.only_user
            )
        except LedgerError as error:
            message = str(error)
            raise InvalidRequest(f"{message[:1].upper()}{message[1:]}.") from error
        except DatabaseError as error:
            raise ServiceUnavailable("The ledger cannot be read at the moment.") from error
        await exchange.reply_json({"object": "list", "by": by, "data": rows(by, totals)})
