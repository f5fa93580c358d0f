"""`penstock bench determinism`."""

from __future__ import annotations

from penstock.bench.options import Device, Json, Model, Rounds, Shape, Threads, console


def determinism(
    model: Model = "smollm2-135m",
    shape: Shape = None,
    rounds: Rounds = 3,
    device: Device = "auto",
    threads: Threads = None,
    json_file: Json = None,
) -> None:
    """
    What deterministic mode costs: decoding alone and in a batch, and a prompt, with and without, alternating.

    Examples:

        penstock bench determinism

        penstock bench determinism --shape llama-8b --device cuda --json results.json
    """
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
