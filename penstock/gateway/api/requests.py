"""GET /v1/admin/requests: the newest records of the request log, when it is in a database."""

from __future__ import annotations

from urllib.parse import parse_qs

import msgspec

from penstock.gateway.exchange import Exchange
from penstock.gateway.service import Service
from penstock.metering.ledger import LedgerError
from penstock.metering.reporting import moment
from penstock.metering.request_store import RequestStore
from penstock.protocol.errors import InvalidRequest, ServiceUnavailable
from penstock.storage import DatabaseError

_PARAMETERS = ("since", "tenant", "finish_reason", "limit")
MOST = 10_000


async def list_requests(service: Service, exchange: Exchange) -> None:
    asked = {name: values[-1] for name, values in parse_qs(exchange.scope["query_string"].decode("latin-1")).items()}
    for name in asked:
        if name not in _PARAMETERS:
            raise InvalidRequest(
                f"Unknown parameter: `{name[:64]}`; there are {', '.join(_PARAMETERS)}.", param=name[:64]
            )
    limit = asked.get("limit", "100")
    if not (limit.isascii() and limit.isdigit() and len(limit) < 9 and 1 <= int(limit) <= MOST):
        raise InvalidRequest(f"`limit` must be a whole number from 1 to {MOST}.", param="limit")
    store = None if service.request_log is None else service.request_log.sink
    if not isinstance(store, RequestStore):
        raise ServiceUnavailable("This gateway has no request log that it could read; see `request_log.url`.")
    try:
        entries = await store.read(
            since=moment(asked.get("since", "1h")),
            tenant=asked.get("tenant"),
            finish_reason=asked.get("finish_reason"),
            limit=int(limit),
        )
    except LedgerError as error:
        message = str(error)
        raise InvalidRequest(f"{message[:1].upper()}{message[1:]}.", param="since") from error
    except DatabaseError as error:
        raise ServiceUnavailable("The request log cannot be read at the moment.") from error
    await exchange.reply_json({"object": "list", "data": [msgspec.to_builtins(entry) for entry in entries]})
