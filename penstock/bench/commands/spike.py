"""`penstock bench spike`."""

from __future__ import annotations

from typing import Annotated

import typer

from penstock.bench.options import Chart, console


def spike(
    rate: Annotated[float, typer.Option(min=0.1, help="Requests per second before and after.")] = 6.0,
    factor: Annotated[float, typer.Option(min=1.0, help="How many times as many in the burst.")] = 10.0,
    before: Annotated[float, typer.Option(min=0.0, help="Seconds before the burst.")] = 15.0,
    burst: Annotated[float, typer.Option(min=0.1, help="Seconds of the burst.")] = 60.0,
    after: Annotated[float, typer.Option(min=0.0, help="Seconds after the burst.")] = 30.0,
    settle: Annotated[float, typer.Option(min=0.0, help="Seconds until all is as before.")] = 10.0,
    slots: Annotated[int, typer.Option(min=1, help="Requests that a replica runs at once.")] = 8,
    tokens: Annotated[int, typer.Option(min=4, help="Mean length of an answer.")] = 40,
    step: Annotated[float, typer.Option(min=0.0001, help="Seconds of an engine's step.")] = 0.022,
    wait: Annotated[float, typer.Option(min=0.1, help="Seconds that a request may wait in the queue.")] = 6.0,
    limit: Annotated[float, typer.Option(min=0.01, help="Premium p95 TTFT must stay below, in seconds.")] = 2.0,
    seed: Annotated[int, typer.Option(help="Of the arrivals.")] = 1,
    chart: Chart = None,
) -> None:
    """
    Ten times the traffic for a minute, on two replicas behind a real gateway: who is served, who is refused, and how.

    Examples:

        penstock bench spike

        penstock bench spike --burst 60 --chart docs/images/spike.svg
    """
    from penstock.bench.gateway import spike as measured

    plan = measured.Spike(rate, factor, before, burst, after, settle, slots, tokens, step, wait, limit, seed)
    if not measured.main(plan, chart, console()):
        raise typer.Exit(1)
