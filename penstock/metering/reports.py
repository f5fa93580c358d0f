"""Parses periods and dimensions of usage reports, and formats totals as rows."""

from __future__ import annotations

import datetime
import re
import time
from collections.abc import Sequence
from typing import cast

from penstock.metering.ledger import DIMENSIONS, Dimension, LedgerError, Total
from penstock.metering.prices import dollars

_PERIODS = {"m": 60, "h": 3600, "d": 86400, "w": 7 * 86400}


def moment(text: str, now: float | None = None) -> float:
    """Seconds since 1970 of `24h` or `30d` ago, of a date (`2026-11-01`, `2026-11-01T12:00`; UTC unless it says
    otherwise), or as given."""
    if match := re.fullmatch(r"(\d+)([mhdw])", text):
        return (time.time() if now is None else now) - int(match[1]) * _PERIODS[match[2]]
    if re.fullmatch(r"\d{9,12}(\.\d+)?", text):
        return float(text)
    try:
        when = datetime.datetime.fromisoformat(text)
    except ValueError:
        raise LedgerError(f"{text!r} is not a time; write 24h, 30d or a date such as 2026-11-01") from None
    return (when if when.tzinfo else when.replace(tzinfo=datetime.UTC)).timestamp()


def dimensions(text: str) -> list[Dimension]:
    """The validated dimensions in text such as `tenant,model`."""
    names = [name.strip() for name in text.split(",") if name.strip()]
    unknown = [name for name in names if name not in DIMENSIONS]
    if unknown:
        raise LedgerError(f"usage can be grouped by {', '.join(DIMENSIONS)}, not by {', '.join(unknown)}")
    return cast("list[Dimension]", names)


def rows(by: Sequence[Dimension], totals: Sequence[Total]) -> list[dict[str, str | int]]:
    """One mapping per total: the dimensions, then the sums; costs are dollars as exact text."""
    return [
        {
            **{name: _shown(name, value) for name, value in zip(by, total.group, strict=True)},
            "requests": total.requests,
            "prompt_tokens": total.prompt_tokens,
            "cached_tokens": total.cached_tokens,
            "completion_tokens": total.completion_tokens,
            "reasoning_tokens": total.reasoning_tokens,
            "cost": dollars(total.cost_nanos),
        }
        for total in totals
    ]


def _shown(name: Dimension, value: str | int) -> str:
    if name in ("day", "hour"):
        when = datetime.datetime.fromtimestamp(int(value), datetime.UTC)
        return when.strftime("%Y-%m-%d" if name == "day" else "%Y-%m-%d %H:00")
    return str(value)
