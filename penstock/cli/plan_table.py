"""A plan for the terminal: the load, the deployments, the best one, its bill, the API, what was assumed."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import RenderableType
    from rich.table import Table

    from penstock.planning.candidate import Candidate
    from penstock.planning.deployment import Deployment
    from penstock.planning.memory import MemoryPlan
    from penstock.planning.plan import ApiComparison, Plan

_SHOWN = 8
_REASONS = 4
GIB = 2**30


def tables(plan: Plan, *, every: bool) -> Iterator[RenderableType]:
    """The parts, in the order of reading."""
    best = plan.best
    yield headline(plan)
    yield _load(plan)
    yield _deployments(plan, every)
    if best is not None:
        yield _summary(plan, best)
        if best.monthly >= 1:
            yield _bill(plan, best)
        if plan.api is not None:
            yield _api(plan.api, plan)
        if best.monthly >= 1:
            yield _sensitivity(plan, best)
    if plan.rejected:
        yield _rejected(plan, None if every else _REASONS)
    yield _assumptions(plan)


def headline(plan: Plan) -> str:
    shape = plan.shape
    active = "" if shape.moe is None else f", {shape.active_parameters / 1e9:.3g} B of them active"
    return (
        f"{shape.name}: {shape.parameters / 1e9:.3g} B parameters{active}; KV cache "
        f"{shape.kv_bytes_per_token(2) / 1024:,.4g} KiB per token in bf16; context window {plan.context:,} tokens"
    )


def _load(plan: Plan) -> Table:
    from penstock.bench.report import number

    work = plan.workload
    title = (
        f"Load: {work.users:,.0f} users x {work.requests_per_user:g} requests a day, "
        f"{work.prompt_tokens:,.0f} in / {work.output_tokens:,.0f} out"
    )
    rows = _figures(title, "per second", "requests", "input tokens", "of them cached", "output tokens")
    for name, rate in (("average", work.average), (f"peak (x {work.peak_factor:g})", work.peak)):
        figures = (rate.input_tokens, rate.cached_tokens, rate.output_tokens)
        rows.add_row(name, number(rate.requests, 2), *(number(figure, 0) for figure in figures))
    return rows


def shown(plan: Plan) -> list[Candidate]:
    """The cheapest number formats of each layout, the cheapest layouts first."""
    layouts: dict[tuple[str, int, int], Candidate] = {}
    for candidate in plan.candidates:
        layouts.setdefault(candidate.layout, candidate)
    return list(layouts.values())


def _deployments(plan: Plan, every: bool) -> Table:
    from penstock.bench.report import number
    from penstock.planning.candidate import objectives

    money = plan.best is not None and plan.best.monthly >= 1
    columns = ["replica", "weights/KV", "replicas", "devices", "TTFT ms", "ITL"]
    columns += ["$/month", "$/1M in", "out"] if money else []
    rows = _figures(f"Deployments that keep {objectives(plan.slo)}, the cheapest first", *columns)
    rows.padding = (0, 1, 0, 0)
    listed = list(plan.candidates) if every else shown(plan)[:_SHOWN]
    for candidate in listed:
        fleet, now, tokens = candidate.fleet, candidate.steady, candidate.tokens
        paid = (number(candidate.monthly, 0), number(tokens.input, 3), number(tokens.output, 3))
        rows.add_row(
            layout(candidate.deployment),
            formats(candidate.deployment),
            f"{fleet.replicas:,}",
            f"{fleet.devices:,}",
            number(now.ttft_s * 1e3, 0),
            number(now.itl_s * 1e3, 1),
            *(paid if money else ()),
            style="bold" if candidate is plan.best else None,
        )
    if len(listed) < len(plan.candidates):
        rows.caption = f"{len(plan.candidates) - len(listed)} more, in other number formats and layouts: --every"
    return rows


def layout(made: Deployment) -> str:
    """`h100 x8`, and the stages of a pipeline if it has several."""
    if made.device.kind == "cpu":
        return made.device.name
    stages = f", PP {made.pipeline_parallel}" if made.pipeline_parallel > 1 else ""
    return f"{made.device.name} x{made.devices}{stages}"


def formats(made: Deployment) -> str:
    return f"{made.weights.name}/{made.kv_format}"


def summary(plan: Plan, best: Candidate) -> list[tuple[str, str]]:
    """The best deployment in words and figures."""
    fleet, memory, headroom = best.fleet, best.memory, plan.options.headroom
    users = best.most.requests_per_s * headroom.utilisation * 86_400 / plan.workload.peak_factor
    users /= plan.workload.requests_per_user
    concurrency = ", ".join(f"{count:,} at {length:,}" for length, count in plan.concurrency)
    rows = [
        (
            "fleet",
            f"{counted(fleet.replicas, 'replica')} of {best.label}: {counted(fleet.devices, 'device')} in "
            f"{counted(fleet.nodes, 'node')}, {headroom.spare_replicas} of the replicas spare",
        ),
        (
            "memory per device",
            f"weights {memory.weights / GIB:.1f} GiB, {_adapters(memory)}KV cache {memory.kv_room / GIB:.1f}"
            f"{_states(memory)}, runtime and activations {(memory.runtime + memory.activations) / GIB:.1f}, of "
            f"{memory.capacity / GIB:.1f}",
        ),
        ("KV cache of a replica", f"{memory.kv_tokens:,} tokens; sequences at a context length: {concurrency}"),
        (
            "one replica at most",
            f"{best.most.requests_per_s:.2f} requests/s, {best.most.output_tps:,.0f} output tokens/s, "
            f"limited by {limit_name(best.most.limited_by)}; {users:,.0f} users a day with headroom",
        ),
        (
            "at the planned peak",
            f"TTFT {best.steady.ttft_s * 1e3:,.0f} ms (p95), {best.steady.itl_s * 1e3:.1f} ms per token, "
            f"{best.steady.e2e_s:.1f} s per answer, {best.steady.concurrency:.3g} requests running in a replica",
        ),
        (
            "utilisation over the day",
            f"{fleet.utilisation:.0%} static, {fleet.autoscaled_utilisation:.0%} autoscaled",
        ),
    ]
    average = round(plan.workload.prompt_tokens + plan.workload.output_tokens)
    if best.deployment.shared_prefix:
        shared, alone = memory.concurrency(average), memory.without_sharing(average)
        rows.append(("prefix sharing", f"{shared:,} requests of average length in the cache instead of {alone:,}"))
    if best.deployment.host_memory:
        rows.append(("host memory", f"{memory.host_sequences(average):,} more of them kept for their next turn"))
    return rows


def _adapters(memory: MemoryPlan) -> str:
    slots = memory.deployment.adapter_slots
    return f"{slots} adapters {memory.adapters / GIB:.1f}, " if slots else ""


def _states(memory: MemoryPlan) -> str:
    return f" ({memory.states / GIB:.1f} of it for states)" if memory.states else ""


def counted(count: int, noun: str) -> str:
    return f"{count:,} {noun}" if count == 1 else f"{count:,} {noun}s"


def limit_name(limit: str) -> str:
    return {"ttft": "the TTFT objective", "itl": "the objective per token"}.get(limit, limit)


def _summary(plan: Plan, best: Candidate) -> Table:
    return _pairs("The cheapest", summary(plan, best))


def bill_rows(best: Candidate) -> list[tuple[str, float, float]]:
    """The lines of the month's bill: static provisioning, and a fleet that follows the day."""
    static, scaled = best.static, best.autoscaled
    return [
        ("GPUs", static.gpus.dollars, scaled.gpus.dollars),
        ("operations", static.operations, scaled.operations),
        ("egress", static.egress, scaled.egress),
        ("storage", static.storage, scaled.storage),
        ("total", static.total, scaled.total),
    ]


def _bill(plan: Plan, best: Candidate) -> Table:
    from penstock.bench.report import number

    rows = _figures("Bill of a month, dollars", "", "static", "autoscaled")
    for name, *figures in bill_rows(best):
        rows.add_row(name, *(number(figure, 0) for figure in figures), style="bold" if name == "total" else None)
    rows.add_row("GPU hours", number(best.static.gpus.hours, 0), number(best.autoscaled.gpus.hours, 0))
    return rows


def api_lines(api: ApiComparison, plan: Plan) -> list[tuple[str, str]]:
    def level(requests: float | None) -> str:
        return "never" if requests is None else f"from {requests:,.0f} requests a day"

    return [
        ("API", f"{api.price.name}: ${api.monthly:,.0f} a month, ${api.per_request * 1e3:.3g} per 1,000 requests"),
        ("self-hosting is cheaper", f"{level(api.break_even)}; autoscaled {level(api.autoscaled_break_even)}"),
        ("this workload", f"{plan.workload.requests_per_day:,.0f} requests a day"),
    ]


def _api(api: ApiComparison, plan: Plan) -> Table:
    return _pairs("Against an API", api_lines(api, plan))


def _sensitivity(plan: Plan, best: Candidate) -> Table:
    rows = _figures("What the bill depends on, one input at a time", "input", "lower", "$/month", "higher", "$/month")
    for row in plan.sensitivity:
        ends = []
        for end in (row.low, row.high):
            ends += [end.value, "too much" if end.monthly is None else f"{end.monthly:,.0f}"]
        rows.add_row(row.name, *ends)
    return rows


def _rejected(plan: Plan, most: int | None) -> Table:
    rows = [(one.label, one.reason) for one in plan.rejected[:most]]
    if most is not None and len(plan.rejected) > most:
        rows.append((f"... {len(plan.rejected) - most} more: --every", ""))
    return _pairs("Out", rows)


def _assumptions(plan: Plan) -> Table:
    from rich.table import Table

    table = Table(
        title="Assumptions", title_justify="left", title_style="bold", header_style="dim", box=None, pad_edge=False,
        padding=(0, 2, 0, 0),
    )  # fmt: skip
    for column in ("what", "value", "source"):
        table.add_column(column, overflow="fold")
    for one in plan.assumptions:
        table.add_row(one.what, one.value, one.source)
    return table


def _figures(title: str, *columns: str) -> Table:
    """Names on the left, figures on the right; narrow enough for 80 columns."""
    from rich.table import Table

    table = Table(
        title=title, title_justify="left", title_style="bold", header_style="dim", box=None, pad_edge=False,
        padding=(0, 2, 0, 0), caption_justify="left",
    )  # fmt: skip
    for index, column in enumerate(columns):
        table.add_column(column, justify="left" if index == 0 else "right", no_wrap=True)
    return table


def _pairs(title: str, rows: list[tuple[str, str]]) -> Table:
    from rich.table import Table

    table = Table(
        title=title,
        title_justify="left",
        title_style="bold",
        show_header=False,
        box=None,
        pad_edge=False,
        padding=(0, 2, 0, 0),
    )
    table.add_column()
    table.add_column(overflow="fold")
    for row in rows:
        table.add_row(*row)
    return table
