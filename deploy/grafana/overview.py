"""Start here."""

from __future__ import annotations

from panels import ERROR_RATIO, ITL, KV, RATE, TTFT, V1, WAITING, Board, M, Panel, quantiles, rate, total

OVERVIEW = Board(
    "penstock-overview",
    "Penstock / Overview",
    "Is it fast, is it busy, is anything wrong? Start here.",
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
                    "First token, p95",
                    "95% of first tokens come sooner.",
                    {"p95": quantiles(TTFT, 0.95)["p95"]},
                    "s",
                    "stat",
                    limit=1,
                ),
                Panel(
                    "Between tokens, p95",
                    "95% of the pauses between tokens are shorter.",
                    {"p95": quantiles(ITL, 0.95)["p95"]},
                    "s",
                    "stat",
                    limit=0.05,
                ),
                Panel(
                    "Errors",
                    "Share of requests that failed on our side (5xx, broken streams).",
                    {"errors": ERROR_RATIO},
                    "percentunit",
                    "stat",
                    limit=0.01,
                ),
                Panel(
                    "Waiting",
                    "Requests that wait, in the gateway and in engines.",
                    {"waiting": f"sum({WAITING})"},
                    kind="stat",
                    limit=1000,
                ),
                Panel(
                    "KV cache", "The fullest cache.", {"used": f"max({KV}{{{M}}})"}, "percentunit", "stat", limit=0.9
                ),
                Panel("Engines up", "Engines that take requests.", {"up": total("penstock_engine_up")}, kind="stat"),
            ],
        ),
        (
            "Speed",
            8,
            [
                Panel(
                    "Time to the first token",
                    "What people feel first. Rises when requests wait or prompts get longer: see Waiting, and prefill.",
                    quantiles(TTFT, 0.5, 0.95, 0.99),
                    "s",
                    limit=1,
                ),
                Panel(
                    "Time between tokens",
                    "How smoothly text flows. Rises with the batch, with long prompts beside it, with preemptions.",
                    quantiles(ITL, 0.5, 0.95, 0.99),
                    "s",
                    limit=0.05,
                ),
                Panel(
                    "Latency",
                    "From arrival to the last token; mostly the length of the answers.",
                    quantiles("vllm:e2e_request_latency_seconds", 0.5, 0.95, 0.99),
                    "s",
                ),
            ],
        ),
        (
            "Work",
            8,
            [
                Panel(
                    "Tokens",
                    "Computed prompts and generated text.",
                    {
                        "prompt {{model_name}}": rate("vllm:prompt_tokens_total", "model_name"),
                        "generated {{model_name}}": rate("vllm:generation_tokens_total", "model_name"),
                    },
                ),
                Panel(
                    "Requests by status",
                    "499 is a client that left.",
                    {"{{status}}": rate("penstock_http_requests_total", "status", V1)},
                    stack=True,
                ),
                Panel(
                    "Running and waiting",
                    "Waiting that grows means more comes than can be served.",
                    {
                        "running {{model_name}}": total("vllm:num_requests_running", "model_name"),
                        "waiting {{model_name}}": WAITING,
                    },
                    limit=1000,
                ),
            ],
        ),
        (
            "Trouble",
            8,
            [
                Panel(
                    "Errors by code",
                    "All of them, the caller's too.",
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
                    "KV cache in use",
                    "Above 90% sequences are preempted and computed again.",
                    {"{{model_name}} {{engine}}": f"{KV}{{{M}}}"},
                    "percentunit",
                    limit=0.9,
                ),
            ],
        ),
    ],
)
