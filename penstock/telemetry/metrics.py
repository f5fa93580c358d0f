"""What is measured: engine metrics under the names autoscalers already scrape, gateway metrics as `penstock_*`.

Counters of the engine come from its newest load snapshot, so they start again from zero when it restarts, as
Prometheus expects; latencies are what the gateway's clients saw.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Literal

from penstock.engine.request import EngineInfo, Load
from penstock.telemetry.adapter_metrics import add_adapter_samples
from penstock.telemetry.exposition import Buckets, Registry, Value

SECONDS = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0)
SHORT = (0.001, 0.0025, 0.005, 0.01, 0.015, 0.02, 0.025, 0.03, 0.04, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.5, 1.0, 2.5)
LONG = (0.05, 0.1, 0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 60.0, 120.0, 240.0, 600.0)
TOKENS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10000, 20000, 50000, 100000, 200000)

ENGINE_LABELS = ("model_name", "engine")


@dataclass(frozen=True, slots=True)
class EngineView:
    """One engine as the metrics see it."""

    model: str
    engine: str
    ready: bool
    info: EngineInfo | None
    load: Load
    awake: bool = True


@dataclass(slots=True)
class RequestMetrics:
    """The children one (model, engine) pair observes into; looked up once per request at most."""

    ttft: Buckets
    itl: Buckets
    per_token: Buckets
    e2e: Buckets
    queue: Buckets
    prefill: Buckets
    decode: Buckets
    prompt_tokens: Buckets
    generation_tokens: Buckets


class Metrics:
    """Every metric of one gateway process."""

    def __init__(self, engines: Callable[[], Iterable[EngineView]]) -> None:
        self.registry = registry = Registry()
        self._engines = engines
        self._requests: dict[tuple[str, str], RequestMetrics] = {}
        self._add_engine_samples(registry)

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
            "penstock_client_disconnects_total", "Requests whose client left before the end."
        ).child()
        self.stalled_readers = registry.counter(
            "penstock_stalled_readers_total", "Streams closed because the client did not read."
        ).child()
        self._rejections = registry.counter(
            "penstock_rejections_total", "Requests refused for lack of capacity.", ("reason",)
        )
        self._grammars = registry.counter(
            "penstock_grammars_total", "Requests with a grammar, by what became of it.", ("outcome",)
        )
        self._guardrails = registry.counter(
            "penstock_guardrails_total", "Text that a guardrail refused or redacted.", ("rule", "stage", "action")
        )
        written, spooled, lost = (
            registry.counter(f"penstock_request_log_{name}_total", f"Request log: {help}").child()
            for name, help in (
                ("written", "records the sink has."),
                ("spooled", "records that went to the disk first."),
                ("lost", "records that fitted nowhere."),
            )
        )
        self.request_log_written, self.request_log_spooled, self.request_log_lost = written, spooled, lost
        self.draining = registry.gauge("penstock_draining", "1 while shutting down.").child()
        started = registry.gauge("process_start_time_seconds", "Start of the process, seconds since 1970.").child()
        started.set(time.time())
        registry.sampled(
            "gauge", "process_resident_memory_bytes", "Memory of this process.", (), lambda: [((), _resident_bytes())]
        )
        registry.sampled(
            "counter", "process_cpu_seconds_total", "CPU time of this process.", (), lambda: [((), time.process_time())]
        )

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

    def rejected(self, reason: str) -> None:
        self._rejections.child(reason).inc()

    def grammar(self, outcome: Literal["known", "compiled", "refused"]) -> None:
        self._grammars.child(outcome).inc()

    def guardrail(self, rule: str, stage: Literal["input", "output"], action: str, times: int = 1) -> None:
        self._guardrails.child(rule, stage, action).inc(times)

    def render(self) -> bytes:
        return self.registry.render()

    def _add_engine_samples(self, registry: Registry) -> None:
        def add(kind: str, name: str, help: str, value: Callable[[Load], float]) -> None:
            registry.sampled(
                kind,
                name,
                help,
                ENGINE_LABELS,
                lambda: [((view.model, view.engine), value(view.load)) for view in self._engines()],
            )

        add("gauge", "vllm:num_requests_running", "Requests in the running batch.", lambda load: load.running)
        add("gauge", "vllm:num_requests_waiting", "Requests waiting in the engine.", lambda load: load.waiting)
        add("gauge", "vllm:kv_cache_usage_perc", "Used share of the KV cache, 0 to 1.", _usage)
        add(
            "counter",
            "vllm:prefix_cache_queries_total",
            "Prompt tokens looked up in the prefix cache.",
            lambda load: load.prefix_query_tokens,
        )
        add(
            "counter",
            "vllm:prefix_cache_hits_total",
            "Prompt tokens found in the prefix cache.",
            lambda load: load.prefix_hit_tokens,
        )
        add("counter", "vllm:prompt_tokens_total", "Prompt tokens processed.", lambda load: load.prompt_tokens)
        add("counter", "vllm:generation_tokens_total", "Tokens generated.", lambda load: load.generation_tokens)
        add("counter", "vllm:num_preemptions_total", "Sequences preempted.", lambda load: load.preemptions)
        for name, help, value in _SPECULATION:
            add("counter", f"vllm:spec_decode_num_{name}_total", help, value)
        add_adapter_samples(registry, ENGINE_LABELS, lambda: self._engines())
        add("gauge", "penstock_kv_blocks_used", "KV blocks held by sequences.", lambda load: load.used_blocks)
        add(
            "gauge",
            "penstock_kv_blocks_cached",
            "Free KV blocks with a reusable prefix.",
            lambda load: load.cached_blocks,
        )
        add("gauge", "penstock_kv_blocks", "KV blocks in all.", lambda load: load.total_blocks)
        add("gauge", "penstock_kv_host_blocks_used", "KV blocks in host memory.", lambda load: load.host_blocks)
        add(
            "gauge", "penstock_kv_host_blocks", "KV blocks that host memory holds.", lambda load: load.total_host_blocks
        )
        add(
            "counter",
            "penstock_kv_blocks_offloaded_total",
            "KV blocks copied to host memory.",
            lambda load: load.offloaded_blocks,
        )
        add(
            "counter",
            "penstock_kv_blocks_restored_total",
            "KV blocks copied back from host memory.",
            lambda load: load.restored_blocks,
        )
        add(
            "counter",
            "penstock_kv_host_hit_tokens_total",
            "Prompt tokens found in host memory.",
            lambda load: load.host_hit_tokens,
        )
        add("counter", "penstock_engine_steps_total", "Engine steps.", lambda load: load.steps)
        registry.sampled(
            "gauge",
            "penstock_engine_up",
            "1 when the engine takes requests.",
            ENGINE_LABELS,
            lambda: [((view.model, view.engine), int(view.ready)) for view in self._engines()],
        )
        registry.sampled(
            "gauge",
            "penstock_engine_awake",
            "1 when the engine holds its weights, 0 while it sleeps.",
            ENGINE_LABELS,
            lambda: [((view.model, view.engine), int(view.ready and view.awake)) for view in self._engines()],
        )
        registry.sampled(
            "gauge",
            "vllm:cache_config_info",
            "Layout of the KV cache.",
            (*ENGINE_LABELS, "block_size", "num_gpu_blocks"),
            lambda: [
                ((view.model, view.engine, str(view.info.block_size), str(view.info.num_blocks)), 1)
                for view in self._engines()
                if view.info is not None
            ],
        )


_SPECULATION: tuple[tuple[str, str, Callable[[Load], float]], ...] = (
    ("drafts", "Times that guessed tokens of a sequence were verified.", lambda load: load.drafts),
    ("draft_tokens", "Tokens guessed and verified.", lambda load: load.draft_tokens),
    ("accepted_tokens", "Guessed tokens that held.", lambda load: load.accepted_tokens),
)


def _usage(load: Load) -> float:
    return load.used_blocks / load.total_blocks if load.total_blocks else 0.0


_PAGE = os.sysconf("SC_PAGE_SIZE") if hasattr(os, "sysconf") else 4096


def _resident_bytes() -> int:
    """0 where the system does not tell (no /proc)."""
    try:
        with open("/proc/self/statm", "rb") as file:
            return int(file.read().split()[1]) * _PAGE
    except OSError:
        return 0
