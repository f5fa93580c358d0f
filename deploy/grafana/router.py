"""The dashboard of requests, admission queue and replicas."""

from __future__ import annotations

from panels import RATE, TTFT, Board, M, Panel, quantiles, rate, total

REQUESTS = f'{{__name__=~"vllm:num_requests_running|penstock_engine_requests_waiting", {M}}}'

ROUTER = Board(
    "penstock-router",
    "Penstock / Router and queue",
    "Requests in flight, the admission queue, refusals, and the health of replicas.",
    [
        (
            "Requests",
            8,
            [
                Panel(
                    "In flight",
                    "Requests in flight, by route.",
                    {"{{route}}": "sum by (route) (penstock_http_requests_in_flight)"},
                ),
                Panel(
                    "Refused",
                    "By reason: `rate_limit` and `budget` are limits of the caller, the others lack of capacity.",
                    {"{{reason}}": rate("penstock_rejections_total", "reason", "")},
                    stack=True,
                ),
                Panel(
                    "Client disconnects",
                    "Clients that disconnected before the end of their answer, and streams closed because the client "
                    "did not read.",
                    {
                        "disconnected": f"sum(rate(penstock_client_disconnects_total[{RATE}]))",
                        "stalled": f"sum(rate(penstock_stalled_readers_total[{RATE}]))",
                    },
                ),
                Panel(
                    "Latency by route",
                    "p95 time to answer a request.",
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
                    "Queue depth",
                    "Requests waiting in the gateway, by class.",
                    {"{{model_name}} {{class}}": total("penstock_queue_depth", "model_name, class")},
                    limit=1000,
                ),
                Panel(
                    "Queue wait, p95",
                    "Of admitted requests. A long wait of one class only means that higher classes go first.",
                    quantiles("penstock_queue_wait_seconds", 0.95, by="model_name, class"),
                    "s",
                ),
                Panel(
                    "Shed requests",
                    "Requests refused by admission, by class and reason; the reply has a `Retry-After`.",
                    {"{{class}} {{reason}}": rate("penstock_sheds_total", "class, reason")},
                    stack=True,
                ),
                Panel(
                    "Downgraded to a smaller model",
                    "Best-effort requests sent to a smaller model while the queue is long.",
                    {"{{model_name}}": rate("penstock_downgrades_total", "model_name")},
                ),
                Panel(
                    "Drain rate",
                    "Work that leaves the queue, in prompt tokens per second; `Retry-After` is computed from it.",
                    {"{{model_name}}": total("penstock_queue_drain_rate", "model_name")},
                ),
            ],
        ),
        (
            "Replicas",
            8,
            [
                Panel(
                    "Load per replica",
                    "Running and waiting requests. Large differences mean that routing or a replica has a problem.",
                    {"{{model_name}} {{engine}}": f"sum by (model_name, engine) ({REQUESTS})"},
                ),
                Panel("TTFT by replica, p95", "", quantiles(TTFT, 0.95, by="model_name, engine"), "s", limit=1),
                Panel(
                    "Tokens by replica",
                    "Generated tokens per second.",
                    {"{{model_name}} {{engine}}": rate("vllm:generation_tokens_total", "model_name, engine")},
                ),
            ],
        ),
        (
            "Replica failures",
            7,
            [
                Panel(
                    "Circuit breakers",
                    "0 closed, 1 half open, 2 open. An open breaker lets no requests through until a probe succeeds.",
                    {"{{model_name}} {{engine}}": f"penstock_replica_breaker{{{M}}}"},
                ),
                Panel(
                    "Failovers and retries",
                    "Requests that moved to another replica, were retried or hedged, or that no replica could finish.",
                    {
                        "failed over": rate("penstock_failovers_total"),
                        "retried": rate("penstock_retries_total"),
                        "hedged": rate("penstock_hedges_total"),
                        "retry budget spent": rate("penstock_retries_refused_total"),
                        "given up": rate("penstock_given_up_total"),
                    },
                ),
                Panel(
                    "Parked requests",
                    "Requests waiting because no replica can take them.",
                    {"{{model_name}}": total("penstock_parked_requests", "model_name")},
                ),
            ],
        ),
        (
            "Tools, retrieval, encoders",
            7,
            [
                Panel(
                    "Tool calls",
                    "Tool calls run by the gateway, by outcome.",
                    {"{{tool}} {{outcome}}": rate("penstock_tool_calls_total", "tool, outcome", "")},
                    optional=True,
                ),
                Panel(
                    "Tool call duration, p95",
                    "Tool calls run by the gateway.",
                    quantiles("penstock_tool_call_seconds", 0.95, by="tool", where=""),
                    "s",
                    optional=True,
                ),
                Panel(
                    "Retrieval, p95",
                    "Duration of a search in a collection, and of its steps, which overlap.",
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
            "Other",
            7,
            [
                Panel(
                    "Request log",
                    "Spooled: the sink is slow or unreachable. Lost: the spool was full.",
                    {
                        name: f"sum(rate(penstock_request_log_{name}_total[{RATE}]))"
                        for name in ("written", "spooled", "lost")
                    },
                ),
                Panel(
                    "Guardrails",
                    "Texts refused or redacted.",
                    {"{{rule}} {{stage}} {{action}}": rate("penstock_guardrails_total", "rule, stage, action", "")},
                ),
                Panel(
                    "Grammars",
                    "Requests with a grammar: compiled (costs time once), known (cached), refused.",
                    {"{{outcome}}": rate("penstock_grammars_total", "outcome", "")},
                ),
                Panel("Draining", "1 while a gateway is shutting down.", {"draining": "max(penstock_draining)"}),
            ],
        ),
    ],
)
