"""GET /v1/traces: where the time of recent requests went. A tenant sees its own, a user's key that user's; a key with
the scope `admin` sees all.

The newest are kept in the memory of the gateway process that answered the request; other processes ask for them.
"""

from __future__ import annotations

import re
from typing import Annotated, Any

import msgspec

from penstock.gateway.app.decoding import decode_query
from penstock.gateway.app.exchange import Exchange
from penstock.gateway.generation.permissions import Permissions
from penstock.gateway.workers.group import WorkerGroup
from penstock.metering.ledger import Ledger
from penstock.metering.prices import dollars
from penstock.protocol.errors import NotFound
from penstock.storage import DatabaseError
from penstock.telemetry.timeline import Shown, TraceQuery

MOST = 1000
_CHARGE = re.compile("[0-9a-f]{32}$")
"""The id of an answer ends with the id of its charge."""


class TracesQuery(msgspec.Struct, forbid_unknown_fields=True):
    limit: Annotated[int, msgspec.Meta(ge=1, le=MOST)] = 20


class TraceEndpoints:
    """Timelines of recent requests."""

    def __init__(self, workers: WorkerGroup, permissions: Permissions, kept: int, ledger: Ledger | None = None) -> None:
        """`ledger`: where the price of a request is looked up; None: there is none."""
        self._workers = workers
        self._permissions = permissions
        self._kept = kept
        self._ledger = ledger

    async def list_traces(self, exchange: Exchange) -> None:
        asked = decode_query(TracesQuery, exchange.scope)
        found = await self._workers.traces(_query(exchange, asked.limit))
        await exchange.reply_json({"object": "list", "data": self._visible(exchange, found)})

    async def get_trace(self, exchange: Exchange) -> None:
        request_id: str = exchange.scope["path_params"]["request"]
        found = self._visible(exchange, await self._workers.traces(_query(exchange, 1, request_id)))
        if not found:
            raise NotFound(
                f"No timeline of a request `{request_id[:128]}` is kept here; the newest "
                f"{self._kept} are (`telemetry.recent_requests`)."
            )
        await exchange.reply_json({**found[0], "charge": await self._charge(found[0])})

    def _visible(self, exchange: Exchange, found: list[Shown]) -> list[Shown]:
        """Those that name no model that does not exist for the caller."""
        sees = self._permissions.sees_answer
        return [trace for trace in found if sees(exchange.caller, trace["model_version"], trace["adapter_id"])]

    async def _charge(self, trace: Shown) -> dict[str, Any] | None:
        """What the answer cost and whom it was charged to; None while that is not known."""
        match = _CHARGE.search(trace["response_id"] or "")
        if match is None or self._ledger is None:
            return None
        try:
            settled = await self._ledger.settled(match[0], trace["tenant"])
        except DatabaseError:
            return None
        if settled is None:
            return None
        return {
            "cost": dollars(settled.cost_nanos),
            "key": settled.key or None,
            "feature": settled.feature or None,
            "tier": settled.tier or None,
        }


def _query(exchange: Exchange, limit: int, request_id: str | None = None) -> TraceQuery:
    """What the caller may see of what it asks for."""
    caller = exchange.caller
    return TraceQuery(limit, None if "admin" in caller.scopes else caller.tenant, request_id, caller.only_user)
