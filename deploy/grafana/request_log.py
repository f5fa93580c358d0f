"""The dashboard of the request log in ClickHouse (docs/request-log.md).

`$__timeFilter`, `$__timeInterval` and `${tenant:singlequote}` are Grafana's; each query is one that ClickHouse runs.
Requests are filtered by the same names as charges: `model_version` is the model.
"""

from __future__ import annotations

from panels import CLICKHOUSE, RATE, Board, Panel

TENANT = "tenant IN (${tenant:singlequote})"
MODEL, VERSION = (f"{column} IN (${{model:singlequote}})" for column in ("model", "model_version"))
COST = f"request_log_cost_by_hour WHERE $__timeFilter(hour) AND {TENANT} AND {MODEL}"
OUTCOMES = f"request_log_outcomes_by_hour WHERE $__timeFilter(hour) AND {TENANT} AND {VERSION}"
LATENCY = f"request_log_latency_by_5m WHERE $__timeFilter(time) AND {VERSION}"
DIGEST = "quantilesTDigestMerge(0.5, 0.9, 0.95, 0.99)"
TOKENS = "sum(prompt_tokens) + sum(completion_tokens)"
DOLLARS = "sum(cost_nanos) / 1e9"


def sql(title: str, about: str, query: str, unit: str = "short", kind: str = "timeseries", **more: bool) -> Panel:
    return Panel(title, about, {"": query}, unit, kind, source=CLICKHOUSE, **more)


def over_time(values: str, source: str, by: str = "", column: str = "hour") -> str:
    keys = by.rpartition(" AS ")[2]
    selected, grouped = (f", {names}" if names else "" for names in (by, keys))
    return f"SELECT $__timeInterval({column}) AS at{selected}, {values} FROM {source} GROUP BY at{grouped} ORDER BY at"


def quantiles(column: str) -> str:
    merged = f"{DIGEST}({column})"
    return f"{merged}[1] AS p50, {merged}[3] AS p95, {merged}[4] AS p99"


REQUEST_LOG = Board(
    "penstock-request-log",
    "Penstock / Request log",
    "Cost, latency and quality from the request log in ClickHouse; exact, for as long as summaries are kept.",
    [
        (
            "Cost",
            5,
            [
                sql(
                    "Cost in this period",
                    "What the ledger charged, in dollars.",
                    f"SELECT {DOLLARS} AS dollars FROM {COST}",
                    "currencyUSD",
                    "stat",
                ),
                sql(
                    "Charged requests",
                    "Settled charges.",
                    f"SELECT sum(requests) AS requests FROM {COST}",
                    kind="stat",
                ),
                sql("Tokens charged", "Prompt and completion.", f"SELECT {TOKENS} AS tokens FROM {COST}", kind="stat"),
                sql(
                    "Dollars per million tokens charged",
                    "The mean price that tenants pay.",
                    f"SELECT 1e6 * {DOLLARS} / greatest({TOKENS}, 1) AS dollars FROM {COST}",
                    "currencyUSD",
                    "stat",
                ),
            ],
        ),
        (
            "Cost by tenant and model",
            8,
            [
                sql(
                    "Cost by tenant over time",
                    "Dollars in each interval.",
                    over_time(f"{DOLLARS} AS dollars", COST, "tenant"),
                    "currencyUSD",
                    stack=True,
                ),
                sql(
                    "Cost by model and adapter",
                    "Dollars in each interval.",
                    over_time(f"{DOLLARS} AS dollars", COST, "trim(concat(model, ' ', adapter)) AS served"),
                    "currencyUSD",
                    stack=True,
                ),
                sql(
                    "Cost table",
                    "By tenant, model and feature, largest first.",
                    f"SELECT tenant, model, adapter, feature, sum(requests) AS requests, {TOKENS} AS tokens, "
                    f"{DOLLARS} AS dollars FROM {COST} GROUP BY tenant, model, adapter, feature "
                    "ORDER BY dollars DESC LIMIT 100",
                    kind="table",
                ),
            ],
        ),
        (
            "Latency",
            8,
            [
                sql(
                    "First token",
                    "Quantiles of `ttft_ms`, of all selected models together.",
                    over_time(quantiles("ttft_ms"), LATENCY, column="time"),
                    "ms",
                ),
                sql(
                    "Whole request",
                    "Quantiles of `total_latency_ms`.",
                    over_time(quantiles("total_latency_ms"), LATENCY, column="time"),
                    "ms",
                ),
                sql(
                    "First token by model and route, p95",
                    "Which model or endpoint is slow.",
                    over_time(f"{DIGEST}(ttft_ms)[3] AS p95", LATENCY, "model_version, route", "time"),
                    "ms",
                ),
            ],
        ),
        (
            "Outcomes",
            8,
            [
                sql(
                    "Finish reasons",
                    "Requests in each interval, by how they ended.",
                    over_time("sum(requests) AS requests", OUTCOMES, "finish_reason"),
                    stack=True,
                ),
                sql(
                    "Error share",
                    "Of requests, by tenant.",
                    over_time("sumIf(requests, finish_reason = 'error') / sum(requests) AS errors", OUTCOMES, "tenant"),
                    "percentunit",
                ),
                sql(
                    "Errors by route",
                    "Requests that failed, largest first.",
                    "SELECT route, tenant, model_version, sum(requests) AS errors "
                    f"FROM {OUTCOMES} AND finish_reason = 'error' GROUP BY route, tenant, model_version "
                    "ORDER BY errors DESC LIMIT 100",
                    kind="table",
                ),
            ],
        ),
        (
            "Quality",
            8,
            [
                sql(
                    "Share of votes up",
                    "Feedback, by model; the last vote on an answer counts.",
                    over_time(
                        "sum(up) / greatest(sum(up) + sum(down), 1) AS share",
                        f"request_log_votes_by_hour WHERE $__timeFilter(hour) AND {TENANT} AND {MODEL}",
                        "model",
                    ),
                    "percentunit",
                    optional=True,
                ),
                sql(
                    "Grades of the judge",
                    "Mean relevance, and groundedness of answers with sources, by model.",
                    over_time(
                        "sum(relevance) / sum(answers) AS mean_relevance, "
                        "sum(groundedness) / greatest(sum(with_sources), 1) AS mean_groundedness",
                        f"request_log_grades_by_hour WHERE $__timeFilter(hour) AND {TENANT} AND {MODEL}",
                        "model",
                    ),
                    "percentunit",
                    optional=True,
                ),
            ],
        ),
        (
            "Pipeline",
            8,
            [
                Panel(
                    "Consumer lag",
                    "Messages that are not in ClickHouse yet, by topic.",
                    {"{{topic}}": "sum by (topic) (penstock_log_pipeline_lag)"},
                    limit=100_000,
                    optional=True,
                ),
                Panel(
                    "Entries consumed",
                    "Per second; copies are entries that a gateway sent twice.",
                    {
                        "{{stream}} {{outcome}}": "sum by (stream, outcome) "
                        f"(rate(penstock_log_pipeline_entries_total[{RATE}]))"
                    },
                    optional=True,
                ),
                sql(
                    "Newest record",
                    "Seconds since the newest request in ClickHouse arrived at a gateway.",
                    "SELECT dateDiff('second', max(timestamp), now64()) AS seconds FROM request_log "
                    "WHERE timestamp > now() - INTERVAL 7 DAY",
                    "s",
                    "stat",
                ),
                sql(
                    "Dead letters",
                    "Messages that could not be read, newest first.",
                    "SELECT time, topic, reason, value FROM request_log_dead_letters FINAL "
                    "WHERE $__timeFilter(time) ORDER BY time DESC LIMIT 100",
                    kind="table",
                    optional=True,
                ),
            ],
        ),
    ],
    {
        "tenant": "SELECT DISTINCT tenant FROM request_log_outcomes_by_hour ORDER BY tenant",
        "model": "SELECT DISTINCT model_version FROM request_log_outcomes_by_hour ORDER BY model_version",
    },
    source=CLICKHOUSE,
    since="now-7d",
    refresh="1m",
)
