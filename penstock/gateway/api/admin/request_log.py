"""GET /v1/admin/requests, and GET /v1/requests for the caller's own: the newest records of a request log that is kept
in a database. A tenant sees its own requests, a user's key that user's."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated

import msgspec

from penstock.gateway.app.decoding import decode_query
from penstock.gateway.app.exchange import Exchange
from penstock.gateway.generation.permissions import Permissions
from penstock.metering.ledger import LedgerError
from penstock.metering.reports import moment
from penstock.metering.request_store import RequestStore
from penstock.protocol.errors import InvalidRequest, ServiceUnavailable, sentence
from penstock.storage import DatabaseError

MOST = 10_000


class OwnRequestsQuery(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    since: str = "1h"
    until: str | None = None
    model: str | None = None
    """Of this model or adapter."""
    finish_reason: str | None = None
    request_id: str | None = None
    inference: bool = False
    """Only requests to models, not to the rest of the API."""
    limit: Annotated[int, msgspec.Meta(ge=1, le=MOST)] = 100


class RequestsQuery(OwnRequestsQuery, forbid_unknown_fields=True, kw_only=True):
    tenant: str | None = None


class RequestLogEndpoints:
    """The request log. `inference`: the paths that serve tokens."""

    def __init__(self, store: RequestStore, permissions: Permissions, inference: Sequence[str]) -> None:
        self._store = store
        self._permissions = permissions
        self._inference = inference

    async def list_requests(self, exchange: Exchange) -> None:
        asked = decode_query(RequestsQuery, exchange.scope)
        await self._reply(exchange, asked, asked.tenant, None, own=False)

    async def list_own_requests(self, exchange: Exchange) -> None:
        asked = decode_query(OwnRequestsQuery, exchange.scope)
        await self._reply(exchange, asked, exchange.caller.tenant, exchange.caller.only_user, own=True)

    async def _reply(
        self, exchange: Exchange, asked: OwnRequestsQuery, tenant: str | None, user: str | None, *, own: bool
    ) -> None:
        try:
            entries = await self._store.read(
                since=moment(asked.since),
                until=None if asked.until is None else moment(asked.until),
                tenant=tenant,
                user=user,
                model=asked.model,
                finish_reason=asked.finish_reason,
                request_id=asked.request_id,
                routes=self._inference if asked.inference else (),
                limit=asked.limit,
            )
        except LedgerError as error:
            raise InvalidRequest(sentence(error), param="since") from error
        except DatabaseError as error:
            raise ServiceUnavailable("The request log cannot be read at the moment.") from error
        if own:
            sees = self._permissions.sees_answer
            entries = [one for one in entries if sees(exchange.caller, one.model_version, one.adapter_id)]
        await exchange.reply_json({"object": "list", "data": [msgspec.to_builtins(entry) for entry in entries]})
