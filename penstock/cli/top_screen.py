"""The screen of `penstock top`: builds the tables of one interval; the command draws them."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Mapping

from rich.console import Group, RenderableType
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from penstock.telemetry.scrapes import Interval, Scrape

HISTORY = 60
_BARS = " ▁▂▃▄▅▆▇█"
_BREAKER = {0.0: "", 1.0: " half open", 2.0: " open"}
WATCHERS = ("/metrics", "/health", "/ping")
TTFT, ITL = "vllm:time_to_first_token_seconds", "vllm:inter_token_latency_seconds"


class Screen:
    """Builds the frames of one server; keeps past throughput for the sparkline."""

    def __init__(self, url: str) -> None:
        self._url = url
        self._tokens: deque[float] = deque(maxlen=HISTORY)

    def frame(self, interval: Interval) -> RenderableType:
        self._tokens.append(interval.rate("vllm:generation_tokens_total"))
        parts: list[RenderableType] = [_totals(interval), Text(sparkline(self._tokens), style="green")]
        if interval.after.most("penstock_fleet_machine_engines") is not None:
            parts += [_machines(interval.after), Text()]
        parts.append(_replicas(interval))
        refused = _reasons(interval)
        if refused.plain:
            parts.append(refused)
        return Panel(Group(*parts), title=f"penstock  {self._url}", title_align="left", border_style="dim")

    def trouble(self, message: str) -> RenderableType:
        return Panel(Text(message, style="red"), title=f"penstock  {self._url}", title_align="left", border_style="red")


def _totals(interval: Interval) -> Table:
    now = interval.after
    waiting = now.sum("vllm:num_requests_waiting")
    errors = sum(
        rate for status, rate in interval.rates("penstock_errors_total", "status").items() if status.startswith("5")
    )
    table = Table.grid(padding=(0, 3))
    rows = (
        (
            ("generated", f"{interval.rate('vllm:generation_tokens_total'):,.0f} tok/s"),
            ("prompts", f"{interval.rate('vllm:prompt_tokens_total'):,.0f} tok/s"),
            ("requests", f"{_requests(interval):,.1f}/s"),
            ("errors", f"{errors:,.1f}/s"),
        ),
        (
            ("running", f"{now.sum('vllm:num_requests_running'):,.0f}"),
            ("waiting", f"{waiting:,.0f}"),
            ("KV cache", share(now.most("vllm:kv_cache_usage_perc"))),
            ("prefix hits", share(interval.ratio("vllm:prefix_cache_hits_total", "vllm:prefix_cache_queries_total"))),
        ),
        (
            ("TTFT", percentiles(interval, TTFT)),
            ("inter-token", percentiles(interval, ITL)),
            ("charged", f"${3600 * interval.rate('penstock_usage_cost_dollars_total'):,.2f}/h"),
            ("hardware", f"${3600 * now.sum('penstock_engine_cost_dollars_per_second'):,.2f}/h"),
        ),
    )
    for row in rows:
        table.add_row(*(Text.assemble((f"{name} ", "dim"), (value, "bold")) for name, value in row))
    return table


def _requests(interval: Interval) -> float:
    """Without the readings of `/metrics`, which are this program's own, and health checks."""
    rates = interval.rates("penstock_http_requests_total", "route")
    return sum(rate for route, rate in rates.items() if not route.startswith(WATCHERS))


def _replicas(interval: Interval) -> Table:
    now = interval.after
    table = Table(box=None, pad_edge=False, header_style="dim")
    places = {
        (labels["model_name"], labels["engine"]): " ".join(filter(None, (labels["pool"], labels["region"])))
        for labels, _ in now.series("penstock_replica_info")
    }
    for name in ("model", "replica", *(["pool, region"] if any(places.values()) else []), "state"):
        table.add_column(name, no_wrap=True)
    for name in ("running", "waiting", "KV", "tok/s", "TTFT p95", "ITL p95", "preempted", "GPU", "GPU memory"):
        table.add_column(name, justify="right", no_wrap=True)
    experts = now.most("penstock_expert_imbalance") is not None
    if experts:
        table.add_column("expert imbalance", justify="right", no_wrap=True)
    for labels, up in sorted(now.series("penstock_engine_up"), key=lambda item: sorted(item[0].items())):
        where = dict(labels)
        awake = now.sum("penstock_engine_awake", **where)
        state = "down" if not up else "up" if awake else "asleep"
        breaker = _BREAKER.get(now.sum("penstock_replica_breaker", **where), "")
        memory = now.sum("penstock_gpu_memory_total_bytes", **where)
        table.add_row(
            labels["model_name"],
            labels["engine"],
            *([places.get((labels["model_name"], labels["engine"]), "")] if any(places.values()) else []),
            Text(state + breaker, style="green" if state == "up" and not breaker else "red"),
            f"{now.sum('vllm:num_requests_running', **where):,.0f}",
            f"{now.sum('penstock_engine_requests_waiting', **where):,.0f}",
            share(now.most("vllm:kv_cache_usage_perc", **where)),
            f"{interval.rate('vllm:generation_tokens_total', **where):,.0f}",
            duration(interval.quantile(0.95, TTFT, **where)),
            duration(interval.quantile(0.95, ITL, **where)),
            f"{interval.rate('vllm:num_preemptions_total', **where):,.1f}/s",
            share(now.most("penstock_gpu_utilization_ratio", **where)),
            share(now.sum("penstock_gpu_memory_used_bytes", **where) / memory if memory else None),
            *([_times(now.most("penstock_expert_imbalance", **where))] if experts else []),
        )
    for labels, up in sorted(now.series("penstock_remote_up"), key=lambda item: sorted(item[0].items())):
        table.add_row(*_remote(now, labels, bool(up), places if any(places.values()) else None))
    for labels, wanted in now.series("penstock_autoscale_desired_replicas"):
        blank = [""] if any(places.values()) else []
        if blank and labels.get("pool"):
            blank = [labels["pool"]]
        table.add_row(labels["model_name"], "autoscale", *blank, _autoscale(now, labels, wanted))
    _pools(now, table)
    return table


def _remote(
    now: Scrape, labels: Mapping[str, str], up: bool, places: Mapping[tuple[str, str], str] | None
) -> list[RenderableType]:
    """A server of a remote model: what it says of itself, else the requests that were sent from here."""
    where = dict(labels)
    breaker = _BREAKER.get(now.sum("penstock_replica_breaker", **where), "")
    told = now.most("penstock_remote_requests_running", **where)
    running = now.sum("penstock_remote_requests_in_flight", **where) if told is None else told
    waiting = now.most("penstock_remote_requests_waiting", **where)
    wait = now.most("penstock_remote_limit_wait_seconds", **where) or 0.0
    limited = f", limited {wait:.0f} s" if wait else ""
    state = ("remote" if up else "remote down") + breaker + limited
    return [
        labels["model_name"],
        labels["engine"],
        *([] if places is None else [places.get((labels["model_name"], labels["engine"]), "")]),
        Text(state, style="green" if state == "remote" else "red"),
        f"{running:,.0f}",
        "" if waiting is None else f"{waiting:,.0f}",
        share(now.most("penstock_remote_kv_cache_usage", **where)),
    ]


def _machines(now: Scrape) -> Table:
    """The machines of a fleet, with the load of their engines."""
    table = Table(box=None, pad_edge=False, header_style="dim")
    for name in ("machine", "zone", "state"):
        table.add_column(name, no_wrap=True)
    for name in ("engines", "room", "running", "waiting", "gateways"):
        table.add_column(name, justify="right", no_wrap=True)
    for labels, engines in sorted(now.series("penstock_fleet_machine_engines"), key=lambda found: found[0]["machine"]):
        machine, state = labels["machine"], labels["state"]
        leads = now.sum("penstock_fleet_controller", machine=machine)
        up = now.sum("penstock_fleet_gateway_up", machine=machine)
        table.add_row(
            machine,
            labels["zone"] or "-",
            Text(state + (", controller" if leads else ""), style="green" if state == "ready" else "yellow"),
            f"{engines:.0f}",
            f"{now.sum('penstock_fleet_machine_room', machine=machine):.0f}",
            f"{_on(now, machine, 'vllm:num_requests_running'):,.0f}",
            f"{_on(now, machine, 'penstock_engine_requests_waiting'):,.0f}",
            f"{up:.0f}",
        )
    return table


def _on(now: Scrape, machine: str, metric: str) -> float:
    """A figure of all engines of a machine, whose replicas are called MACHINE.NUMBER."""
    return sum(value for labels, value in now.series(metric) if labels["engine"].rpartition(".")[0] == machine)


def _times(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}x"


def _pools(now: Scrape, table: Table) -> None:
    """A line for each pool: what it runs of what it can, and what waits for it."""
    for labels, slots in sorted(now.series("penstock_pool_slots"), key=lambda item: sorted(item[0].items())):
        where = {"model_name": labels["model_name"], "pool": labels["pool"]}
        held = now.sum("penstock_pool_requests_in_flight", **where)
        waiting = now.sum("penstock_pool_queue_depth", **where)
        table.add_row(
            labels["model_name"], "pool", labels["pool"], Text(f"{held:,.0f} of {slots:,.0f}"), "", f"{waiting:,.0f}"
        )


def _autoscale(now: Scrape, labels: Mapping[str, str], wanted: float) -> Text:
    """`asleep`, or how many replicas are ready and starting."""
    where = {name: labels[name] for name in ("model_name", "pool") if name in labels}
    ready = now.sum("penstock_autoscale_ready_replicas", **where)
    starting = now.sum("penstock_autoscale_starting_replicas", **where)
    if not wanted and not ready:
        return Text("asleep", style="dim")
    text = f"{ready:.0f} of {wanted:.0f}" + (f", {starting:.0f} starting" if starting else "")
    return Text(text, style="green" if ready >= wanted else "yellow")


def _reasons(interval: Interval) -> Text:
    refused = interval.rates("penstock_rejections_total", "reason")
    words = [f"{reason} {rate:,.1f}/s" for reason, rate in sorted(refused.items())]
    return Text("refused: " + ", ".join(words), style="yellow") if words else Text()


def percentiles(interval: Interval, histogram: str) -> str:
    return " / ".join(duration(interval.quantile(q, histogram)) for q in (0.5, 0.95))


def duration(seconds: float | None) -> str:
    if seconds is None:
        return "-"
    return (
        f"{seconds:.2f} s"
        if seconds >= 1
        else f"{seconds * 1000:.0f} ms"
        if seconds >= 0.01
        else f"{seconds * 1000:.1f} ms"
    )


def share(value: float | None) -> str:
    return "-" if value is None or math.isnan(value) else f"{value:.0%}"


def sparkline(values: Iterable[float]) -> str:
    found = list(values)
    most = max(found, default=0.0)
    return "".join(_BARS[round(value / most * (len(_BARS) - 1))] if most else _BARS[0] for value in found)
