"""What the supervisor tells whoever watches it. This one is silent; the command line has one with colours."""

from __future__ import annotations

from penstock.engine.request import EngineInfo


class Reporter:
    """Events of a process tree, in the order they happen."""

    def line(self, child: str, text: str) -> None:
        """A child wrote a line."""

    def progress(self, child: str, phase: str, fraction: float) -> None:
        """A child is starting."""

    def engine_started(self, child: str, info: EngineInfo) -> None:
        """An engine listens, for the first time or again."""

    def ready(self, engines: list[EngineInfo], seconds: float) -> None:
        """Everything answers, `seconds` after the start."""

    def exited(self, child: str, how: str, restart_in_s: float) -> None:
        """A child died and will be started again."""

    def draining(self, limit_s: float) -> None:
        """Told to stop: running requests may finish."""

    def stopped(self) -> None:
        """Nothing runs any more."""
