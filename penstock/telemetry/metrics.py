"""The metrics of a gateway process: engines (`engine_metrics.py`), latencies as clients see them, usage
(`usage_metrics.py`), and the gateway's own as `penstock_*`.

A feature with metrics of its own registers them in `Metrics.registry` when it is built: `counter`, `gauge` and
`histogram` for what it counts, `sampled` for what is read at scrape time. Labels must be bounded. `merge` says how the
values of gateway processes combine: sum for what each counts (the default), max for what all of them see (the default
of `sampled`). docs/operations.md lists every metric.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal

from penstock.telemetry.context_metrics import ContextMetrics
from penstock.telemetry.engine_metrics import ENGINE_LABELS, Engines, EngineView, add_engine_metrics
from penstock.telemetry.exposition import Buckets, MetricRegistry, Value
from penstock.telemetry.usage_metrics import UsageMetrics
from penstock.telemetry.waiting_metrics import WaitingMetrics

__all__ = ["EngineView", "Metrics", "RequestMetrics"]

SECONDS = (0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.0, 3.0, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0)
SHORT = (0.001, 0.0025, 0.005, 0.01, 0.015, 0.02, 0.025, 0.03, 0.04, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.5, 1.0, 2.5)
LONG = (0.05, 0.1, 0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 60.0, 120.0, 240.0, 600.0)
TOKENS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10000, 20000, 50000, 100000, 200000)

CHOICES = (1, 2, 5, 10, 20)

MOST_SERIES = 1000
"""Maximum of separate series by tenant, model, adapter and feature."""


@dataclass(slots=True)
class RequestMetrics:
    """The histogram children of one (model, engine) pair; looked up at most once per request."""

    ttft: Buckets
    itl: Buckets
    per_token: Buckets
    e2e: Buckets
    queue: Buckets
    prefill: Buckets
    decode: Buckets
    prompt_tokens: Buckets
    generation_tokens: Buckets
    inference: Buckets
    computed_tokens: Buckets
    most_generation_tokens: Buckets
    n: Buckets
    max_tokens: Buckets


class Metrics:
    """Every metric of one gateway process."""

    def __init__(self, engines: Engines, most_series: int = MOST_SERIES) -> None:
        self.registry = registry = MetricRegistry()
        self._requests: dict[tuple[str, str], RequestMetrics] = {}
        add_engine_metrics(registry, engines)
        self.waiting = WaitingMetrics(registry, engines)

        def histogram(name: str, help: str, bounds: tuple[float, ...]) -> Callable[[str, str], Buckets]:
            return registry.histogram(name, help, bounds, ENGINE_LABELS).child

        self._histograms = (
            histogram("vllm:time_to_first_token_seconds", "Time to the first token.", SECONDS),
            histogram("vllm:inter_token_latency_seconds", "Time between tokens.", SHORT),
            histogram("vllm:request_time_per_output_token_seconds", "Mean time per output token.", SHORT),
            histogram("vllm:e2e_request_latency_seconds", "Time from arrival to the last token.", LONG),
            histogram("vllm:request_queue_time_seconds", "Time waiting in the engine.", LONG),
            histogram("vllm:request_prefill_time_seconds", "Time computing the prompt.", LONG),
            histogram("vllm:request_decode_time_seconds", "Time from first to last token.", LONG),
            histogram("vllm:request_prompt_tokens", "Prompt tokens per request.", TOKENS),
            histogram("vllm:request_generation_tokens", "Generated tokens per request.", TOKENS),
            histogram("vllm:request_inference_time_seconds", "Time from the first step to the last token.", LONG),
            histogram("vllm:request_prefill_kv_computed_tokens", "Prompt tokens computed per request.", TOKENS),
            histogram("vllm:request_max_num_generation_tokens", "Tokens of a request's longest answer.", TOKENS),
            histogram("vllm:request_params_n", "The parameter n.", CHOICES),
            histogram("vllm:request_params_max_tokens", "The most tokens that a request may generate.", TOKENS),
        )
        self._success = registry.counter(
            "vllm:request_success_total", "Finished requests.", (*ENGINE_LABELS, "finished_reason")
        )
        self._http = registry.counter(
            "penstock_http_requests_total", "Requests answered.", ("route", "method", "status")
        )
        self._http_seconds = registry.histogram(
            "penstock_http_request_duration_seconds", "Time to answer a request.", LONG, ("route",)
        )
        self._in_flight = registry.gauge("penstock_http_requests_in_flight", "Requests being answered.", ("route",))
        self.disconnects = registry.counter(
            "penstock_client_disconnects_total", "Requests whose client disconnected before the end."
        ).child()
        self.stalled_readers = registry.counter(
            "penstock_stalled_readers_total", "Streams closed because the client did not read."
        ).child()
        self.usage = UsageMetrics(registry, most_series)
        self._errors = registry.counter(
            "penstock_errors_total",
            "Failed requests, including those whose stream had started.",
            ("route", "status", "code"),
        )
        self._rejections = registry.counter(
            "penstock_rejections_total", "Requests refused for lack of capacity.", ("reason",)
        )
        self._fallbacks = registry.counter(
            "penstock_fallbacks_total", "Requests sent to a fallback model.", ("model_name", "to", "code")
        )
        self._grammars = registry.counter(
            "penstock_grammars_total", "Requests with a grammar, by outcome.", ("outcome",)
        )
        self.context = ContextMetrics(registry)
        self._guardrails = registry.counter(
            "penstock_guardrails_total", "Texts refused or redacted by a guardrail.", ("rule", "stage", "action")
        )
        written, spooled, lost = (
            registry.counter(f"penstock_request_log_{name}_total", f"Request log: {help}").child()
            for name, help in (
                ("written", "entries written to the sink."),
                ("spooled", "entries spooled to disk first."),
                ("lost", "entries dropped because queue and spool were full."),
            )
        )
        self.request_log_written, self.request_log_spooled, self.request_log_lost = written, spooled, lost
        self.draining = registry.gauge("penstock_draining", "1 while shutting down.", merge="max").child()
        registry.gauge("penstock_gateway_workers", "Gateway processes on this port.").child().set(1)
        started = registry.gauge("process_start_time_seconds", "Start of the process, seconds since 1970.", merge="max")
        started.child().set(time.time())
        registry.sampled(
            "gauge",
            "process_resident_memory_bytes",
            "Memory of the gateway processes.",
            (),
            lambda: [((), _resident_bytes())],
            merge="sum",
        )
        registry.sampled(
            "counter",
            "process_cpu_seconds_total",
            "CPU time of the gateway processes.",
            (),
            lambda: [((), time.process_time())],
            merge="sum",
        )

    def requests(self) -> Mapping[tuple[str, str], RequestMetrics]:
        """By model and engine."""
        return self._requests

    def request(self, model: str, engine: str) -> RequestMetrics:
        found = self._requests.get((model, engine))
        if found is None:
            found = RequestMetrics(*(child(model, engine) for child in self._histograms))
            self._requests[model, engine] = found
        return found

    def finished(self, model: str, engine: str, reason: str) -> None:
        self._success.child(model, engine, reason).inc()

    def answered(self, route: str, method: str, status: int, seconds: float) -> None:
        self._http.child(route, method, str(status)).inc()
        self._http_seconds.child(route).observe(seconds)

    def in_flight(self, route: str) -> Value:
        return self._in_flight.child(route)

    def failed(self, route: str, status: int, code: str) -> None:
        self._errors.child(route, str(status), code).inc()

    def rejected(self, reason: str) -> None:
        self._rejections.child(reason).inc()

    def fell_back(self, model: str, to: str, why: str) -> None:
        self._fallbacks.child(model, to, why).inc()

    def grammar(self, outcome: Literal["known", "compiled", "refused"]) -> None:
        self._grammars.child(outcome).inc()

    def guardrail(self, rule: str, stage: Literal["input", "output"], action: str, times: int = 1) -> None:
        self._guardrails.child(rule, stage, action).inc(times)

    def render(self, openmetrics: bool = False) -> bytes:
        return self.registry.render(openmetrics)


_PAGE = os.sysconf("SC_PAGE_SIZE") if hasattr(os, "sysconf") else 4096


def _resident_bytes() -> int:
    """Resident memory; 0 on systems without /proc."""
    try:
        with open("/proc/self/statm", "rb") as file:
            return int(file.read().split()[1]) * _PAGE
    except OSError:
        return 0
