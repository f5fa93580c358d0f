"""Exports finished requests as OpenTelemetry spans over OTLP. Off unless an endpoint is configured; needs
the extra `otel`.

A thread builds spans from the timelines of finished requests and sends them in batches, so a request only pays for one
entry in a queue. When the queue is full, requests are dropped and counted, so a slow or unreachable collector never
delays anything.
"""

from __future__ import annotations

import logging
import queue
import secrets
import threading
import time
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import msgspec

from penstock.config.schema import TelemetryConfig
from penstock.telemetry.exposition import MetricRegistry
from penstock.telemetry.otlp import address, check_library, resource, scope
from penstock.telemetry.timeline import Timeline

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import ReadableSpan
    from opentelemetry.sdk.trace.export import SpanExporter

OPERATIONS = {
    "/v1/chat/completions": "chat",
    "/v1/responses": "chat",
    "/v1/messages": "chat",
    "/v1/completions": "text_completion",
    "/v1/embeddings": "embeddings",
}
"""`gen_ai.operation.name` by route; for other routes, the last part of the route."""
QUEUE = 4096
"""Maximum number of requests waiting to be exported."""
BATCH = 100
SEND_EVERY_S = 1.0
CLOSE_S = 5.0
"""Time limit of the last export when the process ends."""

log = logging.getLogger(__name__)


class Tracer:
    """Exports the spans of sampled requests."""

    def __init__(self, exporter: SpanExporter, config: TelemetryConfig, registry: MetricRegistry) -> None:
        requests = registry.counter(
            "penstock_traced_requests_total", "Traced requests, by the outcome of the export.", ("outcome",)
        )
        self._sent, self._failed, self._dropped = (requests.child(name) for name in ("sent", "failed", "dropped"))
        self._resource, self._scope = resource(config), scope()
        self._exporter = exporter
        self._queue: queue.Queue[Timeline | None] = queue.Queue(QUEUE)
        self._thread = threading.Thread(target=self._run, name="trace exporter", daemon=True)
        self._thread.start()

    @classmethod
    def open(cls, config: TelemetryConfig, registry: MetricRegistry) -> Tracer:
        check_library()
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter

        url, headers = address(config, "traces")
        return cls(OTLPSpanExporter(endpoint=url, headers=headers), config, registry)

    def export(self, timeline: Timeline) -> None:
        """Queues a finished request, if its trace is sampled."""
        if timeline.trace is None or not timeline.trace.sampled:
            return
        try:
            self._queue.put_nowait(timeline)
        except queue.Full:
            self._dropped.inc()

    def close(self) -> None:
        """Exports what is queued and stops. Blocks for at most `CLOSE_S`."""
        try:
            self._queue.put(None, timeout=CLOSE_S)
        except queue.Full:
            return  # the collector does not accept anything
        self._thread.join(CLOSE_S)
        self._exporter.shutdown()

    def _run(self) -> None:
        ended = False
        while not ended:
            first = self._queue.get()
            if first is None:
                return
            batch = [first]
            deadline = time.monotonic() + SEND_EVERY_S
            while len(batch) < BATCH and (left := deadline - time.monotonic()) > 0:
                try:
                    more = self._queue.get(timeout=left)
                except queue.Empty:
                    break
                if more is None:
                    ended = True
                    break
                batch.append(more)
            self._send(batch)

    def _send(self, batch: list[Timeline]) -> None:
        from opentelemetry.sdk.trace.export import SpanExportResult

        try:
            spans = [span for timeline in batch for span in self._spans(timeline)]
            result = self._exporter.export(spans)
        except Exception:
            # One bad request must not stop the exporter.
            log.exception("spans could not be exported over OTLP", extra={"requests": len(batch)})
            result = SpanExportResult.FAILURE
        (self._sent if result is SpanExportResult.SUCCESS else self._failed).inc(len(batch))

    def _spans(self, timeline: Timeline) -> Iterator[ReadableSpan]:
        from opentelemetry.sdk.trace import ReadableSpan
        from opentelemetry.trace import SpanContext, SpanKind, Status, StatusCode, TraceFlags
        from opentelemetry.trace.span import TraceState

        trace, record = timeline.trace, timeline.record
        assert trace is not None
        flags = TraceFlags(TraceFlags.SAMPLED)
        state = TraceState.from_header([trace.state]) if trace.state else TraceState()

        def context(span_id: str, *, remote: bool = False) -> SpanContext:
            return SpanContext(int(trace.trace_id, 16), int(span_id, 16), remote, flags, state)

        def moment(seconds: float) -> int:
            return int((record.timestamp + seconds) * 1e9)

        own = context(trace.span_id)
        failed = record.status >= 500 or record.finish_reason == "error"
        yield ReadableSpan(
            span_name(timeline),
            context=own,
            parent=context(trace.parent_id, remote=True) if trace.parent_id else None,
            resource=self._resource,
            attributes=attributes(timeline),
            kind=SpanKind.SERVER,
            status=Status(StatusCode.ERROR if failed else StatusCode.UNSET),
            start_time=moment(0.0),
            end_time=moment(timeline.total_s),
            instrumentation_scope=self._scope,
        )
        for phase in timeline.phases():
            yield ReadableSpan(
                phase.name,
                context=context(secrets.token_hex(8)),
                parent=own,
                resource=self._resource,
                attributes={f"penstock.{name}": value for name, value in phase.detail.items()},
                kind=SpanKind.INTERNAL,
                status=Status(StatusCode.UNSET),
                start_time=moment(phase.start),
                end_time=moment(phase.end),
                instrumentation_scope=self._scope,
            )


def operation(route: str) -> str:
    return OPERATIONS.get(route) or route.rpartition("/")[2] or route


def span_name(timeline: Timeline) -> str:
    model = timeline.asked_model
    return f"{operation(timeline.record.route)} {model}" if model else operation(timeline.record.route)


def attributes(timeline: Timeline) -> dict[str, Any]:
    """Span attributes by OpenTelemetry's semantic conventions for generative AI; our own begin with `penstock.`."""
    record = timeline.record
    found: dict[str, Any] = {
        "gen_ai.operation.name": operation(record.route),
        "gen_ai.provider.name": "penstock",
        "gen_ai.request.model": timeline.asked_model,
        "gen_ai.response.model": record.adapter_id or record.model_version,
        "gen_ai.response.id": timeline.response_id,
        "gen_ai.conversation.id": timeline.session,
        "gen_ai.usage.input_tokens": record.prompt_tokens,
        "gen_ai.usage.output_tokens": record.completion_tokens,
        "gen_ai.usage.cache_read.input_tokens": record.cached_tokens,
        "http.request.method": "POST",
        "http.route": record.route,
        "http.response.status_code": record.status,
        "penstock.request_id": record.request_id,
        "penstock.tenant": record.tenant,
        "penstock.user": record.user_id,
        "penstock.ttft_ms": record.ttft_ms,
    }
    if record.reasoning_tokens:
        found["gen_ai.usage.reasoning.output_tokens"] = record.reasoning_tokens
    if record.finish_reason is not None:
        found["gen_ai.response.finish_reasons"] = [record.finish_reason]
    if record.status >= 400 or record.finish_reason == "error":
        found["error.type"] = str(record.status) if record.status >= 400 else "stream"
    if timeline.texts:
        prompts, completions = zip(*timeline.texts, strict=True)
        found["gen_ai.input.messages"] = _messages("user", prompts)
        found["gen_ai.output.messages"] = _messages("assistant", completions)
    return {name: value for name, value in found.items() if value not in (None, "")}


def _messages(role: str, texts: Sequence[str]) -> str:
    messages = [{"role": role, "parts": [{"type": "text", "content": text}]} for text in texts]
    return msgspec.json.encode(messages).decode()
