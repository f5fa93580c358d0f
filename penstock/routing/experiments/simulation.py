"""How often the test is wrong, and how soon it is right: experiments drawn at random, looked at all the time."""

from __future__ import annotations

import math
import random
from dataclasses import dataclass

from penstock.routing.experiments.confidence import Moments
from penstock.routing.experiments.verdict import Rules, findings, part_of


@dataclass(frozen=True, slots=True)
class Scenario:
    """One experiment: requests arrive, each arm fails and takes its time as it does."""

    share: float = 0.05
    errors: float = 0.01
    """Of the control."""
    canary_errors: float = 0.01
    slower: float = 1.0
    """How many times the control's time to the first token the canary takes."""
    requests: int = 10_000
    look: int = 100
    """Requests between two looks."""
    window: int = 2_000
    """Requests of a time window."""
    outage: float = 0.0
    """Error rate of both arms in every tenth window, as when something fails that both need."""
    spread: float = 0.8
    """Standard deviation of the logarithm of latencies."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """Of many experiments."""

    experiments: int
    rolled_back: int
    requests: list[int]
    """Until each rollback, of both arms together."""
    canary_errors: list[int]
    """That clients of the canary met until then."""

    @property
    def share(self) -> float:
        return self.rolled_back / self.experiments


def simulate(scenario: Scenario, rules: Rules, experiments: int, seed: int = 0) -> Outcome:
    draw = random.Random(seed)
    ended = [found for _ in range(experiments) if (found := _run(scenario, rules, draw)) is not None]
    return Outcome(experiments, len(ended), [at for at, _ in ended], [errors for _, errors in ended])


def _run(scenario: Scenario, rules: Rules, draw: random.Random) -> tuple[int, int] | None:
    """Requests and errors of the canary until it is rolled back; None: it never is."""
    stage = [_empty(), _empty()]
    window = [_empty(), _empty()]
    place = 1
    met = 0
    for at in range(1, scenario.requests + 1):
        arm = draw.random() < scenario.share
        out = scenario.outage and place % 10 == 0
        rate = max(scenario.canary_errors if arm else scenario.errors, scenario.outage if out else 0.0)
        failed = draw.random() < rate
        met += arm and failed
        seconds = draw.gauss(math.log(scenario.slower) if arm else 0.0, scenario.spread)
        for counts in (stage[arm], window[arm]):
            counts["errors"] = counts["errors"].with_value(failed)
            if not failed:
                counts["ttft"] = counts["ttft"].with_value(seconds)
        if at % scenario.look == 0:
            for (control, canary), k in ((stage, 1), (window, place)):
                if findings(canary, control, rules, part_of(rules.confidence, k, 1)):
                    return at, met
        if at % scenario.window == 0:
            window, place = [_empty(), _empty()], place + 1
    return None


def _empty() -> dict[str, Moments]:
    return {"errors": Moments(), "ttft": Moments()}
