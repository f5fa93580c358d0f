"""Metrics of the consumer, and the port where Prometheus and probes find them."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Literal

from penstock.errors import ConfigError
from penstock.telemetry.exposition import CONTENT_TYPE, MetricRegistry

Outcome = Literal["inserted", "copy", "dead"]
SECONDS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)


class PipelineMetrics:
    """What the consumer has done, and how far behind it is."""

    def __init__(self) -> None:
        self.registry = MetricRegistry()
        self._entries = self.registry.counter(
            "penstock_log_pipeline_entries_total",
            "Messages consumed: inserted, skipped as copies of entries in the table, or put among the dead letters.",
            ("stream", "outcome"),
        )
        self._lag = self.registry.gauge(
            "penstock_log_pipeline_lag", "Messages of the consumer's partitions that are not in ClickHouse yet.",
            ("topic", "partition"),
        )  # fmt: skip
        self._lag_s = self.registry.gauge(
            "penstock_log_pipeline_lag_seconds",
            "Age of the oldest message that was taken and is not in ClickHouse yet.",
        ).child()
        self.sink_up = self.registry.gauge(
            "penstock_log_pipeline_sink_up", "1 while ClickHouse accepts inserts."
        ).child()
        self.partitions = self.registry.gauge(
            "penstock_log_pipeline_partitions", "Partitions of this consumer."
        ).child()
        self._insert_s = self.registry.histogram(
            "penstock_log_pipeline_insert_seconds", "Time to insert a batch.", SECONDS
        ).child()
        self._rows = self.registry.counter("penstock_log_pipeline_batches_total", "Batches inserted.", ("stream",))
        self._repeated = self.registry.counter(
            "penstock_log_pipeline_repeated_total",
            "Batches repeated that another consumer, or an earlier run, had begun.",
        ).child()

    def counted(self, stream: str, outcome: Outcome, count: int) -> None:
        if count:
            self._entries.child(stream, outcome).inc(count)

    def inserted(self, stream: str, seconds: float, *, repeated: bool) -> None:
        self._rows.child(stream).inc()
        self._insert_s.observe(seconds)
        if repeated:
            self._repeated.inc()

    def lag(self, topic: str, partition: int, messages: int) -> None:
        self._lag.child(topic, str(partition)).set(messages)

    def waiting_since(self, moment: float | None) -> None:
        self._lag_s.set(0 if moment is None else max(0.0, time.time() - moment))


class MetricsServer:
    """`/metrics`, `/health/live` and `/health/ready` on a thread of its own."""

    def __init__(self, metrics: PipelineMetrics, host: str, port: int, ready: Callable[[], str]) -> None:
        """`ready`: why the consumer does not make progress; empty: it does."""

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                status, body, kind = 404, b"not found\n", "text/plain; charset=utf-8"
                if self.path == "/metrics":
                    status, body, kind = 200, metrics.registry.render(), CONTENT_TYPE
                elif self.path == "/health/live":
                    status, body = 200, b"ok\n"
                elif self.path == "/health/ready":
                    problem = ready()
                    status, body = (503, f"{problem}\n".encode()) if problem else (200, b"ok\n")
                self.send_response(status)
                self.send_header("content-type", kind)
                self.send_header("content-length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, format: str, *args: object) -> None:
                return

        try:
            self._server = ThreadingHTTPServer((host, port), Handler)
        except OSError as error:
            raise ConfigError(
                f"log_pipeline.port: cannot listen on {host}:{port}: {error.strerror}; 0: no port"
            ) from error
        self._thread = threading.Thread(target=self._server.serve_forever, name="metrics", daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()
