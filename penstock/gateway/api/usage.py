"""GET /v1/usage: what was used, from the ledger. A tenant sees its own; the scope `admin` sees everybody's."""

from __future__ import annotations

from urllib.parse import parse_qs

from penstock.gateway.exchange import Exchange
from penstock.gateway.service import Service
from penstock.metering.ledger import LedgerError
from penstock.metering.reporting import dimensions, moment, rows
from penstock.protocol.errors import InvalidRequest, ServiceUnavailable
from penstock.storage import DatabaseError

_PARAMETERS = ("by", "since", "until", "tenant")


async def usage(service: Service, exchange: Exchange) -> None:
    if service.accounts is None:
        raise ServiceUnavailable("This gateway keeps no accounts.")
    asked = {name: values[-1] for name, values in parse_qs(exchange.scope["query_string"].decode("latin-1")).items()}
    for name in asked:
        if name not in _PARAMETERS:
            raise InvalidRequest(
                f"Unknown parameter: `{name[:64]}`; there are {', '.join(_PARAMETERS)}.", param=name[:64]
            )
    tenant: str | None = exchange.caller.tenant
    if "admin" in exchange.caller.scopes:
        tenant = asked.get("tenant")
    elif asked.get("tenant", tenant) != tenant:
        raise InvalidRequest("A key without the scope `admin` sees its own tenant only.", param="tenant")
    try:
        by = dimensions(asked.get("by", "model"))
        since, until = (moment(asked[name]) if name in asked else None for name in ("since", "until"))
        totals = await service.accounts.ledger.totals(by, since=since, until=until, tenant=tenant)
    except LedgerError as error:
        message = str(error)
        raise InvalidRequest(f"{message[:1].upper()}{message[1:]}.") from error
    except DatabaseError as error:
        raise ServiceUnavailable("The ledger cannot be read at the moment.") from error
    await exchange.reply_json({"object": "list", "by": by, "data": rows(by, totals)})
