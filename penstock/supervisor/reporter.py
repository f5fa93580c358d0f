"""The events that the supervisor reports. This reporter ignores them; the CLI has one that prints them."""

from __future__ import annotations

from penstock.engine.request import EngineInfo
from penstock.supervisor.start_timeline import StartTimeline


class Reporter:
    """Events of a process tree, in the order they happen."""

    def line(self, child: str, text: str) -> None:
        """A child wrote a line of output."""

    def progress(self, child: str, phase: str, fraction: float) -> None:
        """A child is starting."""

    def engine_started(self, child: str, info: EngineInfo) -> None:
        """An engine is listening, after its first start or a restart."""

    def ready(self, engines: list[EngineInfo], seconds: float) -> None:
        """All engines and gateways are ready, `seconds` after the start."""

    def timeline(self, timeline: StartTimeline) -> None:
        """Where the time went until everything was ready; comes before `ready`."""

    def exited(self, child: str, how: str, restart_in_s: float) -> None:
        """A child died and will be started again."""

    def scaled(self, model: str, before: int, after: int, why: str) -> None:
        """Automatic scaling changed the number of replicas of a model."""

    def draining(self, limit_s: float) -> None:
        """The server is stopping and running requests may finish."""

    def stopped(self) -> None:
        """All processes have ended."""
