"""GET /v1/traces: where the time of recent requests went. A tenant sees its own; the scope `admin` sees everybody's.

They are kept in the memory of the gateway process that answered the request, the newest of them.
"""

from __future__ import annotations

import itertools
from typing import Any
from urllib.parse import parse_qs

import msgspec

from penstock.gateway.exchange import Exchange
from penstock.gateway.service import Service
from penstock.protocol.errors import InvalidRequest, NotFound
from penstock.telemetry.timeline import Timeline

MOST = 1000


async def list_traces(service: Service, exchange: Exchange) -> None:
    asked = {name: values[-1] for name, values in parse_qs(exchange.scope["query_string"].decode("latin-1")).items()}
    for name in asked:
        if name != "limit":
            raise InvalidRequest(f"Unknown parameter: `{name[:64]}`; there is limit.", param=name[:64])
    limit = asked.get("limit", "20")
    if not (limit.isascii() and limit.isdigit() and len(limit) < 9 and 1 <= int(limit) <= MOST):
        raise InvalidRequest(f"`limit` must be a whole number from 1 to {MOST}.", param="limit")
    found = itertools.islice(service.watch.recent.newest(_visible(exchange)), int(limit))
    await exchange.reply_json({"object": "list", "data": [_shown(timeline) for timeline in found]})


async def get_trace(service: Service, exchange: Exchange) -> None:
    request_id: str = exchange.scope["path_params"]["request"]
    found = service.watch.recent.find(request_id, _visible(exchange))
    if found is None:
        raise NotFound(
            f"No timeline of a request `{request_id[:128]}` is kept here; the newest "
            f"{service.settings.telemetry.recent_requests} are (`telemetry.recent_requests`)."
        )
    await exchange.reply_json(_shown(found))


def _visible(exchange: Exchange) -> str | None:
    """Whose requests the caller may see; None: everybody's."""
    return None if "admin" in exchange.caller.scopes else exchange.caller.tenant


def _shown(timeline: Timeline) -> dict[str, Any]:
    return {
        "object": "trace",
        **msgspec.structs.asdict(timeline.record),
        "trace_id": None if timeline.trace is None else timeline.trace.trace_id,
        "phases": [
            {
                "name": phase.name,
                "start_ms": round(phase.start * 1000, 3),
                "duration_ms": round(phase.seconds * 1000, 3),
                "detail": phase.detail,
            }
            for phase in timeline.phases()
        ],
    }
