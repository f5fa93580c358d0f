"""`penstock quantize`: writes a quantized checkpoint and measures its loss of quality."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, cast

import typer

from penstock.machine import usable_cores

if TYPE_CHECKING:
    from rich.console import Console

    from penstock.engine.quantization.quantize import Progress, Recipe

WINDOW = 512
"""Tokens per window of calibration text."""


class _Target(StrEnum):
    int8 = "int8"
    fp8 = "fp8"
    gptq = "gptq-int4"
    awq = "awq-int4"


def quantize(
    model: Annotated[str, typer.Argument(help="Model alias, source or path.")] = "smollm2-135m",
    to: Annotated[_Target, typer.Option("--to", help="Format of the quantized weights.")] = _Target.gptq,
    calibration: Annotated[
        Path | None, typer.Option(metavar="FILE", exists=True, dir_okay=False, help="Text to calibrate on.")
    ] = None,
    out: Annotated[Path | None, typer.Option(metavar="DIR", help="New folder; by default ./MODEL-FORMAT.")] = None,
    group_size: Annotated[
        int | None, typer.Option(help="Group size of 4-bit scales: 128, 64 or 32; by default the largest that fits.")
    ] = None,
    symmetric: Annotated[bool, typer.Option("--symmetric", help="GPTQ without zero points.")] = False,
    act_order: Annotated[bool, typer.Option("--act-order", help="GPTQ in order of decreasing activations.")] = False,
    tokens: Annotated[int, typer.Option(min=64, help="Maximum number of calibration tokens.")] = 16384,
    text: Annotated[
        Path | None, typer.Option(metavar="FILE", exists=True, dir_okay=False, help="Text to measure perplexity on.")
    ] = None,
    measure: Annotated[
        bool, typer.Option("--perplexity/--no-perplexity", help="Measure perplexity before and after.")
    ] = True,
    device: Annotated[str, typer.Option(help="auto, cpu, cuda or cuda:N.")] = "auto",
    threads: Annotated[int | None, typer.Option(min=1, help="CPU threads; all cores by default.")] = None,
) -> None:
    """
    Quantize a model into a checkpoint that `penstock serve` and other programs can load, and report its perplexity.

    int8 and fp8 round to nearest with per-channel scales. gptq-int4 and awq-int4 calibrate on text; the report compares
    them with rounding to nearest in 4 bits.

    Examples:

        penstock quantize smollm2-135m --to gptq-int4

        penstock quantize ./my-model --to awq-int4 --calibration chats.txt --out ./my-model-awq

        penstock serve ./smollm2-135m-gptq-int4
    """
    from penstock.cli.terminal import download_bar, stderr
    from penstock.engine.quantization.quantize import Recipe
    from penstock.errors import ConfigError
    from penstock.sources.resolve import resolve

    if (symmetric or act_order) and to != _Target.gptq:
        raise ConfigError("--symmetric and --act-order are for --to gptq-int4")
    console = stderr()
    with download_bar(console, model) as progress:
        path = resolve(model, progress)
    folder = out or Path(f"{Path(model).name.removesuffix('.gguf').replace(':', '-')}-{to.value}")
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ConfigError(f"{folder} exists and is not empty; name another folder with --out")
    recipe = Recipe(to.value, group_size, symmetric, act_order)
    sample = None if calibration is None else calibration.read_text(encoding="utf-8")
    _run(path, folder, recipe, sample, tokens, device, threads, console)
    if measure:
        judged = None if text is None else text.read_text(encoding="utf-8")
        _report(path, folder, recipe, judged, device, threads)
    typer.echo(folder)


def calibration_text() -> str:
    """The calibration text shipped with Penstock."""
    from importlib import resources

    return (resources.files("penstock.engine.quantization") / "calibration.txt").read_text(encoding="utf-8")


def _run(
    path: Path,
    folder: Path,
    recipe: Recipe,
    sample: str | None,
    tokens: int,
    device: str,
    threads: int | None,
    console: Console,
) -> None:

    import torch

    from penstock.engine.backends.select import pick_device
    from penstock.engine.config import EngineConfig
    from penstock.engine.loading.checkpoint import Checkpoint
    from penstock.engine.quantization.quantize import quantize as make
    from penstock.engine.startup.part import open_weights
    from penstock.text.export import write_text_files
    from penstock.text.loader import load_text

    count = threads or usable_cores()
    torch.set_num_threads(count)
    with console.status("reading the checkpoint"):
        source = cast(Checkpoint, open_weights(EngineConfig(model=str(path)), None))
    pieces: Sequence[list[int]] = ()
    if recipe.method in ("gptq-int4", "awq-int4"):
        ids = load_text(path).encode(calibration_text() if sample is None else sample)[:tokens]
        pieces = [ids[at : at + WINDOW] for at in range(0, len(ids), WINDOW) if len(ids) - at >= 16]
        if not pieces:
            from penstock.errors import ConfigError

            raise ConfigError("the calibration text is too short: give at least a few pages")
    with _bar(console, recipe.method) as progress, torch.inference_mode():
        make(source, recipe, pieces, folder, progress, device=pick_device(device), threads=count)
    write_text_files(path, folder)


@contextmanager
def _bar(console: Console, name: str) -> Iterator[Progress]:
    """A progress bar over layers; without a terminal, plain lines."""
    if not console.is_terminal:
        tenths = -1

        def plain(what: str, done: int, total: int) -> None:
            nonlocal tenths
            if 10 * done // total > tenths:
                tenths = 10 * done // total
                console.print(f"{name}: {what} {done}/{total}", markup=False)

        yield plain
        return
    from rich.progress import BarColumn, MofNCompleteColumn, SpinnerColumn, TextColumn, TimeElapsedColumn
    from rich.progress import Progress as Bars

    columns = (SpinnerColumn(), TextColumn("[bold]{task.description}[/]"), BarColumn(bar_width=30))
    with Bars(*columns, MofNCompleteColumn(), TimeElapsedColumn(), console=console, transient=True) as bars:
        task = bars.add_task(name, total=None)

        def report(what: str, done: int, total: int) -> None:
            bars.update(task, description=f"{name} {what}", completed=done, total=total)

        yield report


def _report(path: Path, folder: Path, recipe: Recipe, text: str | None, device: str, threads: int | None) -> None:
    """Prints perplexity and size of the source, of rounding to nearest, and of the result, all run with dequantized
    weights."""
    from rich.console import Console

    from penstock.bench import perplexity, report
    from penstock.cli.terminal import stderr
    from penstock.engine.config import EngineConfig
    from penstock.engine.core import Engine
    from penstock.engine.loading.checkpoint import open_checkpoint
    from penstock.engine.quantization.quantize import RoundedCheckpoint, pick_group
    from penstock.text.loader import load_text

    pieces = perplexity.windows(load_text(path).encode(text if text is not None else perplexity.sample_text()))
    source = open_checkpoint(path)
    forms: list[tuple[str, Any, int | None]] = [("before", source, _size(path))]
    if recipe.method in ("gptq-int4", "awq-int4"):
        group = pick_group(source.config, recipe.group)
        forms.append((f"round to nearest, groups of {group}", RoundedCheckpoint(source, group, recipe.symmetric), None))
    forms.append((recipe.method, open_checkpoint(folder), _size(folder)))
    rows = report.table(
        "Perplexity and size", "weights", "perplexity", "loss", "KL divergence", "top-1 agreement", "MB"
    )
    reference = None
    for name, checkpoint, size in forms:
        config = EngineConfig(
            str(path), device=device, dtype="float32", weights="dense", threads=threads, prefix_cache=False,
            max_running=1, max_model_len=perplexity.WINDOW + 1,
        )  # fmt: skip
        with stderr().status(f"measuring perplexity: {name}"):
            scores = perplexity.score(Engine.load(config, checkpoint=checkpoint), pieces)
        reference = reference or scores
        far = perplexity.distance(scores, reference)
        megabytes = "–" if size is None else report.number(size / 1e6, 1)
        rows.add_row(
            name, report.number(scores.perplexity, 3), f"{far.loss:+.2%}", f"{far.divergence:.4f}",
            f"{far.agreement:.1%}", megabytes,
        )  # fmt: skip
    Console(stderr=True).print(rows)


def _size(path: Path) -> int:
    files = [path] if path.is_file() else [*path.glob("*.safetensors"), *path.glob("*.gguf")]
    return sum(file.stat().st_size for file in files)
