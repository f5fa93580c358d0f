"""`penstock simulate`: a fleet and its traffic on a virtual clock."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from penstock.bench.options import Json, reported


class Comparison(StrEnum):
    policies = "policies"
    autoscale = "autoscale"
    pools = "pools"


class Reality(StrEnum):
    engine = "engine"
    engine_cpu_time = "engine-cpu-time"


Html = Annotated[Path | None, typer.Option("--html", metavar="FILE", help="Also write a page with plots to FILE.")]
Chart = Annotated[
    Path | None, typer.Option(metavar="FILE", help="Also write the comparison, or the plots over time, to FILE (SVG).")
]
Milliseconds = Annotated[float | None, typer.Option(min=0.0, metavar="MS")]


@reported
def simulate(
    scenario: Annotated[
        Path | None, typer.Argument(help="Scenario file (YAML); options go over it. See examples/simulate/.")
    ] = None,
    model: Annotated[
        str | None, typer.Option("--model", "-m", help="Model: a name, a folder, a config.json or a GGUF file.")
    ] = None,
    gpu: Annotated[
        str | None,
        typer.Option("--gpu", "--hardware", help="Device of the catalogue: `penstock plan --hardware list`."),
    ] = None,
    tensor_parallel: Annotated[
        int | None, typer.Option("--tensor-parallel", "--tp", help="Devices per replica.")
    ] = None,
    replicas: Annotated[int | None, typer.Option(help="Replicas at the beginning, 1 to 1000.")] = None,
    policy: Annotated[str | None, typer.Option(help="How a replica is chosen (routing.policy).")] = None,
    rate: Annotated[float | None, typer.Option(help="Open loop: requests (or conversations) per second.")] = None,
    users: Annotated[int | None, typer.Option(help="Open loop: daily users, of 10 requests each.")] = None,
    concurrency: Annotated[
        int | None, typer.Option("--concurrency", "-c", help="Closed loop: requests in flight.")
    ] = None,
    trace: Annotated[
        Path | None, typer.Option(help="Open loop: times and lengths from a file, as for `penstock bench serve`.")
    ] = None,
    duration: Annotated[
        str | None, typer.Option(help="Simulated time: seconds, or 90s, 10m, 24h. Default: 10m.", show_default=False)
    ] = None,
    input_len: Annotated[int | None, typer.Option(help="Mean prompt tokens. Default: 512.")] = None,
    output_len: Annotated[int | None, typer.Option(help="Mean output tokens. Default: 128.")] = None,
    turns: Annotated[float | None, typer.Option(help="Mean turns of a conversation. Default: 1.")] = None,
    slo_ttft: Annotated[float | None, typer.Option(min=0.0, help="Goodput: first token within this many ms.")] = None,
    slo_tpot: Annotated[float | None, typer.Option(min=0.0, help="Goodput: ms per further token, at most.")] = None,
    slo_e2e: Annotated[float | None, typer.Option(min=0.0, help="Goodput: last token within this many ms.")] = None,
    seed: Annotated[int | None, typer.Option(help="Of everything random. Default: 1.")] = None,
    settings: Annotated[
        list[str] | None,
        typer.Option("--set", "-s", metavar="KEY=VALUE", help="Set any key of a scenario; may be repeated."),
    ] = None,
    compare: Annotated[
        Comparison | None,
        typer.Option(
            help="policies: all replica policies on the same traffic. autoscale: our autoscaler beside fixed fleets "
            "and a plain HPA. pools: the scenario's pools beside the same replicas without pools."
        ),
    ] = None,
    against: Annotated[
        Reality | None,
        typer.Option(
            help="engine: calibrate on this machine, run the real engine on a trace, and simulate the same. "
            "engine-cpu-time: one thread, measured in processor time, for a machine that others use too."
        ),
    ] = None,
    json_file: Json = None,
    html_file: Html = None,
    chart: Chart = None,
) -> None:
    """
    Simulate a fleet: the real scheduler, KV blocks, replica policies, admission and autoscaler on a virtual clock, with
    modelled step times. Reports latency per tenant, goodput, refusals, cache hits, GPU hours and money.

    Examples:

        penstock simulate examples/simulate/spike.yaml --html spike.html

        penstock simulate --model llama-3-8b --gpu h200 --replicas 4 --rate 12 --duration 600

        penstock simulate --model llama-3-70b --gpu h100 --tp 4 --replicas 2 --rate 5 --slo-ttft 1000

        penstock simulate examples/simulate/conversation.yaml --compare policies --chart policies.svg

        penstock simulate examples/simulate/day-with-launch.yaml --compare autoscale --html day.html

        penstock simulate examples/simulate/spike.yaml --set admission.wait_s=3 --set workload.spikes.0.factor=20

        penstock simulate examples/simulate/long-prompts.yaml --compare pools

        penstock simulate --against engine
    """
    from penstock.bench.options import console
    from penstock.simulation import command
    from penstock.simulation.scenario import load

    if trace is not None and (input_len is not None or output_len is not None):
        raise typer.BadParameter("a trace has its own lengths")
    if trace is not None and concurrency is not None:
        raise typer.BadParameter("--trace is an open loop and --concurrency a closed one; give one of them")
    if compare is not None and against is not None:
        raise typer.BadParameter("--compare and --against exclude each other")
    flags = {
        "model": model,
        "hardware": gpu,
        "engine.tensor_parallel": tensor_parallel,
        "replicas": replicas,
        "routing.policy": policy,
        "workload.rate": rate,
        "workload.users": users,
        "workload.concurrency": concurrency,
        "workload.arrivals": "closed" if concurrency is not None else "trace" if trace is not None else None,
        "workload.trace": trace,
        "duration_s": None if duration is None else seconds(duration),
        "workload.input_tokens": input_len,
        "workload.output_tokens": output_len,
        "workload.turns": turns,
        "objectives.ttft_s": None if slo_ttft is None else slo_ttft / 1e3,
        "objectives.per_token_s": None if slo_tpot is None else slo_tpot / 1e3,
        "objectives.latency_s": None if slo_e2e is None else slo_e2e / 1e3,
        "seed": seed,
    }
    given = {key: str(value) for key, value in flags.items() if value is not None}
    given |= dict(assignment(text) for text in settings or ())
    outputs = command.Outputs(json_file, html_file, chart)
    if against is not None:
        if scenario is not None:
            raise typer.BadParameter("--against engine makes its own trace; leave the scenario out")
        kept = command.compare_with_engine(given, against is Reality.engine_cpu_time, outputs, console())
    elif scenario is None and not given:
        raise typer.BadParameter("name a scenario file (examples/simulate/ has some), or give at least --rate")
    else:
        kept = command.run(load(scenario, given), None if compare is None else compare.value, outputs, console())
    if not kept:
        raise typer.Exit(1)


def seconds(text: str) -> float:
    """`90`, `90s`, `10m` or `24h`."""
    units = {"s": 1.0, "m": 60.0, "h": 3600.0, "d": 86_400.0}
    number, unit = (text[:-1], units[text[-1]]) if text and text[-1] in units else (text, 1.0)
    try:
        found = float(number) * unit
    except ValueError:
        found = 0.0
    if not 0 < found < float("inf"):
        raise typer.BadParameter(f"--duration {text}: write seconds, or 90s, 10m, 24h")
    return found


def assignment(text: str) -> tuple[str, str]:
    key, equals, value = text.partition("=")
    if not equals or not key:
        raise typer.BadParameter(f"--set {text}: write it as KEY=VALUE, such as workload.rate=5")
    return key, value
