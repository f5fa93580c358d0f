"""From the decisions noted in an exchange to entries of the audit log."""

from __future__ import annotations

from collections.abc import Iterator

from penstock.gateway.app.exchange import Exchange
from penstock.gateway.http.request_id import new_id
from penstock.metering.audit import MOST_NAME, AuditEntry
from penstock.metering.log_entries import clean


def audit_entries(exchange: Exchange) -> Iterator[AuditEntry]:
    """What data rules decided about a request that has ended."""
    caller = exchange.caller
    for (outcome, kind, name), (rule, at) in exchange.decisions.items():
        yield AuditEntry(
            id=new_id(),
            timestamp=at,
            request_id=exchange.request_id,
            tenant=caller.tenant,
            user_id=clean(exchange.record.user_id) or "",
            key_id=caller.key,
            path=exchange.route,
            outcome=outcome,
            kind=kind,
            name=clean(name[:MOST_NAME]) or "",
            rule=rule,
            demand=str(exchange.demand),
        )
