"""How many replicas a model should have: one policy for the live server, the fleet and the simulation.

Four needs are computed from the load, and the largest counts:

    rate     (arrivals expected after a cold start + backlog / drain_s) / (rate of a replica x target)
    busy     requests running, and waiting while no rate is known, / (slots of a replica x target)
    wait     replicas x predicted wait / target_wait_s, at most twice the present replicas
    kv       replicas x KV use / kv_high

Invariants: the count stays within [min, max], where schedules raise the minimum one cold start ahead. It falls only
when nothing waits, when even targets lowered by `hysteresis` need fewer, and when that held for `stabilisation_s`; so a
constant load never makes it go up and down. Steps and cool-downs bound every other change; a schedule and the first
replica after scale to zero are never held back.

The time is in `FleetLoad.now`, so the same decisions come out on a virtual clock. When inputs are missing (no slots, no
rate, no predicted wait), the other needs decide.
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass
from typing import Literal

from penstock.config.autoscale import AutoscaleConfig
from penstock.planning.forecast import Forecast
from penstock.planning.replica_rate import ReplicaRate
from penstock.planning.schedule import scheduled_min

COLD_START_S = 30.0
"""Assumed until a start was measured."""
SURE_STEP = 4
"""Replicas that may be added at once, however few there are."""
BUSY = 0.8
"""Share of the slots from which a replica counts as busy enough to measure its rate."""
ROUND = 1e-6
UNBOUNDED, NO_RATE = 1e9, 1e-300
"""More replicas than any maximum, which a rate near nothing asks for; and the least rate to divide by."""

Reason = Literal[
    "steady",
    "rate",
    "forecast",
    "busy",
    "wait",
    "kv",
    "minimum",
    "maximum",
    "schedule",
    "wake",
    "idle",
    "fall",
    "held",
]
"""Why a decision came out as it did. `wake`: the first replica after scale to zero. `idle`: scale to zero. `fall`:
fewer are enough. `held`: fewer or more are needed, but a cool-down or the stabilisation window is not over."""


@dataclass(frozen=True, slots=True)
class FleetLoad:
    """What the policy sees of one model at one moment."""

    now: float
    """Unix time in seconds; must not go back."""
    ready: int
    """Replicas that take requests. Those that drain or have a spot notice are not counted."""
    starting: int = 0
    queued: int = 0
    """Requests that wait in the gateways and in the engines, and those held for a model without replicas."""
    predicted_wait_s: float = 0.0
    """How long a request that arrives now would wait."""
    running: int = 0
    slots: int = 0
    """Requests that the ready replicas can run at one time; 0: not known."""
    kv_use: float = 0.0
    """Share of the KV cache in use, over all ready replicas."""
    arrivals_per_s: float = 0.0
    """Mean since the previous call."""
    finished_per_s: float = 0.0
    """Requests that were answered, mean since the previous call."""
    refused_per_s: float = 0.0
    """Requests that were refused, mean since the previous call; most of them come back."""
    cold_start_s: float | None = None
    """Measured time from start to ready; None: not known."""

    @property
    def present(self) -> int:
        return self.ready + self.starting

    @property
    def new_per_s(self) -> float:
        """Arrivals without those that come back because they were refused. Clients usually try three times (the OpenAI
        SDKs do), so a share r of refusals makes 1 + r + r² of each request."""
        if self.arrivals_per_s <= 0:
            return 0.0
        share = min(max(self.refused_per_s / self.arrivals_per_s, 0.0), 1.0)
        return self.arrivals_per_s / (1.0 + share + share * share)

    @property
    def demand(self) -> bool:
        return self.queued > 0 or self.running > 0 or self.arrivals_per_s > 0


@dataclass(frozen=True, slots=True)
class Needs:
    """Replicas that each signal asks for."""

    rate: int = 0
    forecast: int = 0
    busy: int = 0
    wait: int = 0
    kv: int = 0

    @property
    def most(self) -> int:
        return max(self.rate, self.forecast, self.busy, self.wait, self.kv)

    @property
    def first(self) -> Reason:
        """The signal that asks for most; between equals, the one that says most."""
        most = self.most
        for name in ("kv", "wait", "rate", "busy", "forecast"):
            if getattr(self, name) == most:
                return name
        raise AssertionError("one of them is the largest")


@dataclass(frozen=True, slots=True)
class Decision:
    """A replica count and why."""

    at: float
    desired: int
    before: int
    reason: Reason
    detail: str
    """One sentence for operators."""
    needs: Needs
    spot: int = 0
    """How many of them should run on spot capacity."""


class Autoscaler:
    """The policy for one model. `desired` must be called regularly, every few seconds."""

    def __init__(self, config: AutoscaleConfig) -> None:
        self.config = config
        self.last: Decision | None = None
        self._count: int | None = None
        """What was decided last. The present replicas may differ: some fail, some have a notice."""
        self._forecast = Forecast()
        self._learned = ReplicaRate()
        self._replica_slots = float(config.concurrency or 0)
        self._up_at = self._down_at = -math.inf
        self._demand_at = 0.0
        self._enough: deque[tuple[float, int]] = deque()
        """Counts that were enough in the stabilisation window, by time and falling: the first is the largest."""

    @property
    def replica_rate(self) -> float | None:
        """Requests per second of one busy replica, as configured or learned; None: not known yet."""
        return self.config.replica_rate or self._learned.per_s

    def desired(self, load: FleetLoad) -> int:
        """How many replicas should run from now on."""
        return self.decide(load).desired

    def explain(self) -> str:
        """Why the last decision came out as it did."""
        return "no decision yet" if self.last is None else self.last.detail

    def spot(self, count: int) -> int:
        """How many of `count` replicas should run on spot capacity."""
        return math.floor(max(count - self.config.spot_base, 0) * self.config.spot + ROUND)

    def cold_start(self, load: FleetLoad) -> float:
        """Seconds until a replica started now is ready."""
        if self.config.cold_start_s is not None:
            return self.config.cold_start_s
        return COLD_START_S if load.cold_start_s is None else load.cold_start_s

    def decide(self, load: FleetLoad) -> Decision:
        """The replica count from now on, and why."""
        now = load.now
        if self._count is None:
            self._count, self._demand_at = load.present, now
            self._enough.append((now, load.present))
        before = self._count
        self._learn(load)
        cold_start = self.cold_start(load)
        needs = self._needs(load, cold_start, 1.0)
        self._remember(load, self._needs(load, cold_start, 1.0 - self.config.hysteresis).most)
        minimum = max(scheduled_min(self.config, now), scheduled_min(self.config, now + cold_start))
        desired, reason, detail = self._choose(load, needs, before, minimum)
        if desired > before:
            self._up_at = now
        elif desired < before:
            self._down_at = now
        self._count = desired
        self.last = Decision(now, desired, before, reason, detail, needs, self.spot(desired))
        return self.last

    def _learn(self, load: FleetLoad) -> None:
        """Updates the forecast, and what a replica can do."""
        self._forecast.observe(load.now, load.new_per_s)
        if load.demand:
            self._demand_at = load.now
        if load.ready and load.slots and self.config.concurrency is None:
            self._replica_slots = load.slots / load.ready
        full = self._replica_slots * load.ready
        busy = load.queued > 0 or (full > 0 and load.running >= BUSY * full)
        self._learned.observe(load.now, load.ready, load.running, load.finished_per_s, busy)

    def _needs(self, load: FleetLoad, cold_start: float, margin: float) -> Needs:
        """What each signal asks for; `margin`: a factor on all targets."""
        config = self.config
        target = config.target_utilisation * margin
        rate = self._forecast.rate
        expected = self._forecast.ahead(cold_start) if config.forecast else rate
        by_rate = by_forecast = busy = wait = 0
        replica_rate = self.replica_rate
        if replica_rate is None and load.queued and load.predicted_wait_s > 0 and load.ready:
            # Nothing was learned yet, but whoever predicts the wait knows how fast the queue is worked off.
            replica_rate = load.queued / load.predicted_wait_s / load.ready
        if replica_rate is not None:
            backlog = load.queued / config.drain_s
            wanted_rate = max(replica_rate * target, NO_RATE)
            by_rate = _up((rate + backlog) / wanted_rate)
            by_forecast = _up((expected + backlog) / wanted_rate)
        if self._replica_slots:
            waiting = load.queued if self.replica_rate is None else 0
            growth = expected / rate if rate > 0 else 1.0
            busy = _up((load.running + waiting) / (self._replica_slots * target))
            by_forecast = max(by_forecast, _up(load.running * growth / (self._replica_slots * target)))
        if load.queued and load.predicted_wait_s > config.target_wait_s * margin:
            wait = _up(load.ready * min(load.predicted_wait_s / (config.target_wait_s * margin), 2.0))
        kv = _up(load.ready * load.kv_use / (config.kv_high * margin))
        return Needs(by_rate, by_forecast, busy, wait, kv)

    def _remember(self, load: FleetLoad, enough: int) -> None:
        """Keeps how many replicas are enough now; all that there are, while requests wait."""
        if load.queued:
            enough = max(enough, load.present)
        while self._enough and self._enough[-1][1] <= enough:
            self._enough.pop()
        self._enough.append((load.now, enough))
        while self._enough[0][0] < load.now - self.config.stabilisation_s:
            self._enough.popleft()

    def _choose(self, load: FleetLoad, needs: Needs, before: int, minimum: int) -> tuple[int, Reason, str]:
        config = self.config
        if before == 0 and minimum == 0:
            if load.queued or load.arrivals_per_s > 0:
                return 1, "wake", "requests arrive at a model without replicas"
            return 0, "steady", "no request waits"
        if minimum == 0 and not load.demand and load.now - self._demand_at >= config.idle_s:
            return 0, "idle", f"no request for {config.idle_s:.0f} s"
        lowest, highest = max(minimum, 1), config.max
        if before < lowest:
            kind: Reason = "schedule" if minimum > max(config.min, 1) else "minimum"
            return lowest, kind, f"the {'scheduled ' if kind == 'schedule' else ''}minimum is {lowest}"
        if before > highest:
            return highest, "maximum", f"the maximum is {highest}"
        wanted = min(needs.most, highest)
        if wanted > before:
            return self._rise(load.now, needs, before, wanted)
        if needs.most > highest:
            return before, "maximum", f"{_WORDS[needs.first]} ask for {needs.most}; the maximum is {highest}"
        return self._fall(load.now, before, lowest)

    def _rise(self, now: float, needs: Needs, before: int, wanted: int) -> tuple[int, Reason, str]:
        why = f"{_WORDS[needs.first]} ask for {needs.most} rather than {before}"
        left = self._up_at + self.config.scale_up_cooldown_s - now
        if left > 0:
            return before, "held", f"{why}; the cool-down ends in {left:.0f} s"
        step = max(SURE_STEP, math.floor(before * self.config.step_up + ROUND))
        return min(wanted, before + step), needs.first, why

    def _fall(self, now: float, before: int, lowest: int) -> tuple[int, Reason, str]:
        config = self.config
        enough = max(self._enough[-1][1], lowest)
        if enough >= before:
            return before, "steady", f"{before} are needed" if before > lowest else f"the minimum of {lowest} is enough"
        stable = max(self._enough[0][1], lowest)
        if stable >= before:
            why = f"{enough} would be enough, but {stable} were needed within {config.stabilisation_s:.0f} s"
            return before, "held", why
        left = max(self._up_at, self._down_at) + config.scale_down_cooldown_s - now
        if left > 0:
            return before, "held", f"{stable} are enough; the cool-down ends in {left:.0f} s"
        step = max(1, math.floor(before * config.step_down + ROUND))
        why = f"{stable} were enough for {config.stabilisation_s:.0f} s"
        return max(stable, before - step), "fall", why


_WORDS: dict[str, str] = {
    "rate": "arrivals and backlog",
    "forecast": "the arrivals expected after a cold start",
    "busy": "the requests in flight",
    "wait": "the predicted waits in the queue",
    "kv": "the KV caches",
}


def _up(replicas: float) -> int:
    return math.ceil(min(replicas, UNBOUNDED) - ROUND)
