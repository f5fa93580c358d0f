"""Pushes latencies and token counts over OTLP, under OpenTelemetry's semantic conventions for generative AI.

For users who collect with OpenTelemetry alone; everything else is scraped from `/metrics`, which shows the same
histograms. A thread reads and sends them. It reads single numbers and copies lists, so the event loop that writes them
needs no lock. The histograms do not distinguish operations, so all requests are `generate_content`.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

from penstock.config.schema import TelemetryConfig
from penstock.telemetry.exposition import Buckets
from penstock.telemetry.metrics import RequestMetrics
from penstock.telemetry.otlp import address, check_library, resource, scope

if TYPE_CHECKING:
    from opentelemetry.sdk.metrics.export import HistogramDataPoint, Metric, MetricExporter, MetricsData

Requests = Callable[[], Mapping[tuple[str, str], RequestMetrics]]
"""By model and engine."""
CLOSE_S = 5.0
_METRICS: tuple[tuple[str, str, str, tuple[tuple[Callable[[RequestMetrics], Buckets], dict[str, str]], ...]], ...] = (
    ("gen_ai.server.request.duration", "s", "Time from arrival to the last token.", ((lambda it: it.e2e, {}),)),
    ("gen_ai.server.time_to_first_token", "s", "Time to the first token.", ((lambda it: it.ttft, {}),)),
    ("gen_ai.server.time_per_output_token", "s", "Time per token after the first.", ((lambda it: it.per_token, {}),)),
    (
        "gen_ai.client.token.usage",
        "{token}",
        "Tokens per request.",
        (
            (lambda it: it.prompt_tokens, {"gen_ai.token.type": "input"}),
            (lambda it: it.generation_tokens, {"gen_ai.token.type": "output"}),
        ),
    ),
)
log = logging.getLogger(__name__)


class MetricPush:
    """Sends the metrics every `every_s` seconds, and once more at the end."""

    def __init__(self, exporter: MetricExporter, config: TelemetryConfig, requests: Requests, every_s: float) -> None:
        self._exporter = exporter
        self._resource, self._scope = resource(config), scope()
        self._requests = requests
        self._every_s = every_s
        self._began = time.time_ns()
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="metric exporter", daemon=True)
        self._thread.start()

    @classmethod
    def open(cls, config: TelemetryConfig, requests: Requests, every_s: float) -> MetricPush:
        check_library()
        from opentelemetry.exporter.otlp.proto.http.metric_exporter import OTLPMetricExporter

        url, headers = address(config, "metrics")
        return cls(OTLPMetricExporter(endpoint=url, headers=headers), config, requests, every_s)

    def close(self) -> None:
        """Blocks for at most `CLOSE_S`."""
        self._ended.set()
        self._thread.join(CLOSE_S)
        self._exporter.shutdown()

    def _run(self) -> None:
        ended = False
        while not ended:
            ended = self._ended.wait(self._every_s)
            try:
                self._exporter.export(self.data())
            except Exception:
                # Values are cumulative, so the next successful export contains these too.
                log.exception("metrics could not be exported over OTLP")

    def data(self) -> MetricsData:
        from opentelemetry.sdk.metrics.export import MetricsData, ResourceMetrics, ScopeMetrics

        found = list(self._requests().items())
        metrics = [self._metric(*metric, found) for metric in _METRICS]
        return MetricsData([ResourceMetrics(self._resource, [ScopeMetrics(self._scope, metrics, "")], "")])

    def _metric(
        self,
        name: str,
        unit: str,
        about: str,
        parts: tuple[tuple[Callable[[RequestMetrics], Buckets], dict[str, str]], ...],
        found: list[tuple[tuple[str, str], RequestMetrics]],
    ) -> Metric:
        from opentelemetry.sdk.metrics.export import AggregationTemporality, Histogram, Metric

        points = [
            self._point(part(metrics), {"gen_ai.request.model": model, "penstock.engine": engine, **more})
            for (model, engine), metrics in found
            for part, more in parts
        ]
        return Metric(name, about, unit, Histogram(points, AggregationTemporality.CUMULATIVE))

    def _point(self, buckets: Buckets, more: dict[str, str]) -> HistogramDataPoint:
        from opentelemetry.sdk.metrics.export import HistogramDataPoint

        counts, total = list(buckets.counts), buckets.sum
        attributes = {"gen_ai.operation.name": "generate_content", "gen_ai.provider.name": "penstock", **more}
        bounds = [float(bound) for bound in buckets.bounds]
        # Minimum and maximum are not recorded; the bounds of their buckets are used instead.
        filled = [index for index, count in enumerate(counts) if count]
        least, most = (filled[0], filled[-1]) if filled else (0, 0)
        smallest = bounds[least - 1] if least else 0.0
        largest = bounds[min(most, len(bounds) - 1)] if filled else 0.0
        return HistogramDataPoint(
            attributes, self._began, time.time_ns(), sum(counts), total, counts, bounds, smallest, largest
        )
