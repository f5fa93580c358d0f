"""Evaluates a route on labelled prompts: accuracy and savings."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from penstock.routing.selection.prompts import Prompt
from penstock.routing.selection.selector import Selection


@dataclass(frozen=True, slots=True)
class Evaluation:
    prompts: int
    right: int
    too_small: int
    """Sent to the small model although they need the large one: quality suffers."""
    too_large: int
    """Sent to the large model without need: money is wasted."""
    sent_to_large: int
    unknown: int
    """Left to the default, rightly or wrongly."""
    wrong: list[tuple[Prompt, Selection]]

    @property
    def accuracy(self) -> float:
        return self.right / self.prompts

    def saved(self, price_ratio: float) -> float:
        """Part of the cost saved compared with sending everything to the large model, which costs `price_ratio` times
        as much; assumes equal token counts for all prompts."""
        spent = self.sent_to_large * price_ratio + (self.prompts - self.sent_to_large)
        return 1 - spent / (self.prompts * price_ratio)


def evaluate(prompts: Sequence[Prompt], decide: Callable[[Prompt], Selection]) -> Evaluation:
    decided = [(prompt, decide(prompt)) for prompt in prompts]
    wrong = [(prompt, selection) for prompt, selection in decided if selection.size != prompt.size]
    return Evaluation(
        len(prompts),
        len(prompts) - len(wrong),
        sum(prompt.size == "large" for prompt, _ in wrong),
        sum(prompt.size == "small" for prompt, _ in wrong),
        sum(selection.size == "large" for _, selection in decided),
        sum(selection.rule == "unknown" for _, selection in decided),
        wrong,
    )
