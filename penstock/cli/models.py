"""`penstock models`: the models of a running server, and whether they are awake."""

from __future__ import annotations

import time
from typing import Annotated

import typer

from penstock.cli.admin import DEFAULT_URL, Key, Url, call

app = typer.Typer(
    name="models",
    help="List the models of a running server, put them to sleep and wake them.",
    no_args_is_help=True,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
)

ModelName = Annotated[str, typer.Argument(help="What clients call the model.")]


@app.command("list")
def list_(url: Url = DEFAULT_URL, key: Key = None) -> None:
    """
    Show every model and its state.

    Example:

        penstock models list
    """
    from rich.console import Console
    from rich.table import Table

    table = Table("name", "state", "context", "aliases", box=None, pad_edge=False)
    for entry in call("GET", url, key, "/models", under="/v1")["data"]:
        table.add_row(entry["id"], entry["state"], str(entry["context_window"] or "-"), ", ".join(entry["aliases"]))
    Console().print(table)


@app.command()
def sleep(name: ModelName, url: Url = DEFAULT_URL, key: Key = None) -> None:
    """
    Let a model finish what it runs, then free its memory; its process stays.

    Example:

        penstock models sleep smollm2-135m
    """
    _tell(name, "sleep", url, key)


@app.command()
def wake(name: ModelName, url: Url = DEFAULT_URL, key: Key = None) -> None:
    """
    Load a sleeping model again; returns when it answers.

    Example:

        penstock models wake smollm2-135m
    """
    _tell(name, "wake", url, key)


def _tell(name: str, verb: str, url: str, key: str | None) -> None:
    begin = time.monotonic()
    told = call("POST", url, key, f"/models/{name}/{verb}")
    typer.echo(f"{told['id']}: {told['state']} after {time.monotonic() - begin:.1f} s")
