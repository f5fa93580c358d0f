"""`penstock trace`: the timeline of one request as bars; without an id, a list of the newest requests."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from penstock.cli.admin import DEFAULT_URL, Url
from penstock.cli.lists import Column, show

if TYPE_CHECKING:
    from rich.table import Table
    from rich.text import Text

Key = Annotated[
    str | None,
    typer.Option(envvar="PENSTOCK_API_KEY", help="API key; the scope `admin` shows all tenants.", show_envvar=True),
]
COLORS = {
    "receive": "cyan",
    "authenticate": "cyan",
    "prepare": "cyan",
    "limits": "cyan",
    "admission": "magenta",
    "queue": "yellow",
    "prefill": "blue",
    "decode": "green",
    "engine": "red",
}
LEAST_WIDTH = 12
FIGURES = 36
"""Terminal columns taken by names and numbers."""


def trace(
    request_id: Annotated[
        str | None, typer.Argument(help="The `x-request-id` of a reply; without it, the newest requests are listed.")
    ] = None,
    url: Url = DEFAULT_URL,
    key: Key = None,
    output: Annotated[
        Literal["bars", "table", "json", "csv"],
        typer.Option("--output", "-o", help="A request: bars or json. The list: table, json or csv."),
    ] = "bars",
    limit: Annotated[int, typer.Option(min=1, max=1000, help="Number of requests to list.")] = 20,
) -> None:
    """
    Show where the time of a request went.

    A running server keeps its newest requests (`telemetry.recent_requests`). The engine's phases are measured by the
    engine's own clock.

    Examples:

        penstock trace

        penstock trace req_0b9c4e7f

        penstock trace req_0b9c4e7f -o json
    """
    import json
    from urllib.parse import quote

    from penstock.cli.admin import call
    from penstock.cli.terminal import stdout
    from penstock.errors import PenstockError

    if request_id is not None and output not in ("bars", "json"):
        raise PenstockError(f"--output {output} is for the list; one request is shown as bars or json")
    path = f"?limit={limit}" if request_id is None else f"/{quote(request_id, safe='')}"
    found = call("GET", url, key, path, under="/v1/traces")
    if request_id is None:
        show(_columns(), found["data"], "table" if output == "bars" else output, empty="No requests yet.")
    elif output == "json":
        typer.echo(json.dumps(found, indent=2))
    else:
        console = stdout()
        console.print(_summary(found), highlight=False)
        console.print(_bars(found, console.width))


def _summary(found: dict[str, Any]) -> Text:
    from rich.text import Text

    model = found["adapter_id"] or found["model_version"] or "-"
    tokens = f"{found['prompt_tokens']} prompt ({found['cached_tokens']} cached) + {found['completion_tokens']} tokens"
    ttft = "-" if found["ttft_ms"] is None else f"{found['ttft_ms']:.1f} ms"
    ended = f"{found['status']} {found['finish_reason'] or ''}".strip()
    lines = [
        f"  {found['route']}  {model}  {ended}",
        f"{tokens}  first token {ttft}  total {found['total_latency_ms']:.1f} ms",
    ]
    rest = "\n".join(lines + ([f"trace {found['trace_id']}"] if found["trace_id"] else []))
    return Text.assemble((found["request_id"], "bold"), rest)


def _bars(found: dict[str, Any], width: int) -> Table:
    from rich.table import Table
    from rich.text import Text

    total = max([found["total_latency_ms"], *(p["start_ms"] + p["duration_ms"] for p in found["phases"])], default=0)
    details = [_detail(phase["detail"]) for phase in found["phases"]]
    room = max(LEAST_WIDTH, width - FIGURES - max(map(len, details), default=0))
    scale = room / total if total else 0.0
    table = Table(box=None, pad_edge=False)
    table.add_column("phase", no_wrap=True)
    table.add_column("start", justify="right", no_wrap=True)
    table.add_column("ms", justify="right", no_wrap=True)
    table.add_column("", no_wrap=True, min_width=room)
    table.add_column("", style="dim", no_wrap=True)
    for phase, detail in zip(found["phases"], details, strict=True):
        start = min(round(phase["start_ms"] * scale), room - 1)
        length = max(1, min(round(phase["duration_ms"] * scale), room - start))
        bar = Text(" " * start).append("█" * length, COLORS.get(phase["name"], "white"))
        table.add_row(phase["name"], f"{phase['start_ms']:.1f}", f"{phase['duration_ms']:.1f}", bar, detail)
    return table


def _detail(detail: dict[str, Any]) -> str:
    words = []
    if "prompt_tokens" in detail:
        words.append(f"{detail['prompt_tokens']} tokens, {detail['cached_tokens']} cached")
    if "completion_tokens" in detail:
        words.append(f"{detail['completion_tokens']} tokens")
    words += [str(detail[name]) for name in ("outcome", "for") if detail.get(name)]
    if detail.get("choice"):
        words.append(f"choice {detail['choice']}")
    if detail.get("engine", "0") != "0":
        words.append(f"replica {detail['engine']}")
    words += [f"{name} {detail[name]}" for name in ("pool", "region") if detail.get(name)]
    if detail.get("why"):
        words.append(f"({detail['why']})")
    return ", ".join(words)


def _columns() -> list[Column[dict[str, Any]]]:
    return [
        Column("time", lambda found: found["timestamp"], _when, rank=2),
        Column("request", lambda found: found["request_id"], rank=0),
        Column("tenant", lambda found: found["tenant"], rank=4),
        Column("model", lambda found: found["adapter_id"] or found["model_version"], rank=3),
        Column("finish", lambda found: found["finish_reason"] or str(found["status"]), rank=1),
        Column("prompt", lambda found: found["prompt_tokens"], rank=5),
        Column("completion", lambda found: found["completion_tokens"], rank=5),
        Column("ttft ms", lambda found: found["ttft_ms"], lambda found: _ms(found["ttft_ms"]), rank=2),
        Column(
            "total ms", lambda found: found["total_latency_ms"], lambda found: _ms(found["total_latency_ms"]), rank=1
        ),
        Column("longest", _longest, rank=3),
    ]


def _when(found: dict[str, Any]) -> str:
    from datetime import UTC, datetime

    return datetime.fromtimestamp(found["timestamp"], UTC).strftime("%H:%M:%S")


def _ms(milliseconds: float | None) -> str:
    return "-" if milliseconds is None else f"{milliseconds:.1f}"


def _longest(found: dict[str, Any]) -> str | None:
    longest = max(found["phases"], key=lambda phase: phase["duration_ms"], default=None)
    return None if longest is None else f"{longest['name']} {longest['duration_ms']:.0f} ms"
