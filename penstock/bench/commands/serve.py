"""`penstock bench serve`: its options, and which of them go together."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from penstock.bench.options import ApiKey, Arrivals, Html, Json, VocabSize, console, finite


def serve(
    url: Annotated[str, typer.Option(help="Server's address.")] = "http://127.0.0.1:8000",
    model: Annotated[str | None, typer.Option("--model", "-m", help="Default: the first the server lists.")] = None,
    concurrency: Annotated[
        int | None, typer.Option("--concurrency", "-c", min=1, help="Closed loop: requests in flight. Default: 16.")
    ] = None,
    rate: Annotated[
        float | None,
        typer.Option(
            min=0.001, callback=finite, help="Open loop: requests per second, whether or not they are served."
        ),
    ] = None,
    arrivals: Annotated[
        Arrivals | None, typer.Option(help="How they arrive at that rate. Default: poisson.", show_default=False)
    ] = None,
    burst: Annotated[int | None, typer.Option(min=1, help="Requests of a burst. Default: 8.")] = None,
    trace: Annotated[
        Path | None,
        typer.Option(help="Open loop: times and lengths from a file (JSON lines or CSV: at, input_len, output_len)."),
    ] = None,
    speed: Annotated[
        float | None, typer.Option(min=0.001, callback=finite, help="Replay the trace this many times as fast.")
    ] = None,
    most_in_flight: Annotated[
        int | None, typer.Option(min=1, help="Open loop: beyond it requests wait, and are counted. Default: 1024.")
    ] = None,
    requests: Annotated[
        int | None,
        typer.Option("--requests", "-n", min=1, help="Default: 4 per slot, 30 seconds at a rate, a whole trace."),
    ] = None,
    input_len: Annotated[int | None, typer.Option(min=1, help="Prompt tokens of a request. Default: 128.")] = None,
    output_len: Annotated[int | None, typer.Option(min=1, help="Output tokens of a request. Default: 128.")] = None,
    slo_ttft: Annotated[float | None, typer.Option(min=0.0, help="Goodput: first token within this many ms.")] = None,
    slo_tpot: Annotated[float | None, typer.Option(min=0.0, help="Goodput: ms per further token, at most.")] = None,
    slo_e2e: Annotated[float | None, typer.Option(min=0.0, help="Goodput: last token within this many ms.")] = None,
    slo_gap: Annotated[
        float | None, typer.Option(min=0.0, help="Goodput: ms for 99% of the gaps of a request.")
    ] = None,
    temperature: Annotated[float, typer.Option(min=0.0, help="0 is greedy.")] = 0.0,
    seed: Annotated[int, typer.Option(help="Of prompts and arrivals; another avoids the server's prefix cache.")] = 0,
    warm_up: Annotated[int | None, typer.Option(min=0, help="Short requests first. Default: 1 a slot, or 16.")] = None,
    timeout: Annotated[float, typer.Option(min=1.0, help="Seconds allowed for one request.")] = 300.0,
    vocab_size: VocabSize = None,
    api_key: ApiKey = None,
    json_file: Json = None,
    html_file: Html = None,
) -> None:
    """
    Load on a running OpenAI-compatible server, closed or open loop: TTFT, ITL, end-to-end percentiles, goodput, errors.

    Examples:

        penstock bench serve --url http://127.0.0.1:8000 --concurrency 16

        penstock bench serve -c 64 --requests 256 --input-len 512 --output-len 64 --json results.json

        penstock bench serve --rate 5 --slo-ttft 500 --slo-tpot 50 --html report.html

        penstock bench serve --rate 20 --arrivals burst --burst 40 --requests 400

        penstock bench serve --trace requests.jsonl --speed 2

        penstock bench serve --url https://api.example.com --model my-model --api-key $KEY --vocab-size 100000
    """
    from penstock.bench import serve as load
    from penstock.bench.goodput import Objectives

    open_loop = rate is not None or trace is not None
    refused = {
        "--rate and --trace exclude each other": rate is not None and trace is not None,
        "--concurrency is for a closed loop; an open one has --most-in-flight": open_loop and concurrency is not None,
        "--most-in-flight is for an open loop (--rate, --trace)": not open_loop and most_in_flight is not None,
        "--arrivals needs --rate": rate is None and arrivals is not None,
        "--burst needs --arrivals burst": arrivals is not Arrivals.burst and burst is not None,
        "--speed needs --trace": trace is None and speed is not None,
        "a trace has its own lengths": trace is not None and (input_len or output_len) is not None,
    }
    for reason in (reason for reason, applies in refused.items() if applies):
        raise typer.BadParameter(reason)
    seconds = [None if limit is None else limit / 1e3 for limit in (slo_ttft, slo_tpot, slo_e2e, slo_gap)]
    settings = load.ServeBenchSettings(
        url=url,
        model=model,
        concurrency=concurrency or 16,
        requests=requests,
        input_len=input_len or 128,
        output_len=output_len or 128,
        rate=rate,
        pattern=(arrivals or Arrivals.poisson).value,
        burst=burst or 8,
        trace=trace,
        speed=speed or 1.0,
        most_in_flight=most_in_flight or 1024,
        objectives=Objectives(*seconds),
        temperature=temperature,
        seed=seed,
        warm_up=warm_up,
        timeout_s=timeout,
        vocab_size=vocab_size,
    )
    if not load.main(settings, api_key, json_file, html_file, console()):
        raise typer.Exit(1)
