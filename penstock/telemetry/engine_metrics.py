"""Metrics that engines report, under the vLLM names that autoscalers already scrape.

Everything is read from an engine's newest load snapshot at scrape time, so nothing is counted twice, and a counter
starts from zero when its engine restarts, as Prometheus expects. Several gateway processes see the same engines, so
their values are merged by maximum, not by sum.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from penstock.engine.request import DeviceLoad, EngineInfo, EngineLoad
from penstock.telemetry.adapter_metrics import add_adapter_samples
from penstock.telemetry.exposition import Buckets, MetricRegistry
from penstock.telemetry.handover_metrics import add_handover_samples

ENGINE_LABELS = ("model_name", "engine")


@dataclass(frozen=True, slots=True)
class EngineView:
    """One engine as the metrics see it."""

    model: str
    engine: str
    ready: bool
    info: EngineInfo | None
    load: EngineLoad
    awake: bool = True
    cost_per_hour: float = 0.0
    """Hardware cost in dollars."""
    step_tokens: Buckets | None = None
    """How many tokens its steps computed."""


Engines = Callable[[], Iterable[EngineView]]

_LOADS: tuple[tuple[str, str, str, Callable[[EngineLoad], float]], ...] = (
    ("gauge", "vllm:num_requests_running", "Requests in the running batch.", lambda load: load.running),
    ("gauge", "penstock_engine_requests_waiting", "Requests waiting in the engine.", lambda load: load.waiting),
    ("gauge", "vllm:kv_cache_usage_perc", "Used share of the KV cache, 0 to 1.", lambda load: _usage(load)),
    (
        "counter",
        "vllm:prefix_cache_queries_total",
        "Prompt tokens looked up in the prefix cache.",
        lambda load: load.prefix_query_tokens,
    ),
    (
        "counter",
        "vllm:prefix_cache_hits_total",
        "Prompt tokens found in the prefix cache.",
        lambda load: load.prefix_hit_tokens,
    ),
    ("counter", "vllm:prompt_tokens_total", "Prompt tokens processed.", lambda load: load.prompt_tokens),
    (
        "counter",
        "vllm:prompt_tokens_cached_total",
        "Prompt tokens that need not be computed.",
        lambda load: load.prefix_hit_tokens,
    ),
    ("counter", "vllm:generation_tokens_total", "Tokens generated.", lambda load: load.generation_tokens),
    ("counter", "vllm:num_preemptions_total", "Sequences preempted.", lambda load: load.preemptions),
    (
        "counter",
        "vllm:spec_decode_num_drafts_total",
        "Verifications of draft tokens.",
        lambda load: load.drafts,
    ),
    (
        "counter",
        "vllm:spec_decode_num_draft_tokens_total",
        "Draft tokens verified.",
        lambda load: load.draft_tokens,
    ),
    (
        "counter",
        "vllm:spec_decode_num_accepted_tokens_total",
        "Draft tokens accepted.",
        lambda load: load.accepted_tokens,
    ),
    ("gauge", "penstock_kv_blocks_used", "KV blocks held by sequences.", lambda load: load.used_blocks),
    ("gauge", "penstock_kv_blocks_cached", "Free KV blocks with a reusable prefix.", lambda load: load.cached_blocks),
    ("gauge", "penstock_kv_blocks", "KV blocks in total.", lambda load: load.total_blocks),
    ("gauge", "penstock_kv_host_blocks_used", "KV blocks in host memory.", lambda load: load.host_blocks),
    (
        "gauge",
        "penstock_kv_host_blocks",
        "Capacity of the host tier in KV blocks.",
        lambda load: load.total_host_blocks,
    ),
    (
        "counter",
        "penstock_kv_blocks_offloaded_total",
        "KV blocks copied to host memory.",
        lambda load: load.offloaded_blocks,
    ),
    (
        "counter",
        "penstock_kv_blocks_restored_total",
        "KV blocks copied back from host memory.",
        lambda load: load.restored_blocks,
    ),
    (
        "counter",
        "penstock_kv_host_hit_tokens_total",
        "Prompt tokens found in host memory.",
        lambda load: load.host_hit_tokens,
    ),
    ("gauge", "penstock_kv_disk_blocks_used", "KV blocks on disk.", lambda load: load.disk_blocks),
    (
        "gauge",
        "penstock_kv_disk_blocks",
        "Capacity of the disk tier in KV blocks.",
        lambda load: load.total_disk_blocks,
    ),
    (
        "counter",
        "penstock_kv_disk_blocks_written_total",
        "KV blocks written to disk.",
        lambda load: load.disk_written_blocks,
    ),
    (
        "counter",
        "penstock_kv_disk_blocks_read_total",
        "KV blocks read back from disk.",
        lambda load: load.disk_read_blocks,
    ),
    (
        "counter",
        "penstock_kv_disk_hit_tokens_total",
        "Prompt tokens found on disk.",
        lambda load: load.disk_hit_tokens,
    ),
    (
        "gauge",
        "penstock_kv_disk_blocks_restored",
        "KV blocks on disk that the engine found there when it started.",
        lambda load: load.disk_restored_blocks,
    ),
    (
        "gauge",
        "penstock_kv_disk_states_restored",
        "Recurrent states on disk that the engine found there when it started.",
        lambda load: load.disk_restored_states,
    ),
    ("gauge", "penstock_kv_disk_states_used", "Recurrent states on disk.", lambda load: load.disk_states),
    (
        "gauge",
        "penstock_kv_disk_states",
        "Capacity of the disk tier in recurrent states.",
        lambda load: load.total_disk_states,
    ),
    (
        "counter",
        "penstock_kv_disk_states_written_total",
        "Recurrent states written to disk.",
        lambda load: load.disk_written_states,
    ),
    (
        "counter",
        "penstock_kv_disk_states_read_total",
        "Recurrent states read back from disk.",
        lambda load: load.disk_read_states,
    ),
    (
        "counter",
        "penstock_kv_disk_failures_total",
        "KV blocks and recurrent states that could not be written to disk or read from it.",
        lambda load: load.disk_failures,
    ),
    (
        "gauge",
        "penstock_kv_restoring",
        "Requests that wait for KV blocks from host memory or from disk.",
        lambda load: load.restoring,
    ),
    (
        "counter",
        "penstock_kv_host_restores_total",
        "Times that a request waited for KV blocks from host memory.",
        lambda load: load.host_restores,
    ),
    (
        "counter",
        "penstock_kv_host_restore_seconds_total",
        "Seconds that requests waited for KV blocks from host memory.",
        lambda load: load.host_restore_s,
    ),
    (
        "counter",
        "penstock_kv_disk_restores_total",
        "Times that a request waited for KV blocks from disk.",
        lambda load: load.disk_restores,
    ),
    (
        "counter",
        "penstock_kv_disk_restore_seconds_total",
        "Seconds that requests waited for KV blocks from disk.",
        lambda load: load.disk_restore_s,
    ),
    ("counter", "penstock_engine_steps_total", "Engine steps.", lambda load: load.steps),
)

_VIEWS: tuple[tuple[str, str, Callable[[EngineView], float]], ...] = (
    ("penstock_engine_up", "1 when the engine accepts requests.", lambda view: int(view.ready)),
    (
        "penstock_engine_awake",
        "1 when the engine is awake, 0 while it sleeps.",
        lambda view: int(view.ready and view.awake),
    ),
    (
        "penstock_engine_cost_dollars_per_second",
        "Cost of the engine's hardware, busy or idle.",
        lambda view: view.cost_per_hour / 3600,
    ),
)

_DEVICES: tuple[tuple[str, str, Callable[[DeviceLoad], float]], ...] = (
    ("penstock_gpu_memory_used_bytes", "Used memory of a GPU.", lambda device: device.memory_used),
    ("penstock_gpu_memory_total_bytes", "Memory of a GPU.", lambda device: device.memory_total),
    ("penstock_gpu_utilization_ratio", "GPU utilization, 0 to 1.", lambda device: device.busy),
)


def add_engine_metrics(registry: MetricRegistry, engines: Engines) -> None:
    engines = registry.once(engines)

    def loads(kind: str, name: str, help: str, value: Callable[[EngineLoad], float]) -> None:
        registry.sampled(
            kind,
            name,
            help,
            ENGINE_LABELS,
            lambda: [((view.model, view.engine), value(view.load)) for view in engines()],
        )

    def views(name: str, help: str, value: Callable[[EngineView], float]) -> None:
        registry.sampled(
            "gauge",
            name,
            help,
            ENGINE_LABELS,
            lambda: [((view.model, view.engine), value(view)) for view in engines()],
        )

    def devices(name: str, help: str, value: Callable[[DeviceLoad], float]) -> None:
        registry.sampled(
            "gauge",
            name,
            help,
            (*ENGINE_LABELS, "gpu"),
            lambda: [
                ((view.model, view.engine, str(device.index)), value(device))
                for view in engines()
                for device in view.load.devices or ()
            ],
        )

    for load in _LOADS:
        loads(*load)
    registry.sampled(
        "gauge",
        "penstock_expert_imbalance",
        "Load of the most loaded device over the mean, in the worst layer of experts spread over devices.",
        ENGINE_LABELS,
        lambda: [
            ((view.model, view.engine), view.load.expert_imbalance) for view in engines() if view.load.expert_imbalance
        ],
    )
    for view in _VIEWS:
        views(*view)
    for device in _DEVICES:
        devices(*device)
    add_adapter_samples(registry, ENGINE_LABELS, engines)
    add_handover_samples(registry, ENGINE_LABELS, engines)
    registry.sampled_buckets(
        "vllm:iteration_tokens_total",
        "Tokens computed per engine step.",
        ENGINE_LABELS,
        lambda: [((view.model, view.engine), view.step_tokens) for view in engines() if view.step_tokens is not None],
    )
    registry.sampled(
        "counter",
        "vllm:prompt_tokens_by_source_total",
        "Prompt tokens by where their keys and values came from.",
        (*ENGINE_LABELS, "source"),
        lambda: [
            ((view.model, view.engine, source), value)
            for view in engines()
            for source, value in (
                ("local_compute", max(view.load.prompt_tokens - view.load.prefix_hit_tokens, 0)),
                ("local_cache_hit", view.load.prefix_hit_tokens),
            )
        ],
    )
    registry.sampled(
        "gauge",
        "vllm:engine_sleep_state",
        "1 for the state that an engine is in.",
        (*ENGINE_LABELS, "sleep_state"),
        lambda: [
            ((view.model, view.engine, state), value)
            for view in engines()
            for state, value in (("awake", int(view.awake)), ("weights_offloaded", int(not view.awake)))
        ],
    )
    registry.sampled(
        "gauge",
        "vllm:cache_config_info",
        "Layout of the KV cache.",
        (*ENGINE_LABELS, "block_size", "num_gpu_blocks"),
        lambda: [
            ((view.model, view.engine, str(view.info.block_size), str(view.info.num_blocks)), 1)
            for view in engines()
            if view.info is not None
        ],
    )


def _usage(load: EngineLoad) -> float:
    return load.used_blocks / load.total_blocks if load.total_blocks else 0.0
