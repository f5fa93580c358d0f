"""Keeps experiments: what operators ask of them, and what they do by themselves.

A task writes what was counted to the store every `FRESH_S` seconds, reads what all gateways have counted, and rolls
back or promotes. While the store is away the arms that were last known hold, and counts wait.
"""

from __future__ import annotations

import asyncio
import logging
from collections import defaultdict
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any

import msgspec

from penstock.gateway.app.store_access import store_of
from penstock.gateway.generation.experiment import Experiment
from penstock.gateway.generation.experiment_report import report
from penstock.gateway.generation.experiment_store import CountKey, Event, ExperimentState, ExperimentStore, SpanCounts
from penstock.protocol.errors import ApiError, InvalidRequest, NotFound, ServiceUnavailable
from penstock.routing.experiments.allocation import CONTROL, Allocation
from penstock.routing.experiments.confidence import Moments
from penstock.routing.experiments.verdict import as_good, findings, part_of
from penstock.storage import DatabaseError
from penstock.telemetry.experiment_metrics import ExperimentMetrics

log = logging.getLogger("penstock.gateway")

FRESH_S = 2.0
"""How long it may take until all gateways know of a change, and until what was counted decides."""
ATTEMPTS = 5
"""How often a change is tried when other gateways change the same experiment."""
AUTOMATIC = "automatic"


class ExperimentKeeper:
    """Of all experiments of one gateway process."""

    def __init__(
        self,
        experiments: Mapping[str, Experiment],
        store: ExperimentStore,
        metrics: ExperimentMetrics,
        clock: Callable[[], float],
        *,
        exists: Callable[[str], bool],
        split: Callable[[str], bool],
    ) -> None:
        """`exists`: whether a model, adapter or route has this name; `split`: whether an experiment splits it."""
        self._experiments = experiments
        self.store = store
        self._metrics, self._clock, self._exists, self._split = metrics, clock, exists, split
        self.pending: defaultdict[CountKey, Moments] = defaultdict(Moments)
        """Counted, and not written yet."""
        self._task: asyncio.Task[None] | None = None
        self._reachable = True

    async def start(self) -> None:
        await self._read()
        self._task = asyncio.create_task(self._keep(), name="experiments")

    async def close(self) -> None:
        if self._task is not None:
            self._task.cancel()
            with suppress(asyncio.CancelledError):
                await self._task
            with suppress(DatabaseError):
                await self._write()

    async def report(self, name: str) -> dict[str, Any]:
        experiment = self._named(name)
        with store_of("experiments"):
            await self._write()
            await self._read()
            stage, window = experiment.span(self._clock())
            if stage > 1 and not experiment.allocation.intervals:
                stage -= 1  # what led to the rollback says more than the control on its own
            counts, _ = await self.store.counts(name, stage, window)
            events = await self.store.events(name)
        return report(experiment, stage, counts, events, self._exists)

    async def promote(self, name: str, arm: str | None, to: float, who: str, why: str = "") -> None:
        """Give a canary this share; the only one, if none is named. Any model that is served can become one."""
        experiment = self._named(name)
        chosen = arm or self._only(experiment)
        if chosen in (CONTROL, experiment.control, name) or not self._exists(chosen):
            raise InvalidRequest(f"`{chosen[:128]}` cannot be a canary of `{name}`: it is its control, or not served.")
        if self._split(chosen):
            raise InvalidRequest(f"`{chosen[:128]}` is split by an experiment of its own.")
        await self._change(experiment, {chosen: to}, {}, who, f"{chosen} gets {to * 100:.4g}%", why)
        self._metrics.changed(name, chosen, "promoted", AUTOMATIC if who == AUTOMATIC else "operator")

    async def rollback(self, name: str, arm: str | None, who: str, why: str = "") -> None:
        """Give a canary, or all of them, nothing: the control answers."""
        experiment = self._named(name)
        if arm is not None and arm not in experiment.canaries:
            raise NotFound(f"`{name}` has no canary `{arm[:128]}`.")
        arms = experiment.canaries if arm is None else [arm]
        reason = why or f"by {who}"
        await self._change(
            experiment,
            dict.fromkeys(arms, 0.0),
            dict.fromkeys(arms, reason),
            who,
            f"{', '.join(arms)} rolled back",
            why,
        )
        for each in arms:
            self._metrics.changed(name, each, "rolled back", AUTOMATIC if who == AUTOMATIC else "operator")

    def _named(self, name: str) -> Experiment:
        found = self._experiments.get(name)
        if found is None:
            raise NotFound(f"There is no experiment `{name[:128]}`.")
        return found

    def _only(self, experiment: Experiment) -> str:
        if len(experiment.canaries) != 1:
            raise InvalidRequest(
                f"Name the arm: `{experiment.config.name}` has {', '.join(experiment.canaries) or 'none'}."
            )
        return experiment.canaries[0]

    async def _change(
        self,
        experiment: Experiment,
        shares: Mapping[str, float],
        reasons: Mapping[str, str],
        who: str,
        what: str,
        why: str,
    ) -> None:
        """Store new shares of some canaries, which begins a stage; tried again when another gateway was faster."""
        name = experiment.config.name
        with store_of("experiments"):
            for _ in range(ATTEMPTS):
                await self._read()
                state, now = experiment.state, self._clock()
                assert state is not None, "it was read"
                old = experiment.allocation
                if (
                    all(old.share(arm) == share for arm, share in shares.items())
                    and reasons.keys() <= state.reasons.keys()
                ):
                    return
                wanted = {**{arm: old.share(arm) for arm in old.intervals}, **shares}
                kept = {arm: reason for arm, reason in state.reasons.items() if not wanted.get(arm)}
                changed = msgspec.structs.replace(
                    state,
                    version=state.version + 1,
                    intervals={arm: list(of) for arm, of in _resized(old, wanted).intervals.items()},
                    stage=state.stage + 1,
                    stage_at=now,
                    reasons={**kept, **reasons},
                )
                if await self.store.save(name, changed, Event(name, now, who, what, why)):
                    experiment.follow(changed)
                    self._show(experiment)
                    log.warning(
                        "an experiment has changed", extra={"experiment": name, "who": who, "what": what, "why": why}
                    )
                    return
        raise ServiceUnavailable(f"The experiment `{name}` is being changed by others; try again.")

    async def _keep(self) -> None:
        while True:
            await asyncio.sleep(FRESH_S)
            try:
                await self._write()
                await self._read()
                for experiment in self._experiments.values():
                    await self._decide(experiment)
                self._reachable = True
            except (DatabaseError, ApiError) as error:
                if self._reachable:
                    log.warning(
                        "experiments cannot be read or written; the last known arms hold", extra={"reason": str(error)}
                    )
                self._reachable = False
            except Exception:
                log.exception("an experiment could not be looked at")

    async def _write(self) -> None:
        pending, self.pending = self.pending, defaultdict(Moments)
        if not pending:
            return
        try:
            await self.store.add(pending)
        except DatabaseError:
            for key, added in pending.items():
                self.pending[key] = self.pending[key].plus(added)
            raise

    async def _read(self) -> None:
        """Follow the stored states; make those that are missing, or whose configuration has changed."""
        states = await self.store.states()
        for name, experiment in self._experiments.items():
            state, configured = states.get(name), experiment.config.canaries
            if state is not None and (state.configured == configured or experiment.state is not None):
                experiment.follow(state)
            else:
                now = self._clock()
                before = Allocation() if state is None else state.allocation()
                made = ExperimentState(
                    version=1 if state is None else state.version + 1,
                    configured=configured,
                    intervals={arm: list(of) for arm, of in before.resized(configured).intervals.items()},
                    begun_at=now if state is None else state.begun_at,
                    stage=1 if state is None else state.stage + 1,
                    stage_at=now,
                )
                if await self.store.save(name, made, Event(name, now, "configuration", _shares(configured))):
                    experiment.follow(made)
                elif (taken := (await self.store.states()).get(name)) is not None:
                    experiment.follow(taken)
            self._show(experiment)

    async def _decide(self, experiment: Experiment) -> None:
        config, allocation, state = experiment.config, experiment.allocation, experiment.state
        arms = list(allocation.intervals)
        if state is None or not arms or not (config.rollback or config.stages):
            return
        now = self._clock()
        stage, window = experiment.span(now)
        spans = await self.store.counts(config.name, stage, window)
        for arm in arms:
            found = [
                finding
                for place, span in zip((stage, window), spans, strict=True)
                for finding in findings(
                    span.get(arm, {}),
                    span.get(CONTROL, {}),
                    experiment.rules,
                    part_of(config.confidence, place, len(arms)),
                )
            ]
            if found and config.rollback:
                why = "; ".join(dict.fromkeys(finding.text() for finding in found))
                await self.rollback(config.name, arm, AUTOMATIC, f"{why} (confidence {config.confidence:.4g})")
            elif not found and (to := _next_stage(experiment, spans[0], arm, now)) is not None:
                await self.promote(config.name, arm, to, AUTOMATIC, "as good as the control")

    def _show(self, experiment: Experiment) -> None:
        for arm in (CONTROL, *experiment.canaries):
            self._metrics.share(experiment.config.name, arm, experiment.allocation.share(arm))


def _next_stage(experiment: Experiment, counts: SpanCounts, arm: str, now: float) -> float | None:
    """The share to which a canary may be promoted by itself."""
    config, state = experiment.config, experiment.state
    assert state is not None
    share = experiment.allocation.share(arm)
    later = [stage for stage in config.stages if stage > share + 1e-9]
    if not later or not share or now < state.stage_at + config.stage_s:
        return None
    canary, control = counts.get(arm, {}), counts.get(CONTROL, {})
    if canary.get("errors", Moments()).n < config.stage_requests:
        return None
    alpha = part_of(config.confidence, state.stage, 1)
    return later[0] if as_good(canary, control, config.stage_margin, alpha) else None


def _resized(allocation: Allocation, shares: Mapping[str, float]) -> Allocation:
    try:
        return allocation.resized(shares)
    except ValueError as error:
        raise InvalidRequest(f"This is not possible: {error}.", param="share") from error


def _shares(shares: Mapping[str, float]) -> str:
    return ", ".join(f"{arm} {share * 100:.4g}%" for arm, share in shares.items()) or "no canary"
