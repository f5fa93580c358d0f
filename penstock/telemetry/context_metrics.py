"""Metrics of what happens between a question and the model: conversations, tools."""

from __future__ import annotations

from typing import Literal

from penstock.telemetry.exposition import Registry

SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)


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

        self._tools = registry.counter(
            "penstock_tool_calls_total", "Calls of tools that the gateway runs.", ("tool", "outcome")
        )
        self._tool_seconds = registry.histogram(
            "penstock_tool_call_seconds", "Time that such calls took.", SECONDS, ("tool",)
        )

    def tool_call(self, tool: str, ok: bool, seconds: float) -> None:
        self._tools.child(tool, "done" if ok else "failed").inc()
        self._tool_seconds.child(tool).observe(seconds)

    def dropped(self, how: Literal["truncated", "summarised"], turns: int) -> None:
        self._dropped.child(how).inc(turns)

    def summary(self, when: Literal["ahead", "waited"], outcome: Literal["done", "failed"]) -> None:
        self._summaries.child(when, outcome).inc()
