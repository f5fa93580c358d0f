"""The overview dashboard: the first one to look at."""

from __future__ import annotations

from panels import ERROR_RATIO, ITL, KV, RATE, TTFT, V1, WAITING, Board, M, Panel, quantiles, rate, total

OVERVIEW = Board(
    "penstock-overview",
    "Penstock / Overview",
    "Latency, load and errors at a glance. Start here.",
    [
        (
            "Now",
            4,
            [
                Panel(
                    "Generated",
                    "Tokens generated per second.",
                    {"tokens/s": rate("vllm:generation_tokens_total")},
                    kind="stat",
                ),
                Panel(
                    "Requests",
                    "Answered requests per second.",
                    {"requests/s": f"sum(rate(penstock_http_requests_total{{{V1}}}[{RATE}]))"},
                    kind="stat",
                ),
                Panel(
                    "TTFT, p95",
                    "95th percentile of the time to first token.",
                    {"p95": quantiles(TTFT, 0.95)["p95"]},
                    "s",
                    "stat",
                    limit=1,
                ),
                Panel(
                    "Inter-token latency, p95",
                    "95th percentile of the time between tokens.",
                    {"p95": quantiles(ITL, 0.95)["p95"]},
                    "s",
                    "stat",
                    limit=0.05,
                ),
                Panel(
                    "Errors",
                    "Share of requests that failed on the server's side (5xx, broken streams).",
                    {"errors": ERROR_RATIO},
                    "percentunit",
                    "stat",
                    limit=0.01,
                ),
                Panel(
                    "Waiting",
                    "Requests waiting in the gateway and in engines.",
                    {"waiting": f"sum({WAITING})"},
                    kind="stat",
                    limit=1000,
                ),
                Panel(
                    "KV cache",
                    "Usage of the fullest KV cache.",
                    {"used": f"max({KV}{{{M}}})"},
                    "percentunit",
                    "stat",
                    limit=0.9,
                ),
                Panel("Engines up", "Engines that accept requests.", {"up": total("penstock_engine_up")}, kind="stat"),
            ],
        ),
        (
            "Latency",
            8,
            [
                Panel(
                    "Time to first token",
                    "Rises when requests wait or prompts get longer: see Waiting, and Prefill in the engine dashboard.",
                    quantiles(TTFT, 0.5, 0.95, 0.99),
                    "s",
                    limit=1,
                ),
                Panel(
                    "Inter-token latency",
                    "Time between tokens. Rises with the batch size, with long prompts in the batch, with preemptions.",
                    quantiles(ITL, 0.5, 0.95, 0.99),
                    "s",
                    limit=0.05,
                ),
                Panel(
                    "End-to-end latency",
                    "From arrival to the last token; depends mostly on the length of the answers.",
                    quantiles("vllm:e2e_request_latency_seconds", 0.5, 0.95, 0.99),
                    "s",
                ),
            ],
        ),
        (
            "Load",
            8,
            [
                Panel(
                    "Tokens",
                    "Prompt and generated tokens per second.",
                    {
                        "prompt {{model_name}}": rate("vllm:prompt_tokens_total", "model_name"),
                        "generated {{model_name}}": rate("vllm:generation_tokens_total", "model_name"),
                    },
                ),
                Panel(
                    "Requests by status",
                    "499 is a client disconnect.",
                    {"{{status}}": rate("penstock_http_requests_total", "status", V1)},
                    stack=True,
                ),
                Panel(
                    "Running and waiting",
                    "A growing number of waiting requests means that demand exceeds capacity.",
                    {
                        "running {{model_name}}": total("vllm:num_requests_running", "model_name"),
                        "waiting {{model_name}}": WAITING,
                    },
                    limit=1000,
                ),
            ],
        ),
        (
            "Problems",
            8,
            [
                Panel(
                    "Errors by code",
                    "All errors, including those of callers (4xx).",
                    {"{{status}} {{code}}": rate("penstock_errors_total", "status, code", "")},
                    stack=True,
                ),
                Panel(
                    "Refused",
                    "Requests refused for lack of capacity or quota.",
                    {"{{reason}}": rate("penstock_rejections_total", "reason", "")},
                    stack=True,
                ),
                Panel(
                    "KV cache usage",
                    "Above 90%, expect sequences to be preempted and recomputed.",
                    {"{{model_name}} {{engine}}": f"{KV}{{{M}}}"},
                    "percentunit",
                    limit=0.9,
                ),
            ],
        ),
    ],
)
