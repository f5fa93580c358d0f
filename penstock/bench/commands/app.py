"""The `penstock bench` commands. Only argument handling: each command imports what it runs when it runs."""

from __future__ import annotations

from typing import Annotated

import typer

from penstock.bench.commands.serve import SERVE_HELP, serve
from penstock.bench.options import (
    Device,
    DType,
    DTypeOption,
    InputLen,
    Json,
    KVDType,
    KVDTypeOption,
    Model,
    OutputLen,
    Rounds,
    Shape,
    Threads,
    Weights,
    WeightsOption,
    console,
    reported,
)

app = typer.Typer(
    name="bench",
    help="Measure the engine, a server, or both against a peer.",
    no_args_is_help=True,
    rich_markup_mode="markdown",
    pretty_exceptions_enable=False,
)


ENGINE_HELP = """
Offline benchmark of the engine: fixed workloads, tokens/s beside the bandwidth they reach.

Examples:

    penstock bench engine

    penstock bench engine -w b1 -w c16 --repeat 5 --json results.json

    penstock bench engine --shape llama-8b --device cuda -w b1 -w b64 -w mix

    penstock bench engine -w c16 --profile

    penstock bench engine -w c16 --adapters 8 --repeat 3

    penstock bench engine --list
"""


@app.command(help=ENGINE_HELP)
@reported
def engine(
    workload: Annotated[
        list[str] | None, typer.Option("--workload", "-w", help="Workload name; repeat for several. Default: c1, c16.")
    ] = None,
    model: Model = "smollm2-135m",
    shape: Annotated[
        str | None, typer.Option(help="Random weights of a named shape instead of a model (see --list).")
    ] = None,
    repeat: Annotated[int, typer.Option(min=1, help="Runs of each workload; medians are shown.")] = 1,
    warm_up: Annotated[bool, typer.Option("--warm-up/--no-warm-up", help="Run short requests first.")] = True,
    device: Device = "auto",
    dtype: DTypeOption = DType.auto,
    weights: WeightsOption = Weights.auto,
    kv_dtype: KVDTypeOption = KVDType.auto,
    threads: Threads = None,
    max_running: Annotated[int | None, typer.Option(min=1, help="Most sequences in one step.")] = None,
    token_budget: Annotated[int | None, typer.Option(min=1, help="Most tokens computed in one step.")] = None,
    max_model_len: Annotated[int | None, typer.Option(min=1, help="Context window.")] = None,
    adapters: Annotated[
        int, typer.Option(min=0, help="Compare with and without this many random LoRA adapters, in the same run.")
    ] = 0,
    adapter_rank: Annotated[int, typer.Option(min=1, max=512, help="Rank of those adapters.")] = 16,
    profile: Annotated[
        bool, typer.Option("--profile", help="Also show where steps go, of prompts and decoding: busy, idle, kernels.")
    ] = False,
    json_file: Json = None,
    show: Annotated[bool, typer.Option("--list", help="List workloads and shapes, and stop.")] = False,
) -> None:
    if show:
        from penstock.bench.choices import show_choices

        show_choices(console())
        return

    from penstock.bench import offline

    settings = offline.Settings(
        model=model,
        shape=shape,
        device=device,
        dtype=dtype.value,
        weights=weights.value,
        kv_dtype=kv_dtype.value,
        threads=threads,
        max_running=max_running,
        token_budget=token_budget,
        max_model_len=max_model_len,
        repeat=repeat,
        warm_up=warm_up,
        adapters=adapters,
        adapter_rank=adapter_rank,
        profile=profile,
    )
    offline.main(settings, workload or ["c1", "c16"], json_file, console())


ADAPTERS_HELP = """
What LoRA adapters cost: decode steps with and without them, on every linear and on PEFT's default targets.

Examples:

    penstock bench adapters

    penstock bench adapters --shape llama-8b --device cuda --repeat 3

    penstock bench adapters --batch 16 --count 8 --json results.json
"""


@app.command(help=ADAPTERS_HELP)
@reported
def adapters(
    batch: Annotated[
        list[int] | None, typer.Option(min=1, help="Requests at once; repeat for several. Default: 1, 8, 64.")
    ] = None,
    count: Annotated[
        list[int] | None, typer.Option(min=1, help="Adapters they share; repeat for several. Default: 1, 20.")
    ] = None,
    rank: Annotated[int, typer.Option(min=1, max=512, help="Rank of the adapters.")] = 16,
    tokens: Annotated[int, typer.Option(min=8, help="Tokens that each request generates.")] = 64,
    model: Model = "smollm2-135m",
    shape: Shape = None,
    repeat: Annotated[int, typer.Option(min=1, help="Turns of each side; medians are shown.")] = 3,
    device: Device = "auto",
    dtype: DTypeOption = DType.auto,
    weights: WeightsOption = Weights.auto,
    threads: Threads = None,
    json_file: Json = None,
) -> None:
    from penstock.bench import adapter_cost, offline

    settings = offline.Settings(
        model=model,
        shape=shape,
        device=device,
        dtype=dtype.value,
        weights=weights.value,
        threads=threads,
        repeat=repeat,
        adapter_rank=rank,
    )
    adapter_cost.main(settings, batch or [1, 8, 64], count or [1, 20], tokens, json_file, console())


OFFLOAD_HELP = """
Coming back to a conversation whose KV blocks went to host memory, against computing it again.

Examples:

    penstock bench offload

    penstock bench offload --tokens 4096 --kv-dtype int8

    penstock bench offload --shape llama-8b --device cuda --host-memory 4
"""


@app.command(help=OFFLOAD_HELP)
@reported
def offload(
    tokens: Annotated[int, typer.Option(min=64, help="Length of the conversation.")] = 2048,
    model: Model = "smollm2-135m",
    shape: Shape = None,
    repeat: Annotated[int, typer.Option(min=1, help="Returns; medians are shown.")] = 3,
    host_memory: Annotated[float, typer.Option(min=0.001, help="Host memory for KV blocks, in GiB.")] = 4.0,
    device: Device = "auto",
    weights: WeightsOption = Weights.auto,
    kv_dtype: KVDTypeOption = KVDType.auto,
    threads: Threads = None,
    json_file: Json = None,
) -> None:
    from penstock.bench import offline
    from penstock.bench import offload as returning

    settings = offline.Settings(
        model=model,
        shape=shape,
        device=device,
        weights=weights.value,
        kv_dtype=kv_dtype.value,
        threads=threads,
        max_running=2,
        max_model_len=tokens + 2 * returning.NEW_TOKENS,
        num_blocks=(tokens + 2 * returning.NEW_TOKENS) // 16 + 1,
        host_memory=round(host_memory * 2**30),
        repeat=repeat,
    )
    returning.main(settings, tokens, json_file, console())


app.command(help=SERVE_HELP)(reported(serve))


HTTP_HELP = """
The same workloads offline and through HTTP, turn by turn on this machine: the ratio, and CPU time per token.

Examples:

    penstock bench http

    penstock bench http -w c16 -w c64 --repeat 5 --json results.json
"""


@app.command(help=HTTP_HELP)
@reported
def http(
    workload: Annotated[
        list[str] | None,
        typer.Option("--workload", "-w", help="Closed-loop workload; repeat for several. Default: c16, c64."),
    ] = None,
    model: Model = "smollm2-135m",
    repeat: Annotated[int, typer.Option(min=1, help="Turns of each side; medians are shown.")] = 3,
    device: Device = "auto",
    json_file: Json = None,
) -> None:
    from penstock.bench import through_http

    settings = through_http.Settings(model=model, device=device, repeat=repeat)
    through_http.main(settings, workload or ["c16", "c64"], json_file, console())


COMPARE_HELP = """
This engine against `transformers` generate, turn by turn on the same machine, and the ratio.

Examples:

    penstock bench compare

    penstock bench compare --batch 16 --rounds 5 --json results.json
"""


@app.command(help=COMPARE_HELP)
@reported
def compare(
    model: Model = "smollm2-135m",
    batch: Annotated[int, typer.Option(min=1, help="Requests at once.")] = 16,
    input_len: InputLen = 128,
    output_len: OutputLen = 128,
    rounds: Rounds = 3,
    device: Device = "auto",
    threads: Threads = None,
    json_file: Json = None,
) -> None:
    from penstock.bench import compare as comparison

    settings = comparison.Settings(
        model=model,
        batch=batch,
        input_len=input_len,
        output_len=output_len,
        rounds=rounds,
        device=device,
        threads=threads,
    )
    comparison.main(settings, json_file, console())


EMBED_HELP = """
Texts per second of an encoder engine, and of transformers with the same weights, turn by turn.

Texts are random tokens with lengths like those of a search index: most of them short, some long.

Examples:

    penstock bench embed

    penstock bench embed --texts 1000 --batch 64 --threads 1
"""


@app.command(help=EMBED_HELP)
@reported
def embed(
    model: Model = "minilm",
    texts: Annotated[int, typer.Option(min=1, help="Texts in each round.")] = 256,
    batch: Annotated[int, typer.Option(min=1, help="Texts in a batch of transformers, sorted by length.")] = 32,
    rounds: Annotated[int, typer.Option(min=1, help="Rounds; medians are compared.")] = 3,
    device: Device = "auto",
    threads: Threads = None,
    json_file: Json = None,
) -> None:
    from penstock.bench import embed

    settings = embed.Settings(model, texts, batch, rounds, device, threads)
    embed.main(settings, json_file, console())


DETERMINISM_HELP = """
What deterministic mode costs: decoding alone and in a batch, and a prompt, with and without, turn by turn.

Examples:

    penstock bench determinism

    penstock bench determinism --shape llama-8b --device cuda --json results.json
"""


@app.command(help=DETERMINISM_HELP)
@reported
def determinism(
    model: Model = "smollm2-135m",
    shape: Shape = None,
    rounds: Rounds = 3,
    device: Device = "auto",
    threads: Threads = None,
    json_file: Json = None,
) -> None:
    from penstock.bench import determinism as measured
    from penstock.bench import shapes
    from penstock.engine.backends.select import pick_device, pick_dtype
    from penstock.engine.config import EngineConfig
    from penstock.engine.loading.random_checkpoint import RandomCheckpoint
    from penstock.sources.resolve import resolve

    checkpoint = None
    if shape is not None:
        where = pick_device(device)
        checkpoint = RandomCheckpoint(shapes.named(shape), device=where, dtype=pick_dtype("auto", where))
    config = EngineConfig(
        model=shape or str(resolve(model)),
        name=shape or model,
        device=device,
        threads=threads,
        weights="auto" if shape is None else "dense",
        max_running=16,
        max_model_len=2048,
        num_blocks=1024,
    )
    measured.main(config, checkpoint=checkpoint, rounds=rounds, json_file=json_file, console=console())
