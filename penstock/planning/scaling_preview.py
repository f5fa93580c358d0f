"""What automatic scaling would do now: the real policy, run over the recent minutes of a server."""

from __future__ import annotations

from collections.abc import Sequence

from penstock.config.autoscale import AutoscaleConfig
from penstock.planning.autoscaling import Autoscaler, Decision, FleetLoad
from penstock.planning.headroom import FleetSize, LoadPoint

RECENT_S = 1800.0
"""How much of the history the policy sees; longer than its cool-downs and its stabilisation window."""


def preview(minutes: Sequence[LoadPoint], size: FleetSize, config: AutoscaleConfig, now: float) -> Decision | None:
    """The last decision of a policy that has seen the recent minutes; None when there are none. It sees means of
    minutes, so a live policy reacts sooner."""
    policy, decision = Autoscaler(config), None
    for point in minutes:
        end = point.at + point.seconds
        if end > now - RECENT_S:
            decision = policy.decide(_load(point, size, end))
    return decision


def _load(point: LoadPoint, size: FleetSize, now: float) -> FleetLoad:
    ready, admitted = round(point.replicas), point.requests - point.refused
    return FleetLoad(
        now=now,
        ready=ready,
        queued=round(point.waiting),
        predicted_wait_s=point.waiting / admitted if admitted > 0 else 0.0,
        running=round(point.running),
        slots=size.slots * ready,
        kv_use=point.kv_use,
        arrivals_per_s=point.requests,
        finished_per_s=admitted,
    )
