"""`penstock adapters`: adapters of a running server, through its admin API."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from penstock.cli.admin import DEFAULT_URL, Key, Url, call, waiting
from penstock.cli.lists import Column, Output, show

app = typer.Typer(
    name="adapters",
    help="List, load, unload and pin the adapters (LoRA and other kinds) of a running server.",
    no_args_is_help=True,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
)

AdapterName = Annotated[str, typer.Argument(help="Name of the adapter, as clients send it.")]


@app.command("list")
def list_(url: Url = DEFAULT_URL, key: Key = None, output: Output = "table") -> None:
    """
    Show every adapter, its state and where it is loaded.

    Example:

        penstock adapters list
    """
    columns: list[Column[dict[str, Any]]] = [
        Column("name", lambda entry: entry["id"], rank=0),
        Column("model", lambda entry: entry["model"], rank=2),
        Column("state", _state, rank=0, fold=True),
        Column("owner", lambda entry: entry["owner"], rank=4),
        Column("where", _where, rank=3),
        Column("kind", lambda entry: entry.get("kind", ""), rank=5),  # older servers do not say
        Column("rank", lambda entry: entry["rank"], rank=5),
        Column("pinned", lambda entry: entry["pinned"], rank=4),
        Column("in use", lambda entry: entry["users"]),
        Column("source", lambda entry: entry["source"], rank=6, fold=True),
    ]
    empty = "No adapters: `penstock adapters load NAME SOURCE` loads one."
    show(columns, call("GET", url, key, "/adapters")["data"], output, empty=empty)


@app.command()
def load(
    name: AdapterName,
    source: Annotated[str, typer.Argument(help="Folder (on the server), hf:ORG/NAME or s3://BUCKET/PREFIX.")],
    model: Annotated[
        str | None, typer.Option("--model", "-m", help="Base model; needed if several are served.")
    ] = None,
    pin: Annotated[bool, typer.Option("--pin", help="Never evict it.")] = False,
    owner: Annotated[
        str | None,
        typer.Option(help="Tenant that alone may use it; by default that of the key. '': every tenant."),
    ] = None,
    url: Url = DEFAULT_URL,
    key: Key = None,
) -> None:
    """
    Load an adapter, or reload it after its files changed; returns when it is ready.

    Example:

        penstock adapters load support ./adapters/support --pin

        penstock adapters load acme-sql ./adapters/sql --owner acme
    """
    body = {"name": name, "source": source, "pinned": pin, **({"model": model} if model else {})}
    if owner is not None:
        body["owner"] = owner
    with waiting(f"loading {name}"):
        loaded = call("POST", url, key, "/adapters", body)
    typer.echo(f"{loaded['id']}: ready, {loaded['kind']}, rank {loaded['rank']}")


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


def _where(entry: dict[str, Any]) -> str | None:
    return "device" if entry["on_device"] else "host" if entry["state"] == "ready" else None


def _state(entry: dict[str, Any]) -> str:
    return f"{entry['state']}: {entry['error']}" if entry["error"] else str(entry["state"])
