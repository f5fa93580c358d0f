"""Fits a calibration's factors to measured times: least squares on the logarithm of predicted over measured.

Every factor is positive and its logarithm is fitted, so that neither a fraction nor a time can become negative, and an
error of 10% counts the same for a step of a millisecond and a prompt of ten seconds. A weak pull towards the start
keeps a factor that no measurement depends on where it was.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from penstock.planning.calibration import Calibration
from penstock.planning.deployment import Deployment
from penstock.planning.step_time import StepTime, StepWork

_PULL = 0.01
"""Weight of a factor's distance from its start, beside one measurement's distance from its prediction."""
_NUDGE = 0.01


@dataclass(frozen=True, slots=True)
class Observation:
    """Steps that were measured together."""

    name: str
    deployment: Deployment
    steps: Sequence[StepWork]
    seconds: float

    def predicted(self, calibration: Calibration) -> float:
        time = StepTime(self.deployment, calibration)
        return math.fsum(time.seconds(work) for work in self.steps)

    def error(self, calibration: Calibration) -> float:
        """Predicted over measured, minus 1."""
        return self.predicted(calibration) / self.seconds - 1


def fit(
    start: Calibration, factors: Sequence[str], observations: Sequence[Observation], rounds: int = 12
) -> Calibration:
    """The calibration with these factors (`kv_read`, `bf16.compute`, ...) fitted, the others as they were."""
    origin = np.log([factor(start, name) for name in factors])
    at = origin.copy()

    def residuals(logs: np.ndarray) -> np.ndarray:
        calibration = _with(start, factors, logs)
        misses = [math.log(item.predicted(calibration) / item.seconds) for item in observations]
        return np.concatenate([misses, _PULL * (logs - origin)])

    now, damping = residuals(at), 1e-3
    for _ in range(rounds):
        slopes = np.stack([(residuals(at + step) - now) / _NUDGE for step in _NUDGE * np.eye(len(at))], axis=1)
        normal, gradient = slopes.T @ slopes, slopes.T @ now
        while damping < 1e6:
            moved = at - np.linalg.solve(normal + damping * np.eye(len(at)), gradient)
            after = residuals(moved)
            if after @ after < now @ now:
                break
            damping *= 10
        else:
            break
        gain = now @ now - after @ after
        at, now, damping = moved, after, damping / 10
        if gain < 1e-9:
            break
    return _with(start, factors, at)


def factor(calibration: Calibration, name: str) -> float:
    """By name: `kv_read`, `bf16.compute`."""
    form, dot, key = name.partition(".")
    value = getattr(calibration.weights[form], key) if dot else getattr(calibration, name)
    return float(value)


def _with(calibration: Calibration, factors: Sequence[str], logs: np.ndarray) -> Calibration:
    weights = dict(calibration.weights)
    rest: dict[str, Any] = {}
    for name, log in zip(factors, logs, strict=True):
        form, dot, key = name.partition(".")
        if dot:
            weights[form] = replace(weights[form], **{key: math.exp(log)})
        else:
            rest[name] = math.exp(log)
    return replace(calibration, weights=weights, **rest)
