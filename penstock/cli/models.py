"""`penstock models`: lists, loads, unloads, sleeps and wakes the models of a running server."""

from __future__ import annotations

import time
from typing import Annotated, Any

import typer

from penstock.cli.admin import DEFAULT_URL, Key, Url, call, waiting
from penstock.cli.lists import Column, Output, show

app = typer.Typer(
    name="models",
    help="List the models of a running server, load and unload them, put them to sleep and wake them.",
    no_args_is_help=True,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
)

ModelName = Annotated[str, typer.Argument(help="Name of the model, as clients send it.")]


@app.command("list")
def list_(url: Url = DEFAULT_URL, key: Key = None, output: Output = "table") -> None:
    """
    Show every model and its state.

    Examples:

        penstock models list

        penstock models list -o json
    """
    columns: list[Column[dict[str, Any]]] = [
        Column("name", lambda entry: entry["id"], rank=0),
        Column("state", lambda entry: entry["state"], rank=0),
        Column("context", lambda entry: entry["context_window"] or None),
        Column("runs through", lambda entry: entry.get("runs_through"), rank=3),
        Column("aliases", lambda entry: entry["aliases"], rank=2, fold=True),
    ]
    show(columns, call("GET", url, key, "/models", under="/v1")["data"], output)


@app.command()
def sleep(name: ModelName, url: Url = DEFAULT_URL, key: Key = None) -> None:
    """
    Put a model to sleep: finish its running requests, then free its memory. Its process stays up.

    Example:

        penstock models sleep smollm2-135m
    """
    _tell(name, "sleep", url, key)


@app.command()
def wake(name: ModelName, url: Url = DEFAULT_URL, key: Key = None) -> None:
    """
    Wake a sleeping model; returns when it is ready.

    Example:

        penstock models wake smollm2-135m
    """
    _tell(name, "wake", url, key)


@app.command()
def load(
    source: Annotated[str, typer.Argument(help="A known name, hf:ORG/NAME, or a folder or .gguf file on the server.")],
    name: Annotated[str | None, typer.Option(help="Name for clients; by default derived from the source.")] = None,
    option: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="KEY=VALUE", help="A key of models[N] in the configuration; may be repeated."),
    ] = None,
    url: Url = DEFAULT_URL,
    key: Key = None,
) -> None:
    """
    Load another model, until it is unloaded or the server stops; returns when it is ready.

    Example:

        penstock models load hf:Qwen/Qwen3-0.6B --name qwen --set max_model_len=4096 --set memory_share=0.3
    """
    from concurrent.futures import ThreadPoolExecutor
    from concurrent.futures import wait as wait_for

    import yaml

    from penstock.cli.terminal import stderr
    from penstock.errors import PenstockError

    options = {}
    for entry in option or ():
        where, separator, value = entry.partition("=")
        if not separator:
            raise PenstockError(f"--set {entry}: write KEY=VALUE, for example max_model_len=4096")
        options[where] = yaml.safe_load(value)
    body = {"source": source, "options": options, **({"name": name} if name else {})}
    begin = time.monotonic()
    with ThreadPoolExecutor(1) as thread, stderr().status("loading") as shown:
        answer = thread.submit(call, "POST", url, key, "/models", body)
        while not wait_for([answer], timeout=0.5).done:
            for entry in call("GET", url, key, "/models")["data"]:
                if entry["state"] == "loading":
                    shown.update(f"{entry['id']}: {entry['phase']} {entry['fraction']:.0%}")
        model = answer.result()
    typer.echo(f"{model['id']}: {model['state']} after {time.monotonic() - begin:.1f} s")


@app.command()
def unload(name: ModelName, url: Url = DEFAULT_URL, key: Key = None) -> None:
    """
    Unload a model: clients can no longer use it, running requests finish, then its engines stop.

    Example:

        penstock models unload qwen
    """
    with waiting(f"unloading {name}: running requests finish first"):
        call("DELETE", url, key, f"/models/{name}")
    typer.echo(f"{name}: unloaded")


def _tell(name: str, verb: str, url: str, key: str | None) -> None:
    begin = time.monotonic()
    with waiting(f"{name}: {verb}"):
        told = call("POST", url, key, f"/models/{name}/{verb}")
    typer.echo(f"{told['id']}: {told['state']} after {time.monotonic() - begin:.1f} s")
