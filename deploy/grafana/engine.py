"""Steps, memory, device."""

from __future__ import annotations

from panels import KV, RATE, Board, M, Panel, quantiles, rate, ratio

DRAFT = "vllm:spec_decode"

ENGINE = Board(
    "penstock-engine",
    "Penstock / Engine",
    "What each engine does with its steps, its memory and its device.",
    [
        (
            "Batch",
            8,
            [
                Panel(
                    "Running",
                    "Sequences in the batch.",
                    {"{{model_name}} {{engine}}": f"vllm:num_requests_running{{{M}}}"},
                ),
                Panel(
                    "Waiting in the engine",
                    "Sequences that have no row or no blocks yet.",
                    {"{{model_name}} {{engine}}": f"vllm:num_requests_waiting{{{M}}}"},
                ),
                Panel(
                    "Steps",
                    "Forward passes per second.",
                    {"{{model_name}} {{engine}}": rate("penstock_engine_steps_total", "model_name, engine")},
                ),
                Panel(
                    "Tokens per step",
                    "Generated per forward pass: how well batching and speculation pay.",
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
                    "From arrival in the engine to the first step, by its clock.",
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
                    "Time per token",
                    "Of whole answers.",
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
                    "Why answers end; `length` is a limit, `timeout` the time limit.",
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
                    "In use",
                    "Share of the blocks that running sequences hold.",
                    {"{{model_name}} {{engine}}": f"{KV}{{{M}}}"},
                    "percentunit",
                    limit=0.9,
                ),
                Panel(
                    "Blocks",
                    "Held by sequences; free but still holding a prefix.",
                    {
                        "used {{model_name}} {{engine}}": f"penstock_kv_blocks_used{{{M}}}",
                        "cached {{model_name}} {{engine}}": f"penstock_kv_blocks_cached{{{M}}}",
                        "all {{model_name}} {{engine}}": f"penstock_kv_blocks{{{M}}}",
                    },
                ),
                Panel(
                    "Prefix hits",
                    "Share of prompt tokens that were found in the cache.",
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
                    "Sequences that lost their blocks and are computed again: too little memory for the load.",
                    {"{{model_name}} {{engine}}": rate("vllm:num_preemptions_total", "model_name, engine")},
                ),
            ],
        ),
        (
            "Host memory and speculation",
            7,
            [
                Panel(
                    "Host tier",
                    "KV blocks in host memory.",
                    {
                        "used {{engine}}": f"penstock_kv_host_blocks_used{{{M}}}",
                        "all {{engine}}": f"penstock_kv_host_blocks{{{M}}}",
                    },
                ),
                Panel(
                    "Moved",
                    "Blocks copied out and back per second.",
                    {
                        "out": rate("penstock_kv_blocks_offloaded_total"),
                        "back": rate("penstock_kv_blocks_restored_total"),
                        "tokens found": rate("penstock_kv_host_hit_tokens_total"),
                    },
                ),
                Panel(
                    "Guesses that held",
                    "Share of speculated tokens that were right.",
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
                    "Guessed",
                    "Times and tokens per second.",
                    {
                        "drafts": rate(f"{DRAFT}_num_drafts_total"),
                        "tokens": rate(f"{DRAFT}_num_draft_tokens_total"),
                    },
                ),
            ],
        ),
        (
            "Prompts computed elsewhere",
            7,
            [
                Panel(
                    "Handed over",
                    "Prompts computed by a prefill engine, by the decode engine after all, and those on the way.",
                    {
                        "handed over {{engine}}": rate("penstock_handovers_total", "engine"),
                        "computed here {{engine}}": rate("penstock_handover_fallbacks_total", "engine"),
                        "on the way {{engine}}": f"penstock_handover_waiting{{{M}}}",
                    },
                ),
                Panel(
                    "Blocks on the way",
                    "Bytes of KV blocks sent and received per second.",
                    {
                        "sent {{engine}}": rate("penstock_handover_bytes_sent_total", "engine"),
                        "received {{engine}}": rate("penstock_handover_bytes_received_total", "engine"),
                    },
                    "Bps",
                ),
                Panel(
                    "Time of a handover",
                    "From asking to the last block, computing included.",
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
                        "being read {{engine}}": f"penstock_adapter_loading{{{M}}}",
                    },
                ),
                Panel(
                    "Adapter loads",
                    "Evictions that keep up with loads mean too few slots.",
                    {
                        "read": rate("penstock_adapter_loads_total"),
                        "failed": rate("penstock_adapter_load_failures_total"),
                        "to the device": rate("penstock_adapter_copies_total"),
                        "evicted": rate("penstock_adapter_evictions_total"),
                        "dropped from the host": rate("penstock_adapter_host_evictions_total"),
                    },
                ),
                Panel(
                    "Reading an adapter",
                    "Mean seconds.",
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
                    "Share of time in which a kernel ran. Low while requests wait: the host is too slow.",
                    {"{{model_name}} {{engine}} gpu {{gpu}}": f"penstock_gpu_utilization_ratio{{{M}}}"},
                    "percentunit",
                    limit=0.5,
                    below=True,
                ),
                Panel(
                    "GPU memory",
                    "As the driver sees it.",
                    {
                        "used {{engine}} gpu {{gpu}}": f"penstock_gpu_memory_used_bytes{{{M}}}",
                        "all {{engine}} gpu {{gpu}}": f"penstock_gpu_memory_total_bytes{{{M}}}",
                    },
                    "bytes",
                ),
                Panel(
                    "Engines",
                    "1 while it takes requests; awake while it holds its weights.",
                    {
                        "up {{model_name}} {{engine}}": f"penstock_engine_up{{{M}}}",
                        "awake {{model_name}} {{engine}}": f"penstock_engine_awake{{{M}}}",
                    },
                ),
                Panel(
                    "Gateway CPU",
                    "Cores that the gateway processes use: near one per worker, it is the gateway that is slow.",
                    {"cores": f"rate(process_cpu_seconds_total[{RATE}])"},
                ),
                Panel(
                    "Gateway memory",
                    "Of the gateway processes together.",
                    {"resident": "process_resident_memory_bytes"},
                    "bytes",
                ),
            ],
        ),
    ],
)
