"""`penstock bench goodput`."""

from __future__ import annotations

from typing import Annotated

import typer

from penstock.bench.options import Device, Json, Model, Weights, WeightsOption, console, finite


def goodput(
    model: Model = "smollm2-135m",
    shape: Annotated[str | None, typer.Option(help="Random weights of a named shape instead of a model.")] = None,
    device: Device = "auto",
    weights: WeightsOption = Weights.auto,
    workload: Annotated[str, typer.Option("--workload", "-w", help="Lengths of the requests.")] = "mix",
    requests: Annotated[int, typer.Option(min=20, help="Requests at each rate.")] = 256,
    target: Annotated[
        list[str] | None,
        typer.Option("--target", help="target_gap_ms, off, or default: what is held without one; repeat for several."),
    ] = None,
    slo_ttft: Annotated[float, typer.Option(min=1, help="Objective: ms to the first token.")] = 500.0,
    slo_gap: Annotated[float, typer.Option(min=1, help="Objective: ms for 99% of the gaps of a request.")] = 30.0,
    low: Annotated[float, typer.Option(min=0.01, callback=finite, help="Lowest rate, requests per second.")] = 4.0,
    high: Annotated[float, typer.Option(min=0.02, callback=finite, help="A rate that cannot be kept.")] = 24.0,
    runs: Annotated[int, typer.Option(min=1, help="Rates measured per target.")] = 5,
    token_budget: Annotated[int | None, typer.Option(min=1, help="Most tokens computed in one step.")] = None,
    max_model_len: Annotated[int | None, typer.Option(min=1, help="Context window.")] = None,
    closed: Annotated[
        bool, typer.Option("--closed/--no-closed", help="Also run all requests at once: what a target costs.")
    ] = True,
    json_file: Json = None,
) -> None:
    """
    Highest rate of arrivals at which 95% of the requests keep their objectives, for several gap targets.

    Examples:

        penstock bench goodput --low 0.2 --high 4 --slo-ttft 2000 --slo-gap 150

        penstock bench goodput --shape llama-8b --device cuda --target off --target 30 --target 60
    """
    import dataclasses

    from penstock.bench import offline, open_loop, report, workloads
    from penstock.bench.engine import run
    from penstock.bench.goodput import AtRate, highest_rate

    if high <= low:
        raise typer.BadParameter("--high must be above --low")
    out = console()
    shaped = dataclasses.replace(workloads.named(workload), requests=requests)
    settings = offline.OfflineBenchSettings(
        model=model, shape=shape, device=device, weights=weights.value, token_budget=token_budget,
        max_model_len=max_model_len,
    )  # fmt: skip
    loaded = offline.load(settings, [shaped], out)
    engine = loaded.engine
    out.print(f"[bold]{loaded.label}[/bold] on {engine.info.device}, {loaded.numbers}: {report.machine_line()}")
    out.print(
        f"{requests} requests of the lengths of {workload}, at random times. Kept: the first token within "
        f"{slo_ttft:g} ms and 99% of the gaps of a request within {slo_gap:g} ms, for 95% of the requests."
    )
    phases = ", ".join(f"{phase} {seconds:.1f}" for phase, seconds in engine.info.startup.items())
    out.print(f"Ready in {loaded.seconds:.1f} s ({phases})", style="dim")
    run(engine, shaped, salt="warm-up", progress=lambda _: None)
    rows = report.table(
        "Open loop",
        *("target ms", "requests/s", "kept", "TTFT p50 ms", "p99 ms", "gap p50 ms", "p99 ms", "output tok/s"),
    )
    results: list[open_loop.Goodput] = []
    pace = engine.scheduler.pace
    default_s, default_yields_s = pace.target_s, pace.yields_s
    for wanted in target or ["off", "default", f"{slo_gap:g}"]:
        pace.default = wanted == "default"
        pace.yields_s = default_yields_s if pace.default else None
        if pace.default:
            pace.target_s = default_s
        else:
            pace.target_s = None if wanted == "off" else float(wanted) / 1e3

        def measure(rate: float, wanted: str = wanted) -> AtRate:
            with out.status(f"target {wanted}: {rate:.1f} requests/s"):
                found = open_loop.at_rate(engine, shaped, rate, slo_ttft / 1e3, slo_gap / 1e3, f"{wanted}-{rate}")
            rows.add_row(
                wanted,
                f"{found.rate:.1f}",
                report.share(found.kept),
                *(report.number(1e3 * value) for value in (found.ttft.p50, found.ttft.p99)),
                *(report.number(1e3 * value) for value in (found.gap.p50, found.gap.p99)),
                report.number(found.tokens_per_s),
            )
            out.print(f"target {wanted}: {found.rate:.1f} requests/s, {report.share(found.kept)} kept", style="dim")
            return found

        best, measured = highest_rate(measure, low, high, runs)
        throughput = None
        if closed:
            trace = run(engine, shaped, salt=f"closed-{wanted}", progress=lambda _: None)
            throughput = sum(outputs for _, outputs in shaped.lengths()) / trace.seconds
        results.append(open_loop.Goodput(wanted, best, throughput, measured))
    out.print(rows)
    first = results[0]
    summary = report.table("Highest rate kept", "target ms", "requests/s", "ratio", "all at once, tok/s", "ratio")
    for result in results:
        summary.add_row(
            result.target,
            f"{result.highest:.1f}",
            f"{result.highest / first.highest:.2f}" if first.highest else "–",
            report.number(result.at_once),
            f"{result.at_once / first.at_once:.3f}" if result.at_once and first.at_once else "–",
        )
    out.print(summary)
    if json_file is not None:
        report.write_json(
            json_file, "goodput", dataclasses.asdict(settings), [dataclasses.asdict(result) for result in results]
        )
