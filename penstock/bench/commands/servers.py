"""`penstock bench servers`."""

from __future__ import annotations

from typing import Annotated

import typer

from penstock.bench.options import ApiKey, Json, VocabSize, console, finite


def servers(
    server: Annotated[
        list[str], typer.Option("--server", metavar="NAME=URL", help="A running server; repeat for each. First: ours.")
    ],
    workload: Annotated[
        list[str] | None, typer.Option("--workload", "-w", help="Workload, all servers in turn; repeat for several.")
    ] = None,
    rate: Annotated[
        list[float] | None,
        typer.Option("--rate", min=0.01, callback=finite, help="Open loop, requests per second; repeat for several."),
    ] = None,
    lengths: Annotated[str, typer.Option(help="Workload whose lengths the requests of open loops have.")] = "mix",
    goodput: Annotated[
        bool, typer.Option("--goodput", help="Also look for the highest rate at which 95% keep the objectives.")
    ] = False,
    slo_ttft: Annotated[float, typer.Option(min=1, help="Objective: ms to the first token.")] = 500.0,
    slo_gap: Annotated[float, typer.Option(min=1, help="Objective: ms for 99% of the gaps of a request.")] = 30.0,
    low: Annotated[float, typer.Option(min=0.01, callback=finite, help="Lowest rate, requests per second.")] = 4.0,
    high: Annotated[float, typer.Option(min=0.02, callback=finite, help="A rate that cannot be kept.")] = 24.0,
    runs: Annotated[int, typer.Option(min=1, help="Rates measured on each server.")] = 5,
    requests: Annotated[int, typer.Option(min=1, help="Requests at each of these rates.")] = 256,
    repeat: Annotated[int, typer.Option(min=1, help="Turns of each server; medians are shown.")] = 3,
    seed: Annotated[int | None, typer.Option(help="Of the prompts. Default: another in every run.")] = None,
    model: Annotated[str | None, typer.Option("--model", "-m", help="Default: the first that each lists.")] = None,
    vocab_size: VocabSize = None,
    api_key: ApiKey = None,
    json_file: Json = None,
) -> None:
    """
    The same prompts on several running OpenAI-compatible servers in turn: speed, latency, goodput, and the ratios.

    Examples:

        penstock bench servers --server penstock=http://127.0.0.1:8000 --server vllm=http://127.0.0.1:8001 -w b1 -w mix

        penstock bench servers --server penstock=http://127.0.0.1:8000 --server vllm=http://127.0.0.1:8001 \\
            --rate 12 --rate 20 --goodput --low 8 --high 20 --json servers.json
    """
    import secrets

    from penstock.bench import servers as measured

    named = [entry.partition("=") for entry in server]
    for (name, equals, url), entry in zip(named, server, strict=True):
        if not (name and equals and url):
            raise typer.BadParameter(f"--server {entry}: write it as NAME=URL")
    if len({name for name, _, _ in named}) < len(named):
        raise typer.BadParameter("--server: every server needs a name of its own")
    if goodput and high <= low:
        raise typer.BadParameter("--high must be above --low")
    search = measured.RateSearch(low, high, runs, requests, slo_ttft / 1e3, slo_gap / 1e3) if goodput else None
    settings = measured.ServersBenchSettings(
        servers=tuple((name, url) for name, _, url in named),
        workloads=tuple(workload or (() if rate or goodput else ("c16",))),
        rates=tuple(rate or ()),
        lengths=lengths,
        search=search,
        repeat=repeat,
        seed=secrets.randbits(31) if seed is None else seed,
        model=model,
        vocab_size=vocab_size,
    )
    measured.main(settings, api_key, json_file, console())
