"""An experiment as operators see it: its arms side by side, each figure with an interval that holds at all times."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from penstock.gateway.generation.experiment import Experiment
from penstock.gateway.generation.experiment_store import Event, SpanCounts
from penstock.gateway.generation.trial import SHADOW
from penstock.routing.experiments.allocation import CONTROL
from penstock.routing.experiments.confidence import Moments
from penstock.routing.experiments.verdict import MEASURES, interval, typical

OUTCOMES = ("answered", "failed", "refused", "left", "diverted")


def report(
    experiment: Experiment, stage: int, counts: SpanCounts, events: Sequence[Event], exists: Callable[[str], bool]
) -> dict[str, Any]:
    """`counts`: of the stage `stage`."""
    config, state, allocation = experiment.config, experiment.state, experiment.allocation
    arms = [(CONTROL, "control", experiment.control), *((arm, "canary", arm) for arm in experiment.canaries)]
    reasons = {} if state is None else state.reasons
    shown = [
        {
            "arm": arm,
            "kind": kind,
            "model": model,
            "share": round(allocation.share(arm), 6),
            "served": exists(model),
            "rolled_back": reasons.get(arm),
            **_figures(counts.get(arm, {}), config.confidence),
        }
        for arm, kind, model in arms
    ]
    shown += [
        {
            "arm": model,
            "kind": "shadow",
            "model": model,
            "share": share,
            "served": exists(model),
            "rolled_back": None,
            **_figures(counts.get(SHADOW + model, {}), config.confidence),
        }
        for model, share in config.shadows.items()
    ]
    return {
        "id": config.name,
        "object": "experiment",
        "status": _status(experiment),
        "control": experiment.control,
        "sticky": config.sticky,
        "rollback": config.rollback,
        "confidence": config.confidence,
        "stages": list(config.stages),
        "stage": 1 if state is None else state.stage,
        "figures_of": stage,
        "stage_since": None if state is None else state.stage_at,
        "since": None if state is None else state.begun_at,
        "arms": shown,
        "events": [{"at": one.at, "who": one.who, "what": one.what, "why": one.why} for one in events],
    }


def _status(experiment: Experiment) -> str:
    shares = [experiment.allocation.share(arm) for arm in experiment.canaries]
    if not shares:
        return "shadow"
    if any(share == 1 for share in shares):
        return "promoted"
    if any(shares):
        return "running"
    return "rolled back" if experiment.state is not None and experiment.state.reasons else "stopped"


def _figures(seen: dict[str, Moments], confidence: float) -> dict[str, Any]:
    figures: dict[str, Any] = {"requests": int(seen.get("errors", Moments()).n)}
    figures["outcomes"] = {outcome: int(seen.get(outcome, Moments()).n) for outcome in OUTCOMES}
    for measure in MEASURES:
        values = seen.get(measure, Moments())
        found = interval(measure, values, 1 - confidence) if values.n else None
        figures[measure] = {
            "n": int(values.n),
            "mean": typical(measure, values),
            "low": None if found is None else found.low,
            "high": None if found is None else found.high,
        }
    figures["cost_dollars"] = seen.get("cost", Moments()).total
    return figures
