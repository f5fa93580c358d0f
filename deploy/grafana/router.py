"""What waits, what is turned away, which replicas answer."""

from __future__ import annotations

from panels import RATE, TTFT, Board, M, Panel, quantiles, rate

REQUESTS = f'{{__name__=~"vllm:num_requests_running|vllm:num_requests_waiting", {M}}}'

ROUTER = Board(
    "penstock-router",
    "Penstock / Router and queue",
    "What waits, what is turned away, which replicas answer.",
    [
        (
            "Requests",
            8,
            [
                Panel(
                    "In flight",
                    "Requests being answered, by route.",
                    {"{{route}}": "sum by (route) (penstock_http_requests_in_flight)"},
                ),
                Panel(
                    "Refused",
                    "By reason: `rate_limit` and `budget` are the caller's limits, the others ours.",
                    {"{{reason}}": rate("penstock_rejections_total", "reason", "")},
                    stack=True,
                ),
                Panel(
                    "Clients that left",
                    "Before the end of their answer, or without reading it.",
                    {
                        "left": f"sum(rate(penstock_client_disconnects_total[{RATE}]))",
                        "did not read": f"sum(rate(penstock_stalled_readers_total[{RATE}]))",
                    },
                ),
                Panel(
                    "Latency by route",
                    "95% of the answers end sooner.",
                    quantiles("penstock_http_request_duration_seconds", 0.95, by="route", where=""),
                    "s",
                ),
            ],
        ),
        (
            "Replicas",
            8,
            [
                Panel(
                    "Work per replica",
                    "Running and waiting; far apart means that routing is off, or that one is ill.",
                    {"{{model_name}} {{engine}}": f"sum by (model_name, engine) ({REQUESTS})"},
                ),
                Panel("First token by replica, p95", "", quantiles(TTFT, 0.95, by="model_name, engine"), "s", limit=1),
                Panel(
                    "Tokens by replica",
                    "Generated per second.",
                    {"{{model_name}} {{engine}}": rate("vllm:generation_tokens_total", "model_name, engine")},
                ),
            ],
        ),
        (
            "Beside the requests",
            7,
            [
                Panel(
                    "Request log",
                    "Spooled: the sink is slow or away. Lost: the spool was full.",
                    {
                        name: f"sum(rate(penstock_request_log_{name}_total[{RATE}]))"
                        for name in ("written", "spooled", "lost")
                    },
                ),
                Panel(
                    "Guardrails",
                    "Text refused or redacted.",
                    {"{{rule}} {{stage}} {{action}}": rate("penstock_guardrails_total", "rule, stage, action", "")},
                ),
                Panel(
                    "Grammars",
                    "Compiled grammars cost time once; known ones none.",
                    {"{{outcome}}": rate("penstock_grammars_total", "outcome", "")},
                ),
                Panel("Draining", "1 while a gateway shuts down.", {"draining": "max(penstock_draining)"}),
            ],
        ),
    ],
)
