"""What the `penstock bench` commands share: common options, the console, how an error is shown."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Sequence
from enum import StrEnum
from functools import wraps
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, ParamSpec, TypeVar

import typer

from penstock.errors import PenstockError

if TYPE_CHECKING:
    from rich.console import Console

P = ParamSpec("P")
T = TypeVar("T", float, float | None, list[float] | None)
DEFAULT_MODEL = "smollm2-135m"
_UNSEEN_WIDTH = 160
"""Columns where the output is no terminal."""


class DType(StrEnum):
    auto = "auto"
    float32 = "float32"
    float16 = "float16"
    bfloat16 = "bfloat16"


class Arrivals(StrEnum):
    poisson = "poisson"
    constant = "constant"
    burst = "burst"


class Weights(StrEnum):
    auto = "auto"
    dense = "dense"
    int8 = "int8"
    int4 = "int4"
    fp8 = "fp8"


class KVDType(StrEnum):
    auto = "auto"
    full = "full"
    int8 = "int8"
    fp8 = "fp8"


class EncoderWeights(StrEnum):
    auto = "auto"
    int8 = "int8"


Model = Annotated[str, typer.Option("--model", "-m", help="Model alias, source or path.")]
Device = Annotated[str, typer.Option(help="auto, cpu, cuda or cuda:N.")]
Threads = Annotated[int | None, typer.Option(min=1, help="CPU threads; all cores by default.")]
Html = Annotated[Path | None, typer.Option("--html", metavar="FILE", help="Also write a page with charts to FILE.")]
VocabSize = Annotated[
    int | None, typer.Option(min=1, help="Prompt ids are below this. Default: what the server says, or 32000.")
]
ApiKey = Annotated[str | None, typer.Option(envvar="OPENAI_API_KEY", help="Sent as a bearer token.")]
Json = Annotated[Path | None, typer.Option("--json", metavar="FILE", help="Also write the figures to FILE.")]
DTypeOption = Annotated[DType, typer.Option(help="Type of activations, KV cache and dense weights.")]
WeightsOption = Annotated[Weights, typer.Option(help="How weights are kept.")]
KVDTypeOption = Annotated[KVDType, typer.Option(help="Type of the KV cache.")]
Shape = Annotated[str | None, typer.Option(help="Random weights of a named shape instead of a model.")]
Chart = Annotated[Path | None, typer.Option(metavar="FILE", help="Also write a chart to FILE (SVG).")]
EncoderWeightsOption = Annotated[EncoderWeights, typer.Option(help="How the encoder's weights are kept.")]
Rounds = Annotated[int, typer.Option(min=1, help="Turns each; medians are compared.")]
InputLen = Annotated[int, typer.Option(min=1, help="Prompt tokens.")]
OutputLen = Annotated[int, typer.Option(min=1, help="Tokens to generate.")]


def finite(value: T) -> T:
    """Callback of options that are numbers: `nan` and `inf` pass every comparison with a range's ends."""
    numbers = value if isinstance(value, list) else [value]
    if not all(number is None or math.isfinite(number) for number in numbers):
        raise typer.BadParameter("Input should be a finite number")
    return value


def assignments(option: str, given: Sequence[str] | None, names: Sequence[str]) -> dict[str, str]:
    """The values of an option that is given as NAME=VALUE, and may be repeated."""
    found = {}
    for entry in given or ():
        name, equals, value = entry.partition("=")
        if not equals or name not in names:
            raise typer.BadParameter(f"{option} {entry}: write it as NAME=PATH, with a name of {', '.join(names)}")
        found[name] = value
    return found


def console() -> Console:
    """Wide where nobody looks through a window: a file or a pipe gets tables whole."""
    from rich.console import Console

    found = Console()
    if not found.is_terminal and "COLUMNS" not in os.environ:
        found.width = _UNSEEN_WIDTH
    return found


def stderr() -> Console:
    from rich.console import Console

    return Console(stderr=True, highlight=False)


def reported(command: Callable[P, None]) -> Callable[P, None]:
    """An error raised on purpose is one red line and its exit status, not a traceback."""

    @wraps(command)
    def run(*args: P.args, **kwargs: P.kwargs) -> None:
        try:
            command(*args, **kwargs)
        except PenstockError as error:
            typer.secho(f"error: {error}", fg="red", err=True)
            raise typer.Exit(error.exit_status) from None

    return run
