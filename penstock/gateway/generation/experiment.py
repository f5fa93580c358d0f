"""One experiment as a gateway knows it: its settings, and the arms that were last read from the store."""

from __future__ import annotations

from penstock.config.experiments import ExperimentConfig
from penstock.gateway.generation.experiment_store import ExperimentState
from penstock.routing.experiments.allocation import CONTROL, Allocation
from penstock.routing.experiments.verdict import Rules


class Experiment:
    """One experiment as this gateway knows it."""

    def __init__(self, config: ExperimentConfig) -> None:
        self.config = config
        self.control = config.control or config.name
        self.rules = Rules(
            confidence=config.confidence,
            worse_errors=config.worse_errors,
            most_errors=config.most_errors,
            worse_quality=config.worse_quality,
            worse_ttft=config.worse_ttft,
            worse_latency=config.worse_latency,
            least_requests=config.least_requests,
        )
        self.state: ExperimentState | None = None
        """None until it has been read from the store."""
        self.allocation = Allocation().resized(config.canaries)

    def follow(self, state: ExperimentState) -> None:
        if self.state is None or state.version != self.state.version:
            self.state, self.allocation = state, state.allocation()

    @property
    def canaries(self) -> list[str]:
        """Every canary, those without a share too."""
        return list(dict.fromkeys((*self.config.canaries, *self.allocation.intervals)))

    def span(self, now: float) -> tuple[int, int]:
        """The numbers of the stage and of the time window; no two windows have the same."""
        if self.state is None:
            return 1, 1
        return self.state.stage, self.state.stage + int((now - self.state.begun_at) // self.config.window_s)

    def model(self, arm: str) -> str:
        return self.control if arm == CONTROL else arm
