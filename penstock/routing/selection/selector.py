"""The rules of one route: from a question and the caller's tier to a model, with the reason.

Order of the rules; the one that decided is in the reply's `x-penstock-route`:
  1. kill switch: a disabled route sends everything to its default
  2. tier: a tier may be tied to one of the two models
  3. control group: a share of the requests gets the default, whatever they ask
  4. length: more than `long_words` words need the larger model
  5. a trained classifier, where there is one
  6. the score against the threshold
A question without any signal is `unknown` and gets the default.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from penstock.routing.selection.features import read
from penstock.routing.selection.score import Score, score

Size = Literal["small", "large"]


@dataclass(frozen=True, slots=True)
class RouteRules:
    """One route, as configured."""

    name: str
    small: str
    large: str
    default: Size = "small"
    threshold: float = 0.6
    long_words: int = 800
    tiers: Mapping[str, Size] = field(default_factory=dict)
    share: float = 1.0
    """Part of the requests that is routed; the rest is the control group."""
    enabled: bool = True

    def model(self, size: Size) -> str:
        return self.small if size == "small" else self.large


@dataclass(frozen=True, slots=True)
class Selection:
    model: str
    size: Size
    rule: str
    """The rule that decided: a bounded set, suitable as a metric label."""
    score: float | None = None
    reasons: tuple[str, ...] = ()

    def why(self, route: str) -> str:
        """For the header, e.g. `auto; rule=score; score=0.82; reasons=code,reasoning`."""
        parts = [route, f"rule={self.rule}"]
        if self.score is not None:
            parts.append(f"score={self.score:.2f}")
        if self.reasons:
            parts.append(f"reasons={','.join(self.reasons)}")
        return "; ".join(parts)


def select(
    rules: RouteRules,
    text: str,
    *,
    words: int = 0,
    tier: str = "",
    wanted_tokens: int = 0,
    unit: str = "",
    opinion: float | None = None,
) -> Selection:
    """`words`: of the whole conversation, when `text` is only its end. `unit`: what is assigned to the control group as
    a whole, such as a user. `opinion`: a classifier's probability that the larger model is needed."""
    if not rules.enabled:
        return _take(rules, rules.default, "off")
    if tier in rules.tiers:
        return _take(rules, rules.tiers[tier], "tier")
    if rules.share < 1 and _draw(rules.name, unit) >= rules.share:
        return _take(rules, rules.default, "control")
    features = read(text, wanted_tokens)
    if max(words, features.words) > rules.long_words:
        return _take(rules, "large", "length", Score(1.0, (("length", 1.0),)))
    found = score(features, rules.long_words)
    if features.low_signal and opinion is None:
        return _take(rules, rules.default, "unknown", found)
    if opinion is not None:
        # Combined, because the classifier knows more about language and the score more about length and demands.
        joint = 0.7 * opinion + 0.3 * found.value
        size: Size = "large" if joint > 0.5 else "small"
        return Selection(rules.model(size), size, "classifier", joint, tuple(found.reasons))
    return _take(rules, "large" if found.value > rules.threshold else "small", "score", found)


def _take(rules: RouteRules, size: Size, rule: str, found: Score | None = None) -> Selection:
    return Selection(
        rules.model(size), size, rule, None if found is None else found.value, tuple(found.reasons) if found else ()
    )


def _draw(name: str, unit: str) -> float:
    """A number in 0..1 that depends only on the route and the unit, so that all processes agree."""
    digest = hashlib.blake2b(f"{name}\0{unit}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") / 2**64
