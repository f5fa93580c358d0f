"""A trained classifier: logistic regression over a sentence embedding and the features.

Small enough to train in a second on a few hundred prompts and to inspect: one weight per dimension, stored as JSON. It
is used only where its embedding model is served; when that does not answer, the score decides.
"""

from __future__ import annotations

import json
import math
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from penstock.errors import ConfigError
from penstock.routing.selection.features import read

Matrix = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Classifier:
    encoder: str
    """The embedding model it was trained with."""
    weights: list[float]
    bias: float
    trained_on: int
    accuracy: float
    """On the held-out test prompts."""

    def probability(self, text: str, embedding: NDArray[np.float32]) -> float:
        """The probability that the larger model is needed."""
        row = np.concatenate([embedding.astype(np.float64), read(text).vector()])
        if len(row) != len(self.weights):
            raise ConfigError(f"the classifier has {len(self.weights)} weights, but questions have {len(row)} features")
        return 1 / (1 + math.exp(-float(np.clip(row @ np.array(self.weights) + self.bias, -30, 30))))

    def save(self, path: Path) -> None:
        path.write_text(json.dumps(asdict(self)) + "\n")

    @classmethod
    def load(cls, path: Path) -> Classifier:
        try:
            return cls(**json.loads(path.read_text()))
        except (OSError, ValueError, TypeError) as error:
            raise ConfigError(f"{path} is not a classifier made by `penstock route train`: {error}") from error


def rows(texts: list[str], embeddings: NDArray[np.float32]) -> Matrix:
    return np.hstack([embeddings.astype(np.float64), np.array([read(text).vector() for text in texts])])


def fit(features: Matrix, labels: NDArray[np.bool_], penalty: float = 2.0) -> tuple[list[float], float]:
    """Weights and bias that minimize the penalized log loss, by Newton's method."""
    wide = np.hstack([features, np.ones((len(features), 1))])
    weights = np.zeros(wide.shape[1])
    ridge = np.diag([penalty] * features.shape[1] + [1e-6])
    for _ in range(25):
        chance = 1 / (1 + np.exp(-np.clip(wide @ weights, -30, 30)))
        slope = wide.T @ (chance - labels) + ridge @ weights
        curve = (wide * (chance * (1 - chance))[:, None]).T @ wide + ridge
        step = np.linalg.solve(curve, slope)
        weights -= step
        if np.abs(step).max() < 1e-8:
            break
    return [float(one) for one in weights[:-1]], float(weights[-1])
