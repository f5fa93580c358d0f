"""`penstock bench cpu-peers`."""

from __future__ import annotations

from typing import Annotated

import typer

from penstock.bench.options import Json, Model, Threads, assignments, console
from penstock.machine import usable_cores


def cpu_peers(
    model: Model = "smollm2-135m",
    folder: Annotated[
        str | None, typer.Option(help="The same model as safetensors, for peers that do not read GGUF.")
    ] = None,
    workload: Annotated[
        list[str] | None, typer.Option("--workload", "-w", help="c1, c16, c64, p512, ttft128; all by default.")
    ] = None,
    rounds: Annotated[int, typer.Option(min=1, help="Turns of each engine; medians are shown.")] = 5,
    requests_per_slot: Annotated[int, typer.Option(min=1, help="Length of the closed loops.")] = 4,
    threads: Threads = None,
    python: Annotated[list[str] | None, typer.Option(metavar="PEER=PATH", help="Interpreter of a peer.")] = None,
    peer: Annotated[list[str] | None, typer.Option(help="Only this peer; repeat for several.")] = None,
    peer_model: Annotated[
        list[str] | None, typer.Option(metavar="PEER=PATH", help="The same model in a peer's best form.")
    ] = None,
    flash_attention: Annotated[
        bool, typer.Option("--flash-attention", help="llama.cpp with it (off is faster on most CPUs).")
    ] = False,
    isa: Annotated[
        str | None, typer.Option(help="Penstock as on a CPU without more than this instruction set, such as avx2.")
    ] = None,
    json_file: Json = None,
    verbose: Annotated[bool, typer.Option("--verbose", help="Show what the engines print.")] = False,
) -> None:
    """
    Penstock and other engines on this CPU, alternating: the same prompts, the same threads, medians and ratios.

    Nothing is installed: engines that are here take part.

    Examples:

        penstock bench cpu-peers

        penstock bench cpu-peers --python llama.cpp=peers/bin/python -w c1 -w ttft128 --rounds 3 --json results.json

        penstock bench cpu-peers --folder SmolLM2-135M-Instruct

        penstock bench cpu-peers --isa avx2 --peer llama.cpp -w c1 -w c16
    """

    from penstock.bench.peers import cpu as measured

    settings = measured.CpuPeersBenchSettings(
        threads=threads or usable_cores(),
        model=model,
        folder=folder,
        workloads=tuple(workload or ()),
        rounds=rounds,
        requests_per_slot=requests_per_slot,
        pythons=assignments("--python", python, tuple(measured.MODULES)),
        peers=tuple(peer or ()),
        peer_models=assignments("--peer-model", peer_model, tuple(measured.MODULES)),
        flash_attention=flash_attention,
        isa=isa,
        verbose=verbose,
    )
    measured.main(settings, json_file, console())
