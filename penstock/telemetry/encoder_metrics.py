"""Metrics of encoders: texts, tokens and durations as clients see them, and whether their engines are up."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Protocol

from penstock.telemetry.exposition import MetricRegistry

SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)
_LABELS = ("encoder",)


class EncoderView(Protocol):
    """An encoder as the metrics see it."""

    @property
    def name(self) -> str: ...

    @property
    def up(self) -> bool: ...

    @property
    def waiting(self) -> int: ...


class EncoderMetrics:
    """One per gateway process."""

    def __init__(self, registry: MetricRegistry, encoders: Callable[[], Iterable[EncoderView]]) -> None:
        self._texts = registry.counter("penstock_encoder_texts_total", "Texts encoded for clients.", _LABELS)
        self._tokens = registry.counter("penstock_encoder_tokens_total", "Tokens of those texts.", _LABELS)
        self._seconds = registry.histogram(
            "penstock_encoder_request_seconds", "Duration of encoder requests.", SECONDS, _LABELS
        )
        registry.sampled(
            "gauge", "penstock_encoder_up", "1 when the encoder's engine accepts requests.", _LABELS,
            lambda: [((view.name,), int(view.up)) for view in encoders()],
        )  # fmt: skip
        registry.sampled(
            "gauge", "penstock_encoder_waiting", "Texts waiting in the encoder's engine.", _LABELS,
            lambda: [((view.name,), view.waiting) for view in encoders()],
        )  # fmt: skip

    def encoded(self, encoder: str, texts: int, tokens: int, seconds: float) -> None:
        self._texts.child(encoder).inc(texts)
        self._tokens.child(encoder).inc(tokens)
        self._seconds.child(encoder).observe(seconds)
