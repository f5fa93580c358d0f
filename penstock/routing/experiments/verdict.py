"""Is a canary worse than the control? A sequential test with a stated confidence for the whole experiment.

Five measures are compared, each by two confidence sequences (`confidence.py`), one per arm: a canary is worse when the
better end of its interval is worse than the worse end of the control's, by more than the tolerance. Inputs that are
missing (no judge, no votes, too few latencies, no requests of the control) decide nothing; their part of the error
probability stays reserved. Without the control there is one rule left, `most_errors`.

Each comparison is made twice: over all requests of the stage, which finds small differences, and over the newest time
window, which finds a canary that breaks after a million good answers. The error probability 1 - confidence is divided
evenly between all comparisons of all canaries; its part of stage or window k is 1 / (k (k + 1)), and these add up to 1.
So with probability `confidence` no canary that is as good as the control is rolled back, in all stages together.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from penstock.routing.experiments.confidence import Interval, Moments, bounded, mean

Measure = Literal["errors", "dislikes", "grades", "ttft", "latency", "speed", "cost", "tokens"]
BOUNDED: tuple[Measure, ...] = ("errors", "dislikes", "grades")
"""Values from 0 to 1."""
LOGARITHMIC: tuple[Measure, ...] = ("ttft", "latency", "speed")
"""Their logarithms are counted, so that a few slow answers do not decide: their mean is geometric."""
LINEAR: tuple[Measure, ...] = ("cost", "tokens")
MEASURES: tuple[Measure, ...] = (*BOUNDED, *LOGARITHMIC, *LINEAR)
TESTS = 6
"""Five comparisons with the control, and `most_errors`."""
SCOPES = 2
"""Stage and window."""

ArmCounts = Mapping[str, Moments]
_NOTHING = Moments()


@dataclass(frozen=True, slots=True)
class Rules:
    """When a canary is worse; None switches a comparison off."""

    confidence: float = 0.99
    worse_errors: float | None = 0.01
    """Tolerated difference of error rates."""
    most_errors: float | None = 0.5
    """Error rate that no canary may have, whatever the control does."""
    worse_quality: float | None = 0.05
    """Tolerated difference of grades, and of shares of votes down."""
    worse_ttft: float | None = 2.0
    """Tolerated ratio of times to the first token."""
    worse_latency: float | None = None
    least_requests: int = 10
    """Of a canary, before anything is decided."""


@dataclass(frozen=True, slots=True)
class Finding:
    """A measure in which a canary is worse."""

    measure: str
    canary: Interval
    control: Interval | None
    tolerance: float

    def text(self) -> str:
        against = "" if self.control is None else f" against {_shown(self.measure, self.control)} of the control"
        allowed = f"{self.tolerance:g} times" if self.measure in LOGARITHMIC else f"{self.tolerance:.1%}"
        return f"{self.measure} {_shown(self.measure, self.canary)}{against}, {allowed} tolerated"


def part_of(confidence: float, place: int, canaries: int) -> float:
    """The error probability of one comparison in stage or window `place`, counted from 1."""
    return (1 - confidence) / (TESTS * SCOPES * max(canaries, 1) * place * (place + 1))


def interval(measure: str, seen: Moments, alpha: float) -> Interval | None:
    """As users read it: seconds, tokens a second, dollars, shares. None while there are too few values."""
    if measure in BOUNDED:
        return bounded(seen, alpha) if seen.n else None
    found = mean(seen, alpha)
    if found is None or measure not in LOGARITHMIC:
        return found
    return Interval(math.exp(found.low), math.exp(found.high))


def typical(measure: str, seen: Moments) -> float | None:
    """The mean; of latencies and speeds the geometric one."""
    if not seen.n:
        return None
    return math.exp(seen.mean) if measure in LOGARITHMIC else seen.mean


def findings(canary: ArmCounts, control: ArmCounts, rules: Rules, alpha: float) -> list[Finding]:
    """In what the canary is worse, each wrong with probability `alpha` at most."""
    if canary.get("errors", _NOTHING).n < rules.least_requests:
        return []
    found = []
    for measure, tolerance in _tolerances(rules):
        pair = _intervals(measure, canary, control, alpha)
        if pair is not None and _worse(measure, pair[0], pair[1], tolerance):
            found.append(Finding(measure, pair[0], pair[1], tolerance))
    if rules.most_errors is not None:
        errors = bounded(canary["errors"], alpha)
        if errors.low > rules.most_errors:
            found.append(Finding("errors", errors, None, rules.most_errors))
    return found


def as_good(canary: ArmCounts, control: ArmCounts, margin: float, alpha: float) -> bool:
    """Whether the canary's error rate is certainly not more than `margin` above the control's."""
    pair = _intervals("errors", canary, control, alpha)
    return pair is not None and pair[0].high <= pair[1].low + margin


def _tolerances(rules: Rules) -> list[tuple[Measure, float]]:
    asked: list[tuple[Measure, float | None]] = [
        ("errors", rules.worse_errors),
        ("dislikes", rules.worse_quality),
        ("grades", rules.worse_quality),
        ("ttft", rules.worse_ttft),
        ("latency", rules.worse_latency),
    ]
    return [(measure, tolerance) for measure, tolerance in asked if tolerance is not None]


def _intervals(measure: str, canary: ArmCounts, control: ArmCounts, alpha: float) -> tuple[Interval, Interval] | None:
    """Both are right with probability 1 - alpha."""
    each = alpha / 2 if measure in BOUNDED else alpha
    ours = interval(measure, canary.get(measure, _NOTHING), each)
    theirs = interval(measure, control.get(measure, _NOTHING), each)
    return None if ours is None or theirs is None else (ours, theirs)


def _worse(measure: str, canary: Interval, control: Interval, tolerance: float) -> bool:
    if measure == "grades":
        return canary.high < control.low - tolerance
    if measure in LOGARITHMIC:
        return canary.low > control.high * tolerance
    return canary.low > control.high + tolerance


def _shown(measure: str, found: Interval) -> str:
    if measure in LOGARITHMIC:
        return f"{found.low:.3g} s to {found.high:.3g} s"
    return f"{found.low:.1%} to {found.high:.1%}"
