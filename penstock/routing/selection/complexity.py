"""The complexity model: the probability that a text needs the larger model, by logistic regression.

Its weights are a file of some 60 KB, trained by `penstock route train-score` on the labelled prompts of this package:
8-bit weights of hashed n-grams, and weights of concepts and shapes that can be named. No model is called and nothing is
sent anywhere; a usual question takes a fraction of a millisecond.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import IO, Final
from zipfile import BadZipFile

import numpy as np
from numpy.typing import NDArray

from penstock.errors import ConfigError
from penstock.routing.selection.concepts import lexicon
from penstock.routing.selection.representation import BUCKETS, SHAPES, Vector, layout, represent

_VERSION: Final = 1
_MOST_WANTED: Final = 2000
_WANTED: Final = 0.4
"""Added to the logit of a request for `_MOST_WANTED` tokens or more; less for fewer, nothing up to 500."""
_REASONS: Final = {
    "code_do": "code", "code_thing": "code", "prove": "proof", "compute": "maths", "how_much": "maths",
    "riddle": "puzzle", "why": "reasoning", "explain": "reasoning", "compare": "reasoning", "weigh": "reasoning",
    "suppose": "reasoning", "contrast": "reasoning", "steps": "steps", "design": "design", "compose": "writing",
    "fault": "diagnosis", "small_write": "short_text", "save": "note", "done": "acknowledgement", "chat": "small_talk",
    "greet": "small_talk",
}  # fmt: skip
"""What a concept is called in reasons, where it has another name."""
_SHAPE_REASONS: Final = {
    "one number": "numbers", "two numbers": "numbers", "three numbers": "numbers", "numbers": "numbers",
    "operators": "numbers", "code marks": "code", "names": "code", "questions": "questions",
    "ends with a question": "questions", "quoted": "quotation",
}  # fmt: skip


_GENERAL: Final = ("wording", "length", "questions")
"""Reasons that say less than others."""


@dataclass(frozen=True, slots=True)
class Assessment:
    """How complex a text is."""

    value: float
    """The probability that the larger model is needed."""
    parts: tuple[tuple[str, float], ...]
    """What speaks for it (above 0) and against it, in logits, weightiest first."""
    low_signal: bool
    """Too short to tell anything, or just a greeting."""

    @property
    def reasons(self) -> tuple[str, ...]:
        """The main parts in the direction of the value, for people."""
        sign = 1 if self.value > 0.5 else -1
        names = [name for name, weight in self.parts if weight * sign >= 0.25]
        return tuple(sorted(names, key=lambda name: name in _GENERAL)[:3])


@dataclass(frozen=True, slots=True)
class Complexity:
    """Trained weights."""

    ngrams: NDArray[np.int8]
    unit: float
    """The weight of 1 in `ngrams`."""
    dense: NDArray[np.float32]
    temperature: float
    """Divides logits, so that probabilities are right for texts unlike those of the training."""

    @classmethod
    def of(cls, weights: NDArray[np.float64], temperature: float) -> Complexity:
        unit = float(np.abs(weights[:BUCKETS]).max()) / 127 or 1.0
        ngrams = np.round(weights[:BUCKETS] / unit).astype(np.int8)
        return cls(ngrams, unit, weights[BUCKETS:].astype(np.float32), temperature)

    def weights(self) -> NDArray[np.float64]:
        """All weights, as they were trained but for rounding."""
        return np.concatenate([self.ngrams * self.unit, self.dense.astype(np.float64)])

    def logit(self, vector: Vector) -> float:
        """Before the temperature."""
        at, values, count = vector.at, vector.values, vector.ngrams
        hashed = float(self.ngrams[at[:count]].astype(np.float64) @ values[:count]) * self.unit
        return hashed + float(self.dense[at[count:] - BUCKETS].astype(np.float64) @ values[count:])

    def assess(self, text: str, wanted_tokens: int = 0) -> Assessment:
        """`wanted_tokens`: the request's limit of output tokens; 0: not given."""
        vector = represent(text)
        logit = self.logit(vector) / self.temperature
        parts = self._parts(vector)
        if wanted_tokens > 500:
            wanted = _WANTED * min(1.0, wanted_tokens / _MOST_WANTED)
            logit += wanted
            parts["wanted_tokens"] = wanted
        value = 1 / (1 + math.exp(-max(min(logit, 30.0), -30.0)))
        ordered = sorted(parts.items(), key=lambda part: -abs(part[1]))
        telling = any(lexicon().names[concept] != "greet" for concept in vector.concepts)
        return Assessment(value, tuple(ordered), vector.words < 4 and not telling)

    def _parts(self, vector: Vector) -> dict[str, float]:
        """Contributions to the logit by reason. Half of what a pair of concepts contributes goes to each of them."""
        names, count = lexicon().names, vector.ngrams
        rest = self.dense[vector.at[count:] - BUCKETS] * vector.values[count:]
        weights = (rest / self.temperature).tolist()
        hashed = float(self.ngrams[vector.at[:count]].astype(np.float64) @ vector.values[:count])
        found = {"wording": hashed * self.unit / self.temperature}
        concepts = [_REASONS.get(names[concept], names[concept]) for concept in vector.concepts]
        pair = 2 * len(concepts)
        for place, name in enumerate(concepts):
            found[name] = found.get(name, 0.0) + weights[2 * place] + weights[2 * place + 1]
            for other in concepts[:place]:
                found[name] += weights[pair] / 2
                found[other] += weights[pair] / 2
                pair += 1
        for name, weight in zip(SHAPES, weights[pair:], strict=True):
            reason = _SHAPE_REASONS.get(name, "length")
            found[reason] = found.get(reason, 0.0) + weight
        return found

    def save(self, to: Path) -> None:
        with to.open("wb") as file:
            np.savez_compressed(
                file,
                version=np.array(_VERSION),
                concepts=np.array(lexicon().names),
                ngrams=self.ngrams,
                dense=self.dense,
                scales=np.array([self.unit, self.temperature]),
            )

    @classmethod
    def load(cls, file: IO[bytes] | Path) -> Complexity:
        try:
            with np.load(file, allow_pickle=False) as stored:
                if int(stored["version"]) != _VERSION or tuple(stored["concepts"].tolist()) != lexicon().names:
                    raise ConfigError(f"{file} was made by another version; run `penstock route train-score` again")
                unit, temperature = stored["scales"].tolist()
                found = cls(stored["ngrams"], unit, stored["dense"], temperature)
        except OSError as error:
            raise ConfigError(f"{file}, made by `penstock route train-score`, cannot be read: {error}") from error
        except (ValueError, KeyError, TypeError, AttributeError, EOFError, BadZipFile) as error:
            raise ConfigError(f"{file} was not made by `penstock route train-score`") from error
        if len(found.ngrams) != BUCKETS or BUCKETS + len(found.dense) != layout().size:
            raise ConfigError(f"{file} was made by another version; run `penstock route train-score` again")
        return found


@cache
def shipped() -> Complexity:
    """The weights of this release."""
    with (files("penstock.routing.selection") / "complexity.npz").open("rb") as file:
        return Complexity.load(file)
