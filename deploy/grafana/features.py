"""The dashboard of what is used beside generation: caches, batches, remotes, quality, moderation, ingestion."""

from __future__ import annotations

from panels import RATE, Board, M, Panel, quantiles, rate, total


def mean(histogram: str, by: str) -> str:
    return f"{rate(f'{histogram}_sum', by)} / {rate(f'{histogram}_count', by)}"


FEATURES = Board(
    "penstock-features",
    "Penstock / Features",
    "Response caches, batches, conversations, remotes and fallbacks, feedback and quality, moderation, ingestion.",
    [
        (
            "Response cache",
            7,
            [
                Panel(
                    "Cache lookups",
                    "By cache (exact, semantic) and outcome.",
                    {"{{cache}} {{outcome}}": rate("penstock_cache_lookups_total", "cache, outcome", "")},
                    stack=True,
                    optional=True,
                ),
                Panel(
                    "Tokens saved by the cache",
                    "Tokens that were not computed again, per second.",
                    {"saved": f"sum(rate(penstock_cache_saved_tokens_total[{RATE}]))"},
                    optional=True,
                ),
                Panel(
                    "Doubtful cache hits",
                    "Near questions that the verifier refused, by reason, and hits that users voted down.",
                    {
                        "refused: {{reason}}": rate("penstock_cache_refusals_total", "reason", ""),
                        "suspected": f"sum(rate(penstock_cache_suspected_false_hits_total[{RATE}]))",
                    },
                    optional=True,
                ),
            ],
        ),
        (
            "Batches and conversations",
            7,
            [
                Panel("Batches running", "", {"running": "sum(penstock_batches_running)"}, optional=True),
                Panel(
                    "Batch lines",
                    "Requests of batches answered per second, by outcome.",
                    {"{{endpoint}} {{outcome}}": rate("penstock_batch_lines_total", "endpoint, outcome", "")},
                    stack=True,
                    optional=True,
                ),
                Panel(
                    "Conversation turns",
                    "Turns of stored conversations, and old turns that were dropped or summarised to fit.",
                    {
                        "turns": f"sum(rate(penstock_conversation_turns_total[{RATE}]))",
                        "{{how}}": rate("penstock_conversation_dropped_turns_total", "how", ""),
                    },
                    optional=True,
                ),
                Panel(
                    "Conversation summaries",
                    "Summaries written by a model, by outcome.",
                    {"{{when}} {{outcome}}": rate("penstock_conversation_summaries_total", "when, outcome", "")},
                    optional=True,
                ),
            ],
        ),
        (
            "Remotes and fallbacks",
            7,
            [
                Panel(
                    "Remotes up",
                    "1 while the other server answers.",
                    {"{{model_name}} {{engine}}": f"penstock_remote_up{{{M}}}"},
                    limit=1,
                    below=True,
                    optional=True,
                ),
                Panel(
                    "Requests at remotes",
                    "In flight from here; running and waiting there of all clients, where the server tells.",
                    {
                        "{{model_name}} {{engine}}": f"penstock_remote_requests_in_flight{{{M}}}",
                        "{{model_name}} {{engine}} running": f"penstock_remote_requests_running{{{M}}}",
                        "{{model_name}} {{engine}} waiting": f"penstock_remote_requests_waiting{{{M}}}",
                    },
                    optional=True,
                ),
                Panel(
                    "Limits of providers",
                    "Seconds until a provider's rate limit allows the next request.",
                    {"{{model_name}} {{engine}}": f"penstock_remote_limit_wait_seconds{{{M}}}"},
                    optional=True,
                ),
                Panel(
                    "Fallbacks",
                    "Requests that another model answered, by the error that caused it.",
                    {"{{model_name}} to {{to}}: {{code}}": rate("penstock_fallbacks_total", "model_name, to, code")},
                    stack=True,
                    optional=True,
                ),
            ],
        ),
        (
            "Feedback and quality",
            7,
            [
                Panel(
                    "Votes",
                    "Thumbs per second, by model.",
                    {"{{model_name}} {{rating}}": rate("penstock_feedback_total", "model_name, rating")},
                    stack=True,
                    optional=True,
                ),
                Panel(
                    "Votes by arm",
                    "Of routes that compare models.",
                    {"{{route}} {{arm}} {{rating}}": rate("penstock_feedback_total", "route, arm, rating")},
                    stack=True,
                    optional=True,
                ),
                Panel(
                    "Judged answers",
                    "Sampled answers, by outcome.",
                    {"{{model_name}} {{outcome}}": rate("penstock_judged_answers_total", "model_name, outcome")},
                    optional=True,
                ),
                Panel(
                    "Judged quality",
                    "Mean grade of relevance and groundedness, from 0 to 1.",
                    {
                        "relevance {{model_name}}": mean("penstock_answer_relevance", "model_name"),
                        "groundedness {{model_name}}": mean("penstock_answer_groundedness", "model_name"),
                    },
                    "percentunit",
                    optional=True,
                ),
            ],
        ),
        (
            "Moderation and ingestion",
            7,
            [
                Panel(
                    "Moderation checks",
                    "Texts that moderation models judged, by outcome.",
                    {
                        "{{rule}} {{stage}} {{outcome}}": rate(
                            "penstock_moderation_checks_total", "rule, stage, outcome", ""
                        )
                    },
                    stack=True,
                    optional=True,
                ),
                Panel(
                    "Moderation time, p95",
                    "What it adds to a request.",
                    quantiles("penstock_moderation_seconds", 0.95, by="rule", where=""),
                    "s",
                    optional=True,
                ),
                Panel(
                    "Documents",
                    "Documents ingested per second, by outcome.",
                    {"{{status}}": rate("penstock_knowledge_documents_total", "status", "")},
                    stack=True,
                    optional=True,
                ),
                Panel(
                    "Time per document, p95",
                    "Reading, cutting and embedding.",
                    quantiles("penstock_knowledge_document_seconds", 0.95, where=""),
                    "s",
                    optional=True,
                ),
            ],
        ),
        (
            "Experiments",
            7,
            [
                Panel(
                    "Share of each arm",
                    "Of the requests of an experiment; a canary that was rolled back has none.",
                    {"{{experiment}} {{arm}}": "max by (experiment, arm) (penstock_experiment_share)"},
                    "percentunit",
                    optional=True,
                ),
                Panel(
                    "Errors per arm",
                    "Share of the requests of each arm that failed.",
                    {
                        "{{experiment}} {{arm}}": rate(
                            "penstock_experiment_requests_total", "experiment, arm", 'outcome="failed"'
                        )
                        + " / "
                        + rate("penstock_experiment_requests_total", "experiment, arm", 'outcome=~"failed|answered"')
                    },
                    "percentunit",
                    optional=True,
                ),
                Panel(
                    "First token per arm, p95",
                    "By experiment and arm.",
                    {
                        "{{experiment}} {{arm}}": "histogram_quantile(0.95, "
                        + rate("penstock_experiment_ttft_seconds_bucket", "experiment, arm, le", "")
                        + ")"
                    },
                    "s",
                    optional=True,
                ),
                Panel(
                    "Cost per answer and arm",
                    "Dollars, at the prices of each model.",
                    {
                        "{{experiment}} {{arm}}": rate("penstock_experiment_cost_dollars_total", "experiment, arm", "")
                        + " / "
                        + rate("penstock_experiment_latency_seconds_count", "experiment, arm", "")
                    },
                    "currencyUSD",
                    optional=True,
                ),
                Panel(
                    "Shadow requests",
                    "Answered, failed, or dropped because the queue was full.",
                    {
                        "{{experiment}} {{arm}} {{outcome}}": rate(
                            "penstock_experiment_shadow_requests_total", "experiment, arm, outcome", ""
                        )
                    },
                    optional=True,
                ),
            ],
        ),
        (
            "Autoscaling",
            7,
            [
                Panel(
                    "Replicas wanted and ready",
                    "By model.",
                    {
                        "{{model_name}} wanted": total("penstock_autoscale_desired_replicas", "model_name"),
                        "{{model_name}} ready": total("penstock_autoscale_ready_replicas", "model_name"),
                    },
                    optional=True,
                ),
                Panel(
                    "Held requests",
                    "Requests that wait for the first replica of a model that was scaled to zero.",
                    {"{{model_name}}": total("penstock_held_requests", "model_name")},
                    optional=True,
                ),
            ],
        ),
    ],
)
