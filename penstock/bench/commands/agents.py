"""`penstock bench agents`: its options, and which of them go together."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated

import typer

from penstock.bench.options import ApiKey, Html, Json, Shape, VocabSize, console


class ApiChoice(StrEnum):
    completions = "completions"
    chat = "chat"


def agents(
    url: Annotated[str | None, typer.Option(help="Server's address. Default: http://127.0.0.1:8000.")] = None,
    own_server: Annotated[bool, typer.Option("--serve", help="Start a server here for the run instead.")] = False,
    model: Annotated[
        str | None,
        typer.Option("--model", "-m", help="Default: the first the server lists; with --serve: smollm2-135m."),
    ] = None,
    shape: Shape = None,
    device: Annotated[str | None, typer.Option(help="Of --serve: auto, cpu, cuda or cuda:N.")] = None,
    server_settings: Annotated[
        list[str] | None,
        typer.Option("--set", "-s", metavar="KEY=VALUE", help="Of --serve: set a key of the server."),
    ] = None,
    concurrency: Annotated[int, typer.Option("--concurrency", "-c", min=1, help="Conversations at once.")] = 64,
    conversations: Annotated[
        int | None, typer.Option("--conversations", "-n", min=1, help="In all. Default: as many as at once.")
    ] = None,
    turns: Annotated[int, typer.Option(min=1, help="Turns of a conversation.")] = 20,
    tokens: Annotated[int, typer.Option(min=2, help="Tokens of a conversation at its end.")] = 40_000,
    output_len: Annotated[int, typer.Option(min=1, help="Tokens of every answer.")] = 200,
    first_len: Annotated[
        int | None, typer.Option(min=1, help="Tokens of the first prompt. Default: what other turns add.")
    ] = None,
    shared_len: Annotated[
        int, typer.Option(min=0, help="Tokens that all conversations begin with; part of the first prompt.")
    ] = 0,
    pause: Annotated[
        tuple[float, float], typer.Option(min=0.0, help="Seconds that tools take between turns: from, to.")
    ] = (2.0, 20.0),
    speed: Annotated[float, typer.Option(min=0.001, help="Pauses are this many times as short.")] = 1.0,
    api: Annotated[
        ApiChoice, typer.Option(help="completions: token ids, exact lengths. chat: messages.")
    ] = ApiChoice.completions,
    ignore_eos: Annotated[
        bool, typer.Option("--ignore-eos/--no-ignore-eos", help="Ask for answers of full length.")
    ] = True,
    session_header: Annotated[
        str | None, typer.Option(metavar="NAME", help="Also send the session's key in this header.")
    ] = None,
    temperature: Annotated[float, typer.Option(min=0.0, help="0 is greedy.")] = 0.0,
    seed: Annotated[
        int, typer.Option(help="Of texts, sizes and pauses; another avoids the server's prefix cache.")
    ] = 0,
    warm_up: Annotated[int | None, typer.Option(min=0, help="Short requests first. Default: 1 a conversation.")] = None,
    timeout: Annotated[float, typer.Option(min=1.0, help="Seconds allowed for one turn.")] = 300.0,
    seconds: Annotated[
        float | None, typer.Option(min=1.0, help="Send no turn after so long, and report what there is.")
    ] = None,
    goal_cached: Annotated[
        float | None,
        typer.Option(min=0.0, max=1.0, help="Least share of the history from the cache; else exit status 1."),
    ] = None,
    goal_ttft_ms: Annotated[
        float | None, typer.Option(min=0.0, help="Most for the TTFT p50 of later turns, in ms; else exit status 1.")
    ] = None,
    vocab_size: VocabSize = None,
    api_key: ApiKey = None,
    json_file: Json = None,
    html_file: Html = None,
) -> None:
    """
    Conversations as agents have them on an OpenAI-compatible server: TTFT turn by turn, cached share, throughput.

    Examples:

        penstock bench agents --url http://127.0.0.1:8000

        penstock bench agents --serve -c 4 --turns 5 --tokens 2000 --output-len 32 --speed 10

        penstock bench agents --shape llama-8b --device cuda --set models.0.host_memory=96GiB --html agents.html

        penstock bench agents --seconds 120 --goal-cached 0.95 --goal-ttft-ms 80

        penstock bench agents --url https://api.example.com --api chat --model my-model --api-key $KEY --no-ignore-eos
    """
    from penstock.bench.agents import run
    from penstock.bench.agents.figures import Goals
    from penstock.bench.agents.plan import Growth

    own = own_server or shape is not None
    refused = {
        "--url is a server that is there; --serve and --shape start one": own and url is not None,
        "--model and --shape exclude each other": model is not None and shape is not None,
        "--device needs --serve or --shape": not own and device is not None,
        "--set needs --serve or --shape": not own and bool(server_settings),
    }
    for reason in (reason for reason, applies in refused.items() if applies):
        raise typer.BadParameter(reason)
    settings = run.AgentsBenchSettings(
        url=url or "http://127.0.0.1:8000",
        model=None if own else model,
        concurrency=concurrency,
        conversations=conversations,
        growth=Growth(turns, tokens, output_len, first_len, pause, speed),
        shared_len=shared_len,
        api=api.value,
        temperature=temperature,
        ignore_eos=ignore_eos,
        session_header=session_header,
        seed=seed,
        warm_up=warm_up,
        timeout_s=timeout,
        vocab_size=vocab_size,
        seconds=seconds,
        goals=Goals(goal_cached, goal_ttft_ms),
    )
    server = run.OwnServer(model or "smollm2-135m", shape, device or "auto", tuple(server_settings or ()))
    if not run.main(settings, server if own else None, api_key, json_file, html_file, console()):
        raise typer.Exit(1)
