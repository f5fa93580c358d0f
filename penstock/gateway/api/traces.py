"""GET /v1/traces: where the time of recent requests went. A tenant sees its own; the scope `admin` sees everybody's.

They are kept in the memory of the gateway process that answered the request, the newest of them; others ask it.
"""

from __future__ import annotations

from urllib.parse import parse_qs

from penstock.gateway.exchange import Exchange
from penstock.gateway.service import Service
from penstock.protocol.errors import InvalidRequest, NotFound
from penstock.telemetry.timeline import TraceQuery

MOST = 1000


async def list_traces(service: Service, exchange: Exchange) -> None:
    asked = {name: values[-1] for name, values in parse_qs(exchange.scope["query_string"].decode("latin-1")).items()}
    for name in asked:
        if name != "limit":
            raise InvalidRequest(f"Unknown parameter: `{name[:64]}`; there is limit.", param=name[:64])
    limit = asked.get("limit", "20")
    if not (limit.isascii() and limit.isdigit() and len(limit) < 9 and 1 <= int(limit) <= MOST):
        raise InvalidRequest(f"`limit` must be a whole number from 1 to {MOST}.", param="limit")
    found = await service.traces(TraceQuery(int(limit), _visible(exchange)))
    await exchange.reply_json({"object": "list", "data": found})


async def get_trace(service: Service, exchange: Exchange) -> None:
    request_id: str = exchange.scope["path_params"]["request"]
    found = await service.traces(TraceQuery(1, _visible(exchange), request_id))
    if not found:
        raise NotFound(
            f"No timeline of a request `{request_id[:128]}` is kept here; the newest "
            f"{service.settings.telemetry.recent_requests} are (`telemetry.recent_requests`)."
        )
    await exchange.reply_json(found[0])


def _visible(exchange: Exchange) -> str | None:
    """Whose requests the caller may see; None: everybody's."""
    return None if "admin" in exchange.caller.scopes else exchange.caller.tenant
