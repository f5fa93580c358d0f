"""Metrics of conversations, server-side tools, moderation and answer quality."""

from __future__ import annotations

from typing import Literal

from penstock.telemetry.exposition import MetricRegistry

GRADES = (0.0, 0.25, 0.5, 0.75, 1.0)
SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)


class ContextMetrics:
    """Registered with the gateway's other metrics."""

    def __init__(self, registry: MetricRegistry) -> None:
        self.turns = registry.counter(
            "penstock_conversation_turns_total", "Turns answered and stored in conversations."
        ).child()
        self._dropped = registry.counter(
            "penstock_conversation_dropped_turns_total", "Turns removed from prompts to fit the window.", ("how",)
        )
        self._summaries = registry.counter(
            "penstock_conversation_summaries_total", "Summaries made of old turns.", ("when", "outcome")
        )

        self._tools = registry.counter(
            "penstock_tool_calls_total", "Tool calls run by the gateway.", ("tool", "outcome")
        )
        self._tool_seconds = registry.histogram(
            "penstock_tool_call_seconds", "Duration of tool calls run by the gateway.", SECONDS, ("tool",)
        )

        self._judged = registry.counter(
            "penstock_judged_answers_total", "Answers sampled for grading by a model, by outcome.",
            ("model_name", "route", "outcome"),
        )  # fmt: skip
        self._relevance, self._groundedness = (
            registry.histogram(f"penstock_answer_{name}", help, GRADES, ("model_name", "route"))
            for name, help in (
                ("relevance", "How well sampled answers address their questions, 0 to 1."),
                ("groundedness", "How far sampled answers are supported by the sources they cite, 0 to 1."),
            )
        )

        self._moderated = registry.counter(
            "penstock_moderation_checks_total", "Texts checked by moderation models.", ("rule", "stage", "outcome")
        )
        self._moderation_seconds = registry.histogram(
            "penstock_moderation_seconds", "Duration of moderation checks.", SECONDS, ("rule",)
        )

    def moderated(self, rule: str, stage: str, outcome: str, seconds: float) -> None:
        self._moderated.child(rule, stage, outcome).inc()
        self._moderation_seconds.child(rule).observe(seconds)

    def judged(self, model: str, route: str, outcome: Literal["judged", "failed", "dropped"]) -> None:
        self._judged.child(model, route, outcome).inc()

    def relevance(self, model: str, route: str, grade: float) -> None:
        self._relevance.child(model, route).observe(grade)

    def groundedness(self, model: str, route: str, grade: float) -> None:
        self._groundedness.child(model, route).observe(grade)

    def tool_call(self, tool: str, ok: bool, seconds: float) -> None:
        self._tools.child(tool, "done" if ok else "failed").inc()
        self._tool_seconds.child(tool).observe(seconds)

    def dropped(self, how: Literal["truncated", "summarised"], turns: int) -> None:
        self._dropped.child(how).inc(turns)

    def summary(self, when: Literal["ahead", "waited"], outcome: Literal["done", "failed"]) -> None:
        self._summaries.child(when, outcome).inc()
