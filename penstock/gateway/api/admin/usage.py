"""GET /v1/usage: usage reports from the ledger. A tenant sees its own, a user's key that user's; a key with the scope
`admin` sees all."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import msgspec

from penstock.gateway.app.decoding import decode_query
from penstock.gateway.app.exchange import Exchange
from penstock.gateway.generation.permissions import Permissions
from penstock.identity import Caller
from penstock.metering.ledger import Dimension, Ledger, LedgerError, Total
from penstock.metering.reports import dimensions, moment, rows
from penstock.protocol.errors import InvalidRequest, ServiceUnavailable, sentence
from penstock.storage import DatabaseError

OTHER = "other"
"""Stands for models that a caller may not use (any more)."""


class UsageQuery(msgspec.Struct, forbid_unknown_fields=True):
    by: str = "model"
    since: str | None = None
    until: str | None = None
    tenant: str | None = None


class UsageEndpoints:
    """Usage reports."""

    def __init__(self, ledger: Ledger, permissions: Permissions) -> None:
        self._ledger = ledger
        self._permissions = permissions

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
            raise InvalidRequest(sentence(error)) from error
        except DatabaseError as error:
            raise ServiceUnavailable("The ledger cannot be read at the moment.") from error
        totals = self._visible(exchange.caller, by, totals)
        await exchange.reply_json({"object": "list", "by": by, "data": rows(by, totals)})

    def _visible(self, caller: Caller, by: Sequence[Dimension], totals: list[Total]) -> list[Total]:
        """The same sums. What was used of models that do not exist for the caller is added up under `OTHER`."""
        named = [index for index, name in enumerate(by) if name in ("model", "adapter")]
        if not named or "admin" in caller.scopes:
            return totals
        sums: dict[tuple[str | int, ...], Total] = {}
        for total in totals:
            group = list(total.group)
            for index in named:
                if not self._permissions.sees(caller, str(group[index])):
                    group[index] = OTHER
            key = tuple(group)
            sums[key] = replace(total, group=key) if key not in sums else sums[key].plus(total)
        return list(sums.values())
