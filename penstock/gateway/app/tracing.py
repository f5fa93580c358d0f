"""What is kept of a request besides its record: its span in a trace, its timeline, and a log line if it was slow."""

from __future__ import annotations

import asyncio
import logging
from time import monotonic
from typing import Any

from penstock.config.schema import TelemetryConfig
from penstock.gateway.app.exchange import Exchange
from penstock.telemetry.context import RequestContext, begin_span, current, read_trace
from penstock.telemetry.metrics import Metrics
from penstock.telemetry.otlp_metrics import MetricPush
from penstock.telemetry.timeline import RecentTimelines, Timeline
from penstock.telemetry.tracing import Tracer

slow_log = logging.getLogger("penstock.slow")


class RequestTracing:
    """One per gateway process."""

    def __init__(self, config: TelemetryConfig, metrics: Metrics) -> None:
        self._config = config
        self.recent = RecentTimelines(config.recent_requests)
        self.tracer = Tracer.open(config, metrics.registry) if config.otlp_endpoint else None
        self._push: MetricPush | None = None
        if config.otlp_endpoint and config.otlp_metrics_s is not None:
            self._push = MetricPush.open(config, metrics.requests, config.otlp_metrics_s)

    def begin(self, exchange: Exchange) -> None:
        sent = exchange.header(b"traceparent")
        trace = None if sent is None else read_trace(sent, exchange.header(b"tracestate"))
        if self.tracer is not None:
            trace = begin_span(trace, self._config.trace_share)
        exchange.timeline.trace = trace
        current.set(RequestContext(exchange.request_id, trace))

    def finish(self, exchange: Exchange) -> None:
        """Called once, when the record of a request that serves tokens is complete."""
        timeline = exchange.timeline
        timeline.ended_at = monotonic()
        session = exchange.header(b"x-session-id")
        if session is not None:
            timeline.session = session.decode("latin-1")[:128]
        self.recent.add(timeline)
        if self.tracer is not None:
            self.tracer.export(timeline)
        self._log_if_slow(timeline)

    def texts(self, exchange: Exchange) -> dict[str, Any] | None:
        """Prompts and answers for the log; None unless the configuration asks for them."""
        texts = exchange.timeline.texts
        if not texts:
            return None
        return {"prompt": [prompt for prompt, _ in texts], "completion": [completion for _, completion in texts]}

    async def close(self) -> None:
        for sender in (self.tracer, self._push):
            if sender is not None:
                await asyncio.to_thread(sender.close)

    def _log_if_slow(self, timeline: Timeline) -> None:
        record, total_s, ttft_s = timeline.record, self._config.slow_request_s, self._config.slow_ttft_s
        slow = total_s is not None and record.total_latency_ms > total_s * 1000
        if record.ttft_ms is not None and ttft_s is not None and record.ttft_ms > ttft_s * 1000:
            slow = True
        if slow:
            phases = {f"{name}_ms": value for name, value in timeline.breakdown().items()}
            about = {
                "request_id": record.request_id,
                "tenant": record.tenant,
                "route": record.route,
                "model": record.adapter_id or record.model_version,
                "status": record.status,
                "finish_reason": record.finish_reason,
                "prompt_tokens": record.prompt_tokens,
                "cached_tokens": record.cached_tokens,
                "completion_tokens": record.completion_tokens,
                "ttft_ms": record.ttft_ms,
                "total_latency_ms": record.total_latency_ms,
            }
            slow_log.warning("slow request", extra={**about, **phases})
