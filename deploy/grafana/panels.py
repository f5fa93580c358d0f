"""Panels and dashboards as values, and the expressions that several panels share.

`$model`, `$tenant` and `$__rate_interval` are Grafana's variables.
"""

from __future__ import annotations

from dataclasses import dataclass, field

M = 'model_name=~"$model"'
RATE = "$__rate_interval"
PROMETHEUS, CLICKHOUSE = "prometheus", "grafana-clickhouse-datasource"
"""Types of data sources."""


@dataclass(frozen=True)
class Panel:
    title: str
    about: str
    queries: dict[str, str]
    """By legend."""
    unit: str = "short"
    kind: str = "timeseries"
    limit: float | None = None
    """The panel is red from here on: the threshold of an alert."""
    below: bool = False
    """Red below the limit instead of above."""
    stack: bool = False
    optional: bool = False
    """Empty until the feature is used."""
    source: str = PROMETHEUS


@dataclass(frozen=True)
class Board:
    uid: str
    title: str
    about: str
    rows: list[tuple[str, int, list[Panel]]]
    """Name, height, panels."""
    variables: dict[str, str] = field(default_factory=lambda: {"model": MODELS})
    source: str = PROMETHEUS
    """Of the variables."""
    since: str = "now-1h"
    refresh: str = "10s"


MODELS = "label_values(vllm:num_requests_running, model_name)"
TENANTS = "label_values(penstock_usage_requests_total, tenant)"


def rate(metric: str, by: str = "", where: str = M) -> str:
    grouped = f" by ({by})" if by else ""
    return f"sum{grouped} (rate({metric}{{{where}}}[{RATE}]))"


def ratio(above: str, below: str, by: str = "") -> str:
    return f"{rate(above, by)} / {rate(below, by)}"


def total(metric: str, by: str = "", where: str = M) -> str:
    return f"sum{f' by ({by})' if by else ''} ({metric}{{{where}}})"


def quantiles(metric: str, *qs: float, by: str = "", where: str = M) -> dict[str, str]:
    grouped = f"le, {by}" if by else "le"
    suffix = "".join(f" {{{{{label.strip()}}}}}" for label in by.split(",")) if by else ""
    buckets = f"sum by ({grouped}) (rate({metric}_bucket{{{where}}}[{RATE}]))"
    return {f"p{q * 100:g}{suffix}": f"histogram_quantile({q}, {buckets})" for q in qs}


TTFT, ITL = "vllm:time_to_first_token_seconds", "vllm:inter_token_latency_seconds"
V1 = 'route=~"/v1/.*"'
ERROR_RATIO = (
    f'(sum(rate(penstock_errors_total{{{V1}, status=~"5.."}}[{RATE}])) or vector(0))'
    f" / sum(rate(penstock_http_requests_total{{{V1}}}[{RATE}]))"
)
WAITING = total("vllm:num_requests_waiting", "model_name")
KV = "vllm:kv_cache_usage_perc"
U = f'tenant=~"$tenant", {M}'
COST = total("penstock_engine_cost_dollars_per_second")
