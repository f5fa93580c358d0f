"""Users' ratings of answers: one vote per answer, stored with the model and the endpoint that gave it.

An answer's id ends with the id of its charge, so the ledger tells which tenant and user it belongs to: a tenant can
vote on its own answers only, a user's key on that user's, and nothing is stored for answers without a vote.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from typing import Any, Literal

import msgspec

from penstock.metering.log_entries import VoteEntry
from penstock.storage import Database, Where
from penstock.telemetry.exposition import MetricRegistry

Rating = Literal["up", "down"]
ROUTES = {
    "chatcmpl-": "/v1/chat/completions",
    "cmpl-": "/v1/completions",
    "resp_": "/v1/responses",
    "msg_": "/v1/messages",
    "ollama-chat-": "/api/chat",
    "ollama-generate-": "/api/generate",
    "llama-cpp-": "/completion",
    "sglang-": "/generate",
}
_ID = re.compile(f"({'|'.join(ROUTES)})([0-9a-f]{{32}})")
_COLUMNS = "response_id, tenant, user_id, model, adapter, route, rating, comment, created_at, via, arm"
_VERSIONS = (
    (
        "CREATE TABLE IF NOT EXISTS feedback (response_id TEXT PRIMARY KEY, tenant TEXT NOT NULL, "
        "user_id TEXT NOT NULL, model TEXT NOT NULL, adapter TEXT NOT NULL, route TEXT NOT NULL, "
        "rating TEXT NOT NULL, comment TEXT NOT NULL, created_at DOUBLE PRECISION NOT NULL)",
        "CREATE INDEX IF NOT EXISTS feedback_by_time ON feedback (created_at)",
        "CREATE INDEX IF NOT EXISTS feedback_by_tenant ON feedback (tenant, created_at)",
    ),
    (
        "ALTER TABLE feedback ADD COLUMN via TEXT NOT NULL DEFAULT ''",
        "ALTER TABLE feedback ADD COLUMN arm TEXT NOT NULL DEFAULT ''",
    ),
)


class Vote(msgspec.Struct, frozen=True):
    """A stored vote."""

    response_id: str
    tenant: str
    user: str
    model: str
    adapter: str
    route: str
    """The endpoint that answered."""
    rating: Rating
    comment: str
    created_at: float
    via: str = ""
    """What led to the model: the name of a route, or `direct`, `alias`, `fallback`, ..."""
    arm: str = ""
    """Of a route: `routed`, `control` or `off`."""

    def shown(self) -> dict[str, Any]:
        return {"object": "feedback", **msgspec.to_builtins(self)}


class Selection(msgspec.Struct, frozen=True):
    """A filter of votes; None matches any."""

    since: float | None = None
    tenant: str | None = None
    model: str | None = None
    route: str | None = None
    rating: Rating | None = None
    via: str | None = None
    arm: str | None = None


class Feedback:
    """All votes."""

    def __init__(self, database: Database, metrics: MetricRegistry, clock: Callable[[], float] = time.time) -> None:
        self._database = database
        self.announce: Callable[[VoteEntry], None] | None = None
        """Told of every vote, for the request log."""
        self.on_arm: Callable[[str, str, str | None], None] | None = None
        """Told of every vote on an answer of an experiment: its arm, the rating, and the one that it replaces."""
        self._clock = clock
        self._votes = metrics.counter(
            "penstock_feedback_total", "Votes on answers.", ("model_name", "endpoint", "route", "arm", "rating")
        )

    async def prepare(self) -> None:
        await self._database.migrate("feedback", _VERSIONS)

    async def vote(
        self,
        tenant: str,
        user: str,
        response_id: str,
        rating: Rating,
        comment: str,
        *,
        only_user: str | None = None,
        sees: Callable[[str | None, str | None], bool] = lambda model, adapter: True,
    ) -> Vote | None:
        """Store a vote, replacing an earlier one on the same answer; None when this tenant, or the only user whose
        answers count, has no such answer. `sees`: whether the caller may see answers of a model and adapter.
        """
        match = _ID.fullmatch(response_id)
        if match is None:
            return None
        rows = await self._database.fetch(
            "SELECT model, adapter, user_id, selection, request_id, experiment FROM charges_opened "
            "WHERE id = ? AND tenant = ?",
            match[2],
            tenant,
        )
        if not rows or only_user not in (None, rows[0][2]) or not sees(rows[0][0], rows[0][1]):
            return None
        model, adapter, _, selection, request_id, experiment = rows[0]
        before = None
        if experiment and self.on_arm is not None:
            earlier = await self._database.fetch("SELECT rating FROM feedback WHERE response_id = ?", response_id)
            before = earlier[0][0] if earlier else None
        via, _, arm = selection.partition("/")
        vote = Vote(
            response_id, tenant, user, model, adapter, ROUTES[match[1]], rating, comment, self._clock(), via, arm
        )
        await self._database.execute(
            f"INSERT INTO feedback ({_COLUMNS}) VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?) ON CONFLICT (response_id) DO "
            "UPDATE SET user_id = excluded.user_id, rating = excluded.rating, comment = excluded.comment, "
            "created_at = excluded.created_at",
            *msgspec.structs.astuple(vote),
        )
        self._votes.child(vote.model, vote.route, via, arm, rating).inc()
        if experiment and self.on_arm is not None:
            self.on_arm(experiment, rating, before)
        if self.announce is not None:
            self.announce(
                VoteEntry(
                    response_id, request_id, tenant, user, model, adapter, vote.route, via, arm, rating, vote.created_at
                )
            )
        return vote

    async def votes(self, only: Selection, limit: int) -> list[Vote]:
        """The newest votes."""
        where = _where(only)
        rows = await self._database.fetch(
            f"SELECT {_COLUMNS} FROM feedback WHERE {where} ORDER BY created_at DESC LIMIT {int(limit)}",
            *where.values,
        )
        return [Vote(*row) for row in rows]

    async def totals(self, only: Selection) -> list[dict[str, Any]]:
        """Votes up and down by model and route, and the share of votes up."""
        where = _where(only)
        rows = await self._database.fetch(
            "SELECT model, adapter, route, via, arm, CAST(SUM(CASE WHEN rating = 'up' THEN 1 ELSE 0 END) AS BIGINT), "
            f"COUNT(*) FROM feedback WHERE {where} GROUP BY model, adapter, route, via, arm "
            "ORDER BY model, adapter, route, via, arm",
            *where.values,
        )
        return [
            {
                "model": model,
                "adapter": adapter,
                "route": route,
                "via": via,
                "arm": arm,
                "up": up,
                "down": count - up,
                "share_up": up / count,
            }
            for model, adapter, route, via, arm, up, count in rows
        ]


def _where(only: Selection) -> Where:
    return Where(
        *(
            ("created_at >= ?" if name == "since" else f"{name} = ?", value)
            for name, value in msgspec.structs.asdict(only).items()
        )
    )
