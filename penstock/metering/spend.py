"""What was spent today and this month: calendar periods in UTC, as budgets count them."""

from __future__ import annotations

import datetime
import time
from collections.abc import Callable

from penstock.metering.ledger import Ledger
from penstock.metering.prices import NANOS

Spent = dict[str, float]
"""Dollars by period: `today` and `month`."""
NOTHING: Spent = {"today": 0.0, "month": 0.0}


def periods(now: float) -> dict[str, float]:
    """When the present day and month began."""
    today = datetime.datetime.fromtimestamp(now, datetime.UTC).replace(hour=0, minute=0, second=0, microsecond=0)
    return {"today": today.timestamp(), "month": today.replace(day=1).timestamp()}


async def spent(
    ledger: Ledger, tenant: str, user: str | None = None, *, clock: Callable[[], float] = time.time
) -> Spent:
    """What a tenant, or one of its users, has spent."""
    found: Spent = {}
    for period, since in periods(clock()).items():
        found[period] = (await ledger.totals(since=since, tenant=tenant, user=user))[0].cost_nanos / NANOS
    return found


async def spent_by_key(
    ledger: Ledger, tenant: str | None, *, clock: Callable[[], float] = time.time
) -> dict[str, Spent]:
    """What was spent with each key of a tenant (None: of all tenants); keys without any are left out."""
    found: dict[str, Spent] = {}
    for period, since in periods(clock()).items():
        for total in await ledger.totals(["key"], since=since, tenant=tenant):
            found.setdefault(str(total.group[0]), {**NOTHING})[period] = total.cost_nanos / NANOS
    return found
