"""Trains the complexity model on labelled prompts, and measures it on prompts of a style or language it has not seen.

Logistic regression on sparse vectors, by L-BFGS in numpy. Deterministic: the same prompts give the same weights, up to
rounding.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final

import numpy as np
from numpy.typing import NDArray

from penstock.routing.selection.complexity import Complexity
from penstock.routing.selection.prompts import Prompt
from penstock.routing.selection.representation import Vector, layout, represent

Floats = NDArray[np.float64]

PENALTY: Final = 1.0
"""Of the squared weights."""
LARGE: Final = 1.5
"""How much a prompt that needs the larger model counts: missing it costs quality, the opposite mistake only money, and
fewer prompts need it."""
ROUNDS: Final = 150


class Rows:
    """Sparse vectors as one matrix."""

    def __init__(self, vectors: Sequence[Vector], size: int) -> None:
        self.size = size
        self._counts = np.array([len(vector.at) for vector in vectors])
        self._begins = np.concatenate([[0], np.cumsum(self._counts)[:-1]])
        self._at = np.concatenate([vector.at for vector in vectors])
        self._values = np.concatenate([vector.values for vector in vectors])

    def times(self, weights: Floats) -> Floats:
        return np.add.reduceat(self._values * weights[self._at], self._begins)

    def transposed_times(self, values: Floats) -> Floats:
        spread = self._values * np.repeat(values, self._counts)
        return np.bincount(self._at, weights=spread, minlength=self.size).astype(np.float64, copy=False)


class Trainer:
    """Labelled prompts as vectors, which several fits share."""

    def __init__(self, prompts: Sequence[Prompt]) -> None:
        self.prompts = list(prompts)
        self.labels = np.array([float(prompt.size == "large") for prompt in prompts])
        self._vectors = [represent(prompt.text) for prompt in prompts]
        self._size = layout().size

    def fit(self, chosen: Sequence[int] | None = None, penalty: float = PENALTY) -> Floats:
        """Weights, from the prompts with these places; from all of them by default."""
        places = range(len(self.prompts)) if chosen is None else chosen
        return _fit(Rows([self._vectors[i] for i in places], self._size), self.labels[list(places)], penalty)

    def logits(self, weights: Floats, places: Sequence[int]) -> Floats:
        return Rows([self._vectors[i] for i in places], self._size).times(weights)

    def left_out(self, group: Callable[[Prompt], str], penalty: float = PENALTY) -> Floats:
        """For every prompt, the logit from a fit to the prompts of all groups but its own."""
        groups = [group(prompt) for prompt in self.prompts]
        found = np.zeros(len(groups))
        for name in sorted(set(groups)):
            inside = [i for i, other in enumerate(groups) if other == name]
            outside = [i for i, other in enumerate(groups) if other != name]
            if outside:
                found[inside] = self.logits(self.fit(outside, penalty), inside)
        return found

    def model(self, temperature: float) -> Complexity:
        return Complexity.of(self.fit(), temperature)

    def steepness(self, weights: Floats) -> float:
        """How steep the loss is at these weights: 0 where training would end."""
        return float(np.linalg.norm(_loss(Rows(self._vectors, self._size), self.labels, PENALTY)(weights)[1]))


def calibrate(logits: Floats, labels: Floats) -> float:
    """The temperature with the least log loss on prompts that the weights were not fitted to."""
    candidates = np.geomspace(0.5, 4.0, 61)
    losses = [float(np.mean(np.logaddexp(0.0, logits / t) - labels * logits / t)) for t in candidates]
    return float(round(candidates[int(np.argmin(losses))], 3))


def _fit(rows: Rows, labels: Floats, penalty: float) -> Floats:
    return minimize(_loss(rows, labels, penalty), np.zeros(rows.size), ROUNDS)


def _loss(rows: Rows, labels: Floats, penalty: float) -> Callable[[Floats], tuple[float, Floats]]:
    """The log loss plus the L2 penalty, and its gradient."""
    importance = np.where(labels > 0, LARGE, 1.0)

    def loss(weights: Floats) -> tuple[float, Floats]:
        logits = rows.times(weights)
        value = float(importance @ (np.logaddexp(0.0, logits) - labels * logits)) + penalty / 2 * float(
            weights @ weights
        )
        chance = 1 / (1 + np.exp(-np.clip(logits, -40, 40)))
        return value, rows.transposed_times(importance * (chance - labels)) + penalty * weights

    return loss


def minimize(loss: Callable[[Floats], tuple[float, Floats]], start: Floats, rounds: int, memory: int = 10) -> Floats:
    """L-BFGS with a backtracking line search. `loss`: the value at a point, and its gradient."""
    point = start
    value, slope = loss(point)
    steps: list[tuple[Floats, Floats, float]] = []
    for _ in range(rounds):
        if np.abs(slope).max() < 1e-3:
            break
        direction = _direction(slope, steps)
        size, descent = (1.0 if steps else 1.0 / float(np.abs(slope).sum())), float(slope @ direction)
        for _ in range(30):
            tried = point - size * direction
            new, new_slope = loss(tried)
            if new <= value - 1e-4 * size * descent:
                break
            size /= 2
        else:
            break
        step, change = tried - point, new_slope - slope
        if (curvature := float(step @ change)) > 1e-12:
            steps = [*steps[-(memory - 1) :], (step, change, 1 / curvature)]
        point, value, slope = tried, new, new_slope
    return point


def _direction(slope: Floats, steps: Sequence[tuple[Floats, Floats, float]]) -> Floats:
    """The slope times an estimate of the inverse curvature, from the last steps."""
    direction = slope.copy()
    factors = []
    for step, change, scale in reversed(steps):
        factor = scale * float(step @ direction)
        direction -= factor * change
        factors.append(factor)
    if steps:
        step, change, _ = steps[-1]
        direction *= float(step @ change) / float(change @ change)
    for (step, change, scale), factor in zip(steps, reversed(factors), strict=True):
        direction += step * (factor - scale * float(change @ direction))
    return direction
