"""The dashboard of one engine: batch, phases, KV cache, speculation, device."""

from __future__ import annotations

from panels import KV, RATE, Board, M, Panel, quantiles, rate, ratio

DRAFT = "vllm:spec_decode"

ENGINE = Board(
    "penstock-engine",
    "Penstock / Engine",
    "Batch, phases, KV cache, speculation and device of each engine.",
    [
        (
            "Batch",
            8,
            [
                Panel(
                    "Running",
                    "Sequences in the running batch.",
                    {"{{model_name}} {{engine}}": f"vllm:num_requests_running{{{M}}}"},
                ),
                Panel(
                    "Waiting in the engine",
                    "Sequences without a row or KV blocks yet.",
                    {"{{model_name}} {{engine}}": f"penstock_engine_requests_waiting{{{M}}}"},
                ),
                Panel(
                    "Steps",
                    "Forward passes per second.",
                    {"{{model_name}} {{engine}}": rate("penstock_engine_steps_total", "model_name, engine")},
                ),
                Panel(
                    "Tokens per step",
                    "Generated tokens per forward pass: the effect of batching and speculation.",
                    {
                        "{{model_name}} {{engine}}": ratio(
                            "vllm:generation_tokens_total",
                            "penstock_engine_steps_total",
                            "model_name, engine",
                        )
                    },
                ),
            ],
        ),
        (
            "Phases",
            8,
            [
                Panel(
                    "Queue",
                    "From arrival in the engine to the first step, by the engine's clock.",
                    quantiles("vllm:request_queue_time_seconds", 0.5, 0.95),
                    "s",
                ),
                Panel(
                    "Prefill",
                    "From the first step to the first token.",
                    quantiles("vllm:request_prefill_time_seconds", 0.5, 0.95),
                    "s",
                ),
                Panel(
                    "Decode",
                    "From the first token to the last.",
                    quantiles("vllm:request_decode_time_seconds", 0.5, 0.95),
                    "s",
                ),
                Panel(
                    "Time per output token",
                    "Mean over each answer.",
                    quantiles("vllm:request_time_per_output_token_seconds", 0.5, 0.95),
                    "s",
                ),
            ],
        ),
        (
            "Lengths",
            7,
            [
                Panel("Prompt tokens", "Per request.", quantiles("vllm:request_prompt_tokens", 0.5, 0.95)),
                Panel("Generated tokens", "Per request.", quantiles("vllm:request_generation_tokens", 0.5, 0.95)),
                Panel(
                    "Finished",
                    "Finish reasons; `length` is the token limit, `timeout` the time limit.",
                    {"{{finished_reason}}": rate("vllm:request_success_total", "finished_reason")},
                    stack=True,
                ),
            ],
        ),
        (
            "KV cache",
            8,
            [
                Panel(
                    "KV cache used",
                    "Share of blocks held by running sequences.",
                    {"{{model_name}} {{engine}}": f"{KV}{{{M}}}"},
                    "percentunit",
                    limit=0.9,
                ),
                Panel(
                    "KV blocks",
                    "Used: held by sequences. Cached: free, with a reusable prefix.",
                    {
                        "used {{model_name}} {{engine}}": f"penstock_kv_blocks_used{{{M}}}",
                        "cached {{model_name}} {{engine}}": f"penstock_kv_blocks_cached{{{M}}}",
                        "total {{model_name}} {{engine}}": f"penstock_kv_blocks{{{M}}}",
                    },
                ),
                Panel(
                    "Prefix cache hit rate",
                    "Share of prompt tokens found in the prefix cache.",
                    {
                        "{{model_name}}": ratio(
                            "vllm:prefix_cache_hits_total",
                            "vllm:prefix_cache_queries_total",
                            "model_name",
                        )
                    },
                    "percentunit",
                ),
                Panel(
                    "Preemptions",
                    "Sequences that lost their blocks and are recomputed: too little memory for the load.",
                    {"{{model_name}} {{engine}}": rate("vllm:num_preemptions_total", "model_name, engine")},
                ),
            ],
        ),
        (
            "Host tier and speculation",
            7,
            [
                Panel(
                    "Host tier",
                    "KV blocks in host memory.",
                    {
                        "used {{engine}}": f"penstock_kv_host_blocks_used{{{M}}}",
                        "total {{engine}}": f"penstock_kv_host_blocks{{{M}}}",
                    },
                ),
                Panel(
                    "Offloaded and restored",
                    "KV blocks copied to host memory and back, and prompt tokens found there, per second.",
                    {
                        "offloaded": rate("penstock_kv_blocks_offloaded_total"),
                        "restored": rate("penstock_kv_blocks_restored_total"),
                        "hit tokens": rate("penstock_kv_host_hit_tokens_total"),
                    },
                ),
                Panel(
                    "Draft acceptance rate",
                    "Share of draft tokens that were accepted.",
                    {
                        "{{model_name}}": ratio(
                            f"{DRAFT}_num_accepted_tokens_total",
                            f"{DRAFT}_num_draft_tokens_total",
                            "model_name",
                        )
                    },
                    "percentunit",
                ),
                Panel(
                    "Draft tokens",
                    "Verifications and draft tokens per second.",
                    {
                        "drafts": rate(f"{DRAFT}_num_drafts_total"),
                        "tokens": rate(f"{DRAFT}_num_draft_tokens_total"),
                    },
                ),
            ],
        ),
        (
            "Prefill/decode disaggregation",
            7,
            [
                Panel(
                    "Handovers",
                    "Prompts computed by a prefill engine, failed handovers (the decode engine computed the prompt "
                    "itself), and handovers in progress.",
                    {
                        "handed over {{engine}}": rate("penstock_handovers_total", "engine"),
                        "fallbacks {{engine}}": rate("penstock_handover_fallbacks_total", "engine"),
                        "in progress {{engine}}": f"penstock_handover_waiting{{{M}}}",
                    },
                ),
                Panel(
                    "KV transfer",
                    "Bytes of KV blocks sent and received per second.",
                    {
                        "sent {{engine}}": rate("penstock_handover_bytes_sent_total", "engine"),
                        "received {{engine}}": rate("penstock_handover_bytes_received_total", "engine"),
                    },
                    "Bps",
                ),
                Panel(
                    "Handover duration",
                    "From the request to the last block, including the computation.",
                    {"{{engine}}": ratio("penstock_handover_seconds_total", "penstock_handovers_total", "engine")},
                    "s",
                ),
            ],
        ),
        (
            "Adapters",
            7,
            [
                Panel(
                    "Adapters in memory",
                    "On the device (slots) and on the host.",
                    {
                        "device {{engine}}": f"penstock_adapter_on_device{{{M}}}",
                        "slots {{engine}}": f"penstock_adapter_slots{{{M}}}",
                        "host {{engine}}": f"penstock_adapter_on_host{{{M}}}",
                        "loading {{engine}}": f"penstock_adapter_loading{{{M}}}",
                    },
                ),
                Panel(
                    "Adapter loads",
                    "As many evictions as loads mean that there are too few slots.",
                    {
                        "loaded": rate("penstock_adapter_loads_total"),
                        "failed": rate("penstock_adapter_load_failures_total"),
                        "copied to device": rate("penstock_adapter_copies_total"),
                        "evicted from device": rate("penstock_adapter_evictions_total"),
                        "evicted from host": rate("penstock_adapter_host_evictions_total"),
                    },
                ),
                Panel(
                    "Adapter load time",
                    "Mean time to load an adapter.",
                    {"seconds": ratio("penstock_adapter_load_seconds_total", "penstock_adapter_loads_total")},
                    "s",
                ),
            ],
        ),
        (
            "Device",
            7,
            [
                Panel(
                    "GPU utilisation",
                    "Share of time in which a kernel ran. Low while requests wait: the host is the bottleneck.",
                    {"{{model_name}} {{engine}} gpu {{gpu}}": f"penstock_gpu_utilization_ratio{{{M}}}"},
                    "percentunit",
                    limit=0.5,
                    below=True,
                ),
                Panel(
                    "GPU memory",
                    "As reported by the driver.",
                    {
                        "used {{engine}} gpu {{gpu}}": f"penstock_gpu_memory_used_bytes{{{M}}}",
                        "total {{engine}} gpu {{gpu}}": f"penstock_gpu_memory_total_bytes{{{M}}}",
                    },
                    "bytes",
                ),
                Panel(
                    "Engines",
                    "Up: 1 while the engine accepts requests. Awake: 1 while it is not asleep.",
                    {
                        "up {{model_name}} {{engine}}": f"penstock_engine_up{{{M}}}",
                        "awake {{model_name}} {{engine}}": f"penstock_engine_awake{{{M}}}",
                    },
                ),
                Panel(
                    "Gateway CPU",
                    "Cores used by the gateway processes; near one per worker, the gateway is the bottleneck.",
                    {"cores": f"rate(process_cpu_seconds_total[{RATE}])"},
                ),
                Panel(
                    "Gateway memory",
                    "Sum over the gateway processes.",
                    {"resident": "process_resident_memory_bytes"},
                    "bytes",
                ),
            ],
        ),
    ],
)
