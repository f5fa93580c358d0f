"""How long the next token of a running request takes on one engine, measured on its steps."""

from __future__ import annotations

from penstock.engine.request import EngineLoad

FRESH_S = 5.0
"""A figure older than this says nothing of now."""
WEIGHT = 0.1
"""Of the newest step."""


class TokenGap:
    """Time per output token: between two reports of an engine, the time over the tokens of each running sequence."""

    __slots__ = ("_at", "_mean", "_seen_at")

    def __init__(self) -> None:
        self._mean: float | None = None
        self._at = 0.0
        self._seen_at: float | None = None
        """When the last report with running sequences came; None: the engine was idle."""

    def reported(self, before: EngineLoad, load: EngineLoad, now: float) -> None:
        since, self._seen_at = self._seen_at, now if load.running else None
        tokens = load.generation_tokens - before.generation_tokens
        if since is None or tokens <= 0:
            if load.running and since is not None:
                self._seen_at = since  # nothing was generated yet: the time goes on
            return
        running = max(min(before.running, load.running), 1)
        gap = (now - since) * running / tokens
        self._mean = gap if self._mean is None or now - self._at > FRESH_S else self._mean + WEIGHT * (gap - self._mean)
        self._at = now

    def interrupt(self) -> None:
        """The engine is gone: until the next report no time passes for its sequences."""
        self._seen_at = None

    def seconds(self, now: float) -> float | None:
        """Seconds per token; None: not measured lately."""
        return None if now - self._at > FRESH_S else self._mean
