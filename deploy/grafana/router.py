"""What waits, what is turned away, which replicas answer."""

from __future__ import annotations

from panels import RATE, TTFT, Board, M, Panel, quantiles, rate, total

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
            "Admission",
            8,
            [
                Panel(
                    "Queue",
                    "Requests that wait in the gateway, by class.",
                    {"{{model_name}} {{class}}": total("penstock_queue_depth", "model_name, class")},
                    limit=1000,
                ),
                Panel(
                    "Wait, p95",
                    "95% of those who were admitted waited less. Long for one class: it is last in line.",
                    quantiles("penstock_queue_wait_seconds", 0.95, by="model_name, class"),
                    "s",
                ),
                Panel(
                    "Turned away",
                    "By class and reason; whoever is, hears when to come back.",
                    {"{{class}} {{reason}}": rate("penstock_sheds_total", "class, reason")},
                    stack=True,
                ),
                Panel(
                    "Answered by a smaller model",
                    "Best-effort requests, while too many wait.",
                    {"{{model_name}}": rate("penstock_downgrades_total", "model_name")},
                ),
                Panel(
                    "Drain rate",
                    "Work that leaves the queue per second, in prompt tokens: what `Retry-After` is computed from.",
                    {"{{model_name}}": total("penstock_queue_drain_rate", "model_name")},
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
            "When a replica fails",
            7,
            [
                Panel(
                    "Breakers",
                    "0 closed, 1 half open, 2 open: an open one gets no requests until it answers a trial.",
                    {"{{model_name}} {{engine}}": f"penstock_replica_breaker{{{M}}}"},
                ),
                Panel(
                    "Moved",
                    "Requests that went on elsewhere, were tried again, or could not be finished by any replica.",
                    {
                        "went on elsewhere": rate("penstock_failovers_total"),
                        "tried again": rate("penstock_retries_total"),
                        "tried on a second": rate("penstock_hedges_total"),
                        "no budget to retry": rate("penstock_retries_refused_total"),
                        "given up": rate("penstock_given_up_total"),
                    },
                ),
                Panel(
                    "Parked",
                    "Requests that wait because no replica can take them.",
                    {"{{model_name}}": total("penstock_parked_requests", "model_name")},
                ),
            ],
        ),
        (
            "Around the model",
            7,
            [
                Panel(
                    "Tool calls",
                    "Tools that the gateway runs, by outcome.",
                    {"{{tool}} {{outcome}}": rate("penstock_tool_calls_total", "tool, outcome", "")},
                    optional=True,
                ),
                Panel(
                    "Tool time, p95",
                    "Tools that the gateway runs.",
                    quantiles("penstock_tool_call_seconds", 0.95, by="tool", where=""),
                    "s",
                    optional=True,
                ),
                Panel(
                    "Retrieval, p95",
                    "A search in a collection, and its steps, which overlap.",
                    quantiles("penstock_retrieval_seconds", 0.95, by="step", where=""),
                    "s",
                    optional=True,
                ),
                Panel(
                    "Encoders",
                    "Texts embedded or compared per second.",
                    {"{{encoder}}": rate("penstock_encoder_texts_total", "encoder", "")},
                    optional=True,
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
