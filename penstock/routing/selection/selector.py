"""The rules of one route: from a question and the caller's tier to a model, with the reason.

Order of the rules; the one that decided is in the reply's `x-penstock-route`:
  1. kill switch: a disabled route sends everything to its default
  2. tier: a tier may be tied to one of the two models
  3. control group: a share of the requests gets the default, whatever they ask
  4. length: more than `long_words` words to read (or `long_tokens` tokens) need the larger model
  5. a trained classifier, where there is one
  6. the score: above the threshold the larger model answers, well below it the smaller one
A question that tells nothing, or whose score is just below the threshold, is `unknown` and gets the default.

`constrained` then replaces a model that cannot or must not answer by the other one.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Final

from penstock.routing.selection.complexity import Assessment, Complexity, shipped
from penstock.routing.selection.prompts import Size

_EARLIER: Final = 3
"""Earlier messages of the user that may decide where the last one tells nothing."""


@dataclass(frozen=True, slots=True)
class RouteRules:
    """One route, as configured."""

    name: str
    small: str
    large: str
    default: Size = "small"
    threshold: float = 0.6
    unsure: float = 0.2
    """Scores that are less than this below the threshold decide nothing."""
    long_words: int = 800
    long_tokens: int | None = None
    """Where set, tokens are counted instead of words."""
    tiers: Mapping[str, Size] = field(default_factory=dict)
    share: float = 1.0
    """Part of the requests that is routed; the rest is the control group."""
    enabled: bool = True
    target_ttft_ms: float | None = None
    """The time to the first token that should be met, if a model can."""
    budget_reserve: float = 0.0
    """The part of a caller's budget that is kept for the small model."""

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
    wanted: str = ""
    """The rule that had chosen the other model, where a constraint replaced it."""

    def why(self, route: str) -> str:
        """For the header, e.g. `auto; rule=score; score=0.82; reasons=code,reasoning`."""
        parts = [route, f"rule={self.rule}"]
        if self.wanted:
            parts.append(f"instead_of={self.wanted}")
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
    tokens: int = 0,
    tier: str = "",
    wanted_tokens: int = 0,
    unit: str = "",
    opinion: float | None = None,
    earlier: Sequence[str] = (),
    complexity: Complexity | None = None,
) -> Selection:
    """`words`, `tokens`: of everything that the model will read. `unit`: what is assigned to the control group as a
    whole, such as a user. `opinion`: a classifier's probability that the larger model is needed. `earlier`: what the
    user said before, oldest first."""
    if not rules.enabled:
        return _take(rules, rules.default, "off")
    if tier in rules.tiers:
        return _take(rules, rules.tiers[tier], "tier")
    if rules.share < 1 and _draw(rules.name, unit) >= rules.share:
        return _take(rules, rules.default, "control")
    if tokens > rules.long_tokens if rules.long_tokens is not None else words > rules.long_words:
        return Selection(rules.large, "large", "length", 1.0, ("length",))
    model = complexity or shipped()
    found = model.assess(text, wanted_tokens)
    if opinion is not None:
        # Combined, because the classifier knows more about language and the score more about demands.
        joint = 0.7 * opinion + 0.3 * found.value
        size: Size = "large" if joint > 0.5 else "small"
        return Selection(rules.model(size), size, "classifier", joint, found.reasons)
    decided = _decide(rules, found)
    if decided is None:
        for before in reversed(earlier[-_EARLIER:]):
            # "and then?" continues what was asked before.
            past = model.assess(before, wanted_tokens)
            if (size_before := _decide(rules, past)) is not None:
                reasons = (*past.reasons[:2], "earlier")
                return Selection(rules.model(size_before), size_before, "score", past.value, reasons)
        return _take(rules, rules.default, "unknown", found)
    return _take(rules, decided, "score", found)


def _decide(rules: RouteRules, found: Assessment) -> Size | None:
    """None: unsure."""
    if found.value > rules.threshold:
        return "large"
    if found.low_signal or found.value > rules.threshold - rules.unsure:
        return None
    return "small"


def constrained(rules: RouteRules, selection: Selection, problems: Mapping[Size, str]) -> Selection:
    """The selection, or the other model where the selected one has a problem and the other one has none. `problems`:
    why a model cannot or must not answer, by size; a word that becomes the rule."""
    other: Size = "small" if selection.size == "large" else "large"
    if selection.size not in problems or other in problems:
        return selection
    return replace(
        selection,
        model=rules.model(other),
        size=other,
        rule=problems[selection.size],
        wanted=selection.rule,
    )


def _take(rules: RouteRules, size: Size, rule: str, found: Assessment | None = None) -> Selection:
    return Selection(
        rules.model(size), size, rule, None if found is None else found.value, found.reasons if found else ()
    )


def _draw(name: str, unit: str) -> float:
    """A number in 0..1 that depends only on the route and the unit, so that all processes agree."""
    digest = hashlib.blake2b(f"{name}\0{unit}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") / 2**64
