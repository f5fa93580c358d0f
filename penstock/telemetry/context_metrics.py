"""Metrics of what happens between a question and the model: conversations."""

from __future__ import annotations

from typing import Literal

from penstock.telemetry.exposition import Registry


class ContextMetrics:
    """Registered with the gateway's other metrics."""

    def __init__(self, registry: Registry) -> None:
        self.turns = registry.counter(
            "penstock_conversation_turns_total", "Turns of stored conversations that were answered and kept."
        ).child()
        self._dropped = registry.counter(
            "penstock_conversation_dropped_turns_total", "Turns that left a prompt to make room.", ("how",)
        )
        self._summaries = registry.counter(
            "penstock_conversation_summaries_total", "Times that old turns were condensed.", ("when", "outcome")
        )

    def dropped(self, how: Literal["truncated", "summarised"], turns: int) -> None:
        self._dropped.child(how).inc(turns)

    def summary(self, when: Literal["ahead", "waited"], outcome: Literal["done", "failed"]) -> None:
        self._summaries.child(when, outcome).inc()
