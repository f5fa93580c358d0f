"""`penstock adapters`: LoRA adapters of a running server, through its admin API."""

from __future__ import annotations

from typing import Annotated

import typer

from penstock.cli.admin import DEFAULT_URL, Key, Url, call

app = typer.Typer(
    name="adapters",
    help="List, load, unload and pin the LoRA adapters of a running server.",
    no_args_is_help=True,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
)

AdapterName = Annotated[str, typer.Argument(help="Name of the adapter, as clients send it.")]


@app.command("list")
def list_(url: Url = DEFAULT_URL, key: Key = None) -> None:
    """
    Show every adapter, its state and where it is loaded.

    Example:

        penstock adapters list
    """
    from rich.table import Table

    from penstock.cli.terminal import stdout

    table = Table("name", "model", "state", "where", "rank", "pinned", "in use", "source", box=None, pad_edge=False)
    for entry in call("GET", url, key, "/adapters")["data"]:
        where = "device" if entry["on_device"] else "host" if entry["state"] == "ready" else "-"
        rank, pinned = str(entry["rank"] or "-"), "yes" if entry["pinned"] else "no"
        state = f"{entry['state']}: {entry['error']}" if entry["error"] else entry["state"]
        table.add_row(entry["id"], entry["model"], state, where, rank, pinned, str(entry["users"]), entry["source"])
    stdout().print(table)


@app.command()
def load(
    name: AdapterName,
    source: Annotated[str, typer.Argument(help="Folder (on the server), hf:ORG/NAME or s3://BUCKET/PREFIX.")],
    model: Annotated[
        str | None, typer.Option("--model", "-m", help="Base model; needed if several are served.")
    ] = None,
    pin: Annotated[bool, typer.Option("--pin", help="Never evict it.")] = False,
    url: Url = DEFAULT_URL,
    key: Key = None,
) -> None:
    """
    Load an adapter, or reload it after its files changed; returns when it is ready.

    Example:

        penstock adapters load support ./adapters/support --pin
    """
    body = {"name": name, "source": source, "pinned": pin, **({"model": model} if model else {})}
    loaded = call("POST", url, key, "/adapters", body)
    typer.echo(f"{loaded['id']}: ready, rank {loaded['rank']}")


@app.command()
def unload(name: AdapterName, url: Url = DEFAULT_URL, key: Key = None) -> None:
    """
    Unload an adapter; running requests that use it may finish.

    Example:

        penstock adapters unload support
    """
    call("DELETE", url, key, f"/adapters/{name}")
    typer.echo(f"{name}: unloaded")


@app.command()
def pin(
    name: AdapterName,
    off: Annotated[bool, typer.Option("--off", help="Allow it to be evicted again.")] = False,
    url: Url = DEFAULT_URL,
    key: Key = None,
) -> None:
    """
    Pin an adapter in memory so that it is never evicted, or unpin it.

    Examples:

        penstock adapters pin support

        penstock adapters pin support --off
    """
    pinned = call("PATCH", url, key, f"/adapters/{name}", {"pinned": not off})
    typer.echo(f"{pinned['id']}: {'pinned' if pinned['pinned'] else 'not pinned'}")
