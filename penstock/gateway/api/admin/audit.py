"""GET /v1/admin/audit: the newest decisions by data rules: who, what, which rule and which outcome; no text."""

from __future__ import annotations

from typing import Annotated

import msgspec

from penstock.gateway.app.decoding import decode_query
from penstock.gateway.app.exchange import Exchange
from penstock.metering.audit import AuditStore, Outcome
from penstock.metering.ledger import LedgerError
from penstock.metering.reports import moment
from penstock.protocol.errors import InvalidRequest, ServiceUnavailable, sentence
from penstock.storage import DatabaseError

MOST = 10_000


class AuditQuery(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    since: str = "24h"
    until: str | None = None
    tenant: str | None = None
    key: str | None = None
    """The public prefix of a key."""
    outcome: Outcome | None = None
    name: str | None = None
    """What was decided about: a model, a tool server, a guardrail."""
    request_id: str | None = None
    limit: Annotated[int, msgspec.Meta(ge=1, le=MOST)] = 100


class AuditEndpoints:
    """The audit log."""

    def __init__(self, store: AuditStore) -> None:
        self._store = store

    async def list_audit(self, exchange: Exchange) -> None:
        asked = decode_query(AuditQuery, exchange.scope)
        try:
            entries = await self._store.read(
                since=moment(asked.since),
                until=None if asked.until is None else moment(asked.until),
                tenant=asked.tenant,
                key=asked.key,
                outcome=asked.outcome,
                name=asked.name,
                request_id=asked.request_id,
                limit=asked.limit,
            )
        except LedgerError as error:
            raise InvalidRequest(sentence(error), param="since") from error
        except DatabaseError as error:
            raise ServiceUnavailable("The audit log cannot be read at the moment.") from error
        await exchange.reply_json({"object": "list", "data": [msgspec.to_builtins(entry) for entry in entries]})
