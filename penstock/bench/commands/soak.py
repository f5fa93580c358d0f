"""`penstock bench soak`."""

from __future__ import annotations

from typing import Annotated

import typer

from penstock.bench.options import Device, Json, console


def soak(
    minutes: Annotated[float, typer.Option(min=0.01, help="How long.")] = 10.0,
    seed: Annotated[int, typer.Option(help="Of all requests and what happens to them.")] = 0,
    rounds: Annotated[int | None, typer.Option(min=1, help="Stop after this many rounds.")] = None,
    start: Annotated[int, typer.Option(min=0, help="Number of the first round, to repeat one that failed.")] = 0,
    requests: Annotated[int, typer.Option(min=1, help="Requests in a round.")] = 60,
    device: Device = "cpu",
    json_file: Json = None,
) -> None:
    """
    Everything at once on tiny random models: adapters, grammars, tool calls, speculation, preemption, the host tier,
    cancellations, deadlines, failing steps. Nothing may leak, and every answer must equal that of the request alone.

    Examples:

        penstock bench soak

        penstock bench soak --minutes 60 --seed 7

        penstock bench soak --minutes 2 --device cuda
    """
    import dataclasses

    from penstock.bench import report as shown
    from penstock.bench.soak.forms import forms
    from penstock.bench.soak.run import Report, Soak, SoakSettings
    from penstock.bench.soak.traffic import VOCABULARY
    from penstock.engine.grammar.guidance import GuidanceCompiler

    screen = console()
    settings = SoakSettings(seed=seed, minutes=minutes, rounds=rounds, start=start, requests=requests, device=device)
    with screen.status("starting") as status:

        def tell(report: Report, what: str) -> None:
            done = f"{report.seconds / 60:.1f} of {minutes:g} min, {report.requests:,} requests compared"
            status.update(f"{done}; {what}")

        report = Soak(settings, forms(), lambda size: GuidanceCompiler(VOCABULARY, size), tell).run()
    screen.print(shown.machine_line())
    table = shown.table(f"Soak, seed {seed}, {report.seconds / 60:.1f} minutes", "what", "how often")
    rows = {"rounds": report.rounds, "requests compared": report.requests, "tokens compared": report.tokens}
    rows |= {"wrong answers": 0, "leaked blocks, rows, slots": 0, "tokens that were ties": report.ties}
    for name, count in (rows | {"steps made to fail": report.faults} | dict(sorted(report.counts.items()))).items():
        table.add_row(name, f"{count:,}")
    table.add_row("MiB at the end", f"{report.memory_mib:,.0f}")
    table.add_row("MiB more than after a quarter", f"{report.growth_mib:+,.1f}")
    screen.print(table)
    if json_file is not None:
        shown.write_json(json_file, "soak", dataclasses.asdict(settings), report.as_dict())
