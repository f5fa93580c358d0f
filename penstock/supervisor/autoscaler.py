"""Scales models by itself: adds up what the gateways report, asks the policy, and has replicas started and drained.

Invariants: nothing is decided before a gateway has reported and the server was ready once, or after it begins to stop.
A replica that cannot start is retried with a growing delay, and the running ones stay. `server.max_engines`
holds for all models together.
"""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import math
import time
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Protocol

from penstock.config import ModelConfig
from penstock.config.autoscale import AutoscaleConfig
from penstock.config.variants import Variant
from penstock.errors import PenstockError
from penstock.planning.autoscaling import Autoscaler, FleetLoad
from penstock.protocol.control import Loads, ModelLoad, ModelScaling, Scaling, scaled_name
from penstock.supervisor.backoff import Backoff
from penstock.supervisor.reporter import Reporter

DECIDE_S = 2.0
"""Seconds between two decisions; a request that waits for a model without replicas is answered at once."""
FIRST_RETRY_S, LAST_RETRY_S = 5.0, 300.0
"""Delays after a replica that could not start."""

log = logging.getLogger("penstock.supervisor")


class Flag(Protocol):
    def is_set(self) -> bool: ...


class ScaledReplica(Protocol):
    """A replica that takes requests (`up`) or starts; `Unit` is one."""

    @property
    def up(self) -> Flag: ...
    @property
    def spawned_at(self) -> float: ...
    @property
    def ready_at(self) -> float | None: ...


class ScaledReplicas(Protocol):
    """The replicas that are scaled: of one machine (`Replicas`) or of a fleet."""

    on_start_failed: Callable[[str, Variant, str], None] | None

    @property
    def stopping(self) -> bool: ...
    def serving(self, model: str, pool: str = "") -> Sequence[ScaledReplica]: ...
    def leaving(self, model: str, pool: str = "") -> int: ...
    def adjust(self, model: str, count: int, pool: str = "") -> None: ...


@dataclass(frozen=True, slots=True)
class Target:
    """What is scaled: a model, or one of its pools."""

    model: str
    config: AutoscaleConfig
    pool: str = ""

    @property
    def name(self) -> str:
        return scaled_name(self.model, self.pool)


def targets(models: Iterable[ModelConfig]) -> dict[str, Target]:
    """What is scaled automatically, by name."""
    found = [Target(model.name, model.autoscale) for model in models if model.autoscale is not None]
    for model in models:
        found += [Target(model.name, pool.autoscale, pool.name) for pool in model.pools if pool.autoscale is not None]
    return {target.name: target for target in found}


class ReplicaAutoscaler:
    """Automatic scaling of the models of one supervisor; `run` runs until it is cancelled."""

    def __init__(
        self,
        replicas: ScaledReplicas,
        configs: Callable[[], Mapping[str, Target]],
        clock: Callable[[], float] = time.monotonic,
        reporter: Reporter | None = None,
    ) -> None:
        """`configs`: what to scale, by name, which changes when models are loaded and unloaded."""
        self._replicas = replicas
        self._configs = configs
        self._clock = clock
        self._reporter = reporter or Reporter()
        # Schedules need the time of day; everything else must not see the clock being set.
        self._epoch = time.time() - clock()
        self._models: dict[str, _ScaledModel] = {}
        self._loads: dict[Hashable, Mapping[str, ModelLoad]] = {}
        self._poked = asyncio.Event()
        self.on_change: Callable[[Scaling], None] | None = None
        self._told = Scaling({})
        replicas.on_start_failed = self._start_failed

    def governs(self, model: str, pool: str = "") -> bool:
        return scaled_name(model, pool) in self._configs()

    def heard(self, gateway: Hashable, loads: Loads) -> None:
        """A gateway reports."""
        if gateway not in self._loads:
            self._poked.set()
        self._loads[gateway] = loads.models
        asleep = (name for name, it in self._models.items() if not it.count)
        if any(name in loads.models and _waits(loads.models[name]) for name in asleep):
            self._poked.set()

    def lost(self, gateway: Hashable) -> None:
        """A gateway is gone."""
        self._loads.pop(gateway, None)

    def set_limits(self, model: str, minimum: int | None, maximum: int | None, pool: str = "") -> None:
        """Changes the limits of a model or pool until the server stops."""
        target = self._configs().get(scaled_name(model, pool))
        if target is None:
            raise PenstockError(not_scaled(model, pool, self._configs().values()))
        configured = target.config
        it = self._of(target)
        old = it.policy.config
        config = dataclasses.replace(
            old, min=old.min if minimum is None else minimum, max=old.max if maximum is None else maximum
        )
        if problems := config.problems():
            raise PenstockError("; ".join(problems))
        if config.min == 0 and configured.min > 0:
            raise PenstockError("scale to zero needs min: 0 in the configuration, where gateways also read hold_s")
        it.policy.config = config
        self._poked.set()

    def state(self) -> Scaling:
        return Scaling({name: it.state(self._replicas) for name, it in self._models.items()})

    async def run(self) -> None:
        while True:
            self._poked.clear()
            if self._loads and not self._replicas.stopping:
                self.decide()
            with suppress(TimeoutError):
                async with asyncio.timeout(DECIDE_S):
                    await self._poked.wait()

    def decide(self) -> None:
        """One decision for every model."""
        configs = self._configs()
        for name in self._models.keys() - configs.keys():
            del self._models[name]
        for name, target in configs.items():
            try:
                now = self._epoch + self._clock()
                self._of(target).decide(now, self._loads, self._replicas, self._reporter)
            except Exception:  # one model must not keep the others from being scaled
                log.exception("automatic scaling of %r failed", name)
        state = self.state()
        if state != self._told:
            self._told = state
            if self.on_change is not None:
                self.on_change(state)

    def _of(self, target: Target) -> _ScaledModel:
        if target.name not in self._models:
            there = len(self._replicas.serving(target.model, target.pool))
            self._models[target.name] = _ScaledModel(target, there)
        it = self._models[target.name]
        if it.target != target:  # it was configured anew
            it.target, it.policy.config = target, target.config
        return it

    def _start_failed(self, model: str, variant: Variant, problem: str) -> None:
        it = self._models.get(scaled_name(model, variant.pool))
        if it is not None:
            it.start_failed(problem, self._epoch + self._clock())


def not_scaled(model: str, pool: str, targets: Iterable[Target]) -> str:
    """Why the limits of automatic scaling cannot be set."""
    pools = [target.pool for target in targets if target.model == model and target.pool]
    if pools and not pool:
        return f"`{model}` has pools that are scaled on their own; say which one with --pool: {', '.join(pools)}"
    what, how = (f"pool `{pool}` of `{model}`", f" --pool {pool}") if pool else (f"`{model}`", "")
    return f"{what} is not scaled automatically; `penstock scale{how}` sets its replicas"


class _ScaledModel:
    """The policy of one model and what it needs to know between two decisions."""

    def __init__(self, target: Target, count: int) -> None:
        self.target = target
        self.policy = Autoscaler(target.config)
        self.count = count
        """Replicas that there should be."""
        self._reported: dict[Hashable, ModelLoad] = {}
        """What each gateway had reported at the last decision."""
        self._at: float | None = None
        self._changed_at = 0.0
        self._changes: Counter[str] = Counter()
        self._cold_start_s: float | None = None
        self._backoff = Backoff(FIRST_RETRY_S, LAST_RETRY_S)
        self._retry_at = 0.0
        self._failed = 0
        self._problem = ""
        self._failed_at = -math.inf

    def start_failed(self, problem: str, now: float) -> None:
        self._failed += 1
        self._problem, self._failed_at = problem, time.monotonic()
        if now >= self._retry_at:  # several that fail together count once
            self._retry_at = now + self._backoff.delay(0.0)

    def decide(
        self,
        now: float,
        gateways: Mapping[Hashable, Mapping[str, ModelLoad]],
        replicas: ScaledReplicas,
        reporter: Reporter,
    ) -> None:
        model, pool, name = self.target.model, self.target.pool, self.target.name
        reports = {gateway: loads[name] for gateway, loads in gateways.items() if name in loads}
        if not reports:
            return  # no gateway serves it yet
        decision = self.policy.decide(self._load(now, reports, replicas))
        if decision.desired != decision.before:
            self._changed_at = now
            self._changes[decision.reason] += 1
            reporter.scaled(f"{model} ({pool})" if pool else model, decision.before, decision.desired, decision.detail)
        self.count = decision.desired
        if self.count < len(replicas.serving(model, pool)) or now >= self._retry_at:
            replicas.adjust(model, self.count, pool)

    def _load(self, now: float, reports: Mapping[Hashable, ModelLoad], replicas: ScaledReplicas) -> FleetLoad:
        arrived = finished = refused = 0
        for gateway, report in reports.items():
            before = self._reported.get(gateway, ModelLoad() if self._at is not None else report)
            arrived += report.arrived - before.arrived
            finished += report.finished - before.finished
            refused += _refused(report) - _refused(before)
        self._reported = dict(reports)
        elapsed = 1.0 if self._at is None else max(now - self._at, 0.001)
        self._at = now
        units = replicas.serving(self.target.model, self.target.pool)
        up = [unit for unit in units if unit.up.is_set()]
        if up:
            newest = max(up, key=lambda unit: unit.ready_at or 0.0)
            ready_at = newest.ready_at or newest.spawned_at
            self._cold_start_s = ready_at - newest.spawned_at
            if ready_at > self._failed_at:
                self._problem, self._backoff = "", Backoff(FIRST_RETRY_S, LAST_RETRY_S)
        seen = list(reports.values())
        in_engines = sum(report.in_flight for report in seen)
        waiting = min(max(report.waiting for report in seen), in_engines)
        total_blocks = max(report.total_blocks for report in seen)
        return FleetLoad(
            now=now,
            ready=len(up),
            starting=len(units) - len(up),
            queued=sum(report.queued for report in seen) + max(report.shared_queue for report in seen) + waiting,
            predicted_wait_s=max(report.predicted_wait_s for report in seen),
            running=in_engines - waiting,
            slots=max(report.slots for report in seen),
            kv_use=max(report.used_blocks for report in seen) / total_blocks if total_blocks else 0.0,
            arrivals_per_s=arrived / elapsed,
            finished_per_s=finished / elapsed,
            # What waits in a shared queue cannot be told from what was refused.
            refused_per_s=0.0 if any(report.shared_queue for report in seen) else max(refused, 0) / elapsed,
            cold_start_s=self._cold_start_s,
        )

    def state(self, replicas: ScaledReplicas) -> ModelScaling:
        model, pool = self.target.model, self.target.pool
        units, last, config = replicas.serving(model, pool), self.policy.last, self.policy.config
        ready = sum(unit.up.is_set() for unit in units)
        rate = self.policy.replica_rate
        return ModelScaling(
            min=config.min,
            max=config.max,
            desired=self.count,
            ready=ready,
            starting=len(units) - ready,
            leaving=replicas.leaving(model, pool),
            reason="" if last is None else last.reason,
            detail=self.policy.explain(),
            decided_at=self._changed_at,
            spot=0 if last is None else last.spot,
            cold_start_s=None if self._cold_start_s is None else round(self._cold_start_s, 2),
            replica_rate=None if rate is None else round(rate, 3),
            decisions=dict(self._changes),
            failed_starts=self._failed,
            problem=self._problem,
            model=model,
            pool=pool,
        )


def _refused(load: ModelLoad) -> int:
    """Requests that arrived and neither run, wait nor were answered. A request with several answers counts as several
    while it runs, so this may be too small for a moment."""
    return load.arrived - load.finished - load.in_flight - load.queued


def _waits(load: ModelLoad) -> bool:
    return load.queued > 0 or load.shared_queue > 0
