"""Combines features into one score in 0..1, with its parts.

Each kind of mark gives a certainty that the larger model is needed. The certainties combine as independent evidence:
score = 1 - product of (1 - certainty). So one strong mark is enough, several weak ones add up, and nothing exceeds 1.
The score of a question that asks for little is damped.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from penstock.routing.selection.features import Features

_ONE: Final = {"code": 0.62, "maths": 0.62, "reasoning": 0.62, "long_answer": 0.62}
"""Certainty from the first mark of a kind."""
_MORE: Final = 0.22
"""Certainty from each further mark."""
_DAMPING: Final = {"brief": 0.6, "lookup": 0.75}
"""Factors for questions that ask for a short answer or for a fact."""
_CONSTRAINT: Final = 0.12
_QUESTION: Final = 0.08
_LENGTH: Final = 0.6
"""Certainty from a question of `long_words` words."""
_WANTED: Final = 0.35
"""Certainty from a request for 2,000 tokens or more."""


@dataclass(frozen=True, slots=True)
class Score:
    value: float
    parts: tuple[tuple[str, float], ...]
    """The contributions, largest first."""

    @property
    def reasons(self) -> list[str]:
        """The main contributions, to show to people."""
        return [name for name, certainty in self.parts if certainty >= 0.15][:3]


def score(features: Features, long_words: int) -> Score:
    parts = {"length": _LENGTH * min(1.0, features.words / long_words) ** 1.5}
    for name, first in _ONE.items():
        count = getattr(features, name)
        if count:
            parts[name] = 1 - (1 - first) * (1 - _MORE) ** (min(count, 6) - 1)
    if features.constraints:
        parts["constraints"] = 1 - (1 - _CONSTRAINT) ** min(features.constraints, 4)
    if features.questions > 1:
        parts["questions"] = 1 - (1 - _QUESTION) ** min(features.questions - 1, 4)
    if features.wanted_tokens > 500:
        parts["wanted tokens"] = _WANTED * min(1.0, features.wanted_tokens / 2000)
    doubt = 1.0
    for certainty in parts.values():
        doubt *= 1 - certainty
    value = 1 - doubt
    for name, damping in _DAMPING.items():
        if getattr(features, name):
            value *= damping
    return Score(value, tuple(sorted(parts.items(), key=lambda part: -part[1])))
