"""`penstock adapters`: LoRA adapters of a running server, through its admin API."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    import httpx

app = typer.Typer(
    name="adapters",
    help="List, load, unload and pin the LoRA adapters of a running server.",
    no_args_is_help=True,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
)

Url = Annotated[str, typer.Option("--url", "-u", envvar="PENSTOCK_URL", help="Address of the server.")]
Key = Annotated[
    str | None,
    typer.Option(envvar="PENSTOCK_ADMIN_KEY", help="The server's admin_key, if it has one.", show_envvar=True),
]
AdapterName = Annotated[str, typer.Argument(help="What clients call the adapter.")]
DEFAULT_URL = "http://127.0.0.1:8000"


@app.command("list")
def list_(url: Url = DEFAULT_URL, key: Key = None) -> None:
    """
    Show every adapter and where it is.

    Example:

        penstock adapters list
    """
    from rich.console import Console
    from rich.table import Table

    table = Table("name", "model", "state", "where", "rank", "pinned", "in use", "source", box=None, pad_edge=False)
    for entry in _call("GET", url, key, "")["data"]:
        where = "device" if entry["on_device"] else "host" if entry["state"] == "ready" else "-"
        rank, pinned = str(entry["rank"] or "-"), "yes" if entry["pinned"] else "no"
        state = f"{entry['state']}: {entry['error']}" if entry["error"] else entry["state"]
        table.add_row(entry["id"], entry["model"], state, where, rank, pinned, str(entry["users"]), entry["source"])
    Console().print(table)


@app.command()
def load(
    name: AdapterName,
    source: Annotated[str, typer.Argument(help="Folder (on the server), hf:ORG/NAME or s3://BUCKET/PREFIX.")],
    model: Annotated[str | None, typer.Option("--model", "-m", help="Its base, where several are served.")] = None,
    pin: Annotated[bool, typer.Option("--pin", help="Never evict it.")] = False,
    url: Url = DEFAULT_URL,
    key: Key = None,
) -> None:
    """
    Load an adapter, or load it again after its files changed; returns when it can be used.

    Example:

        penstock adapters load support ./adapters/support --pin
    """
    body = {"name": name, "source": source, "pinned": pin, **({"model": model} if model else {})}
    loaded = _call("POST", url, key, "", body)
    typer.echo(f"{loaded['id']}: ready, rank {loaded['rank']}")


@app.command()
def unload(name: AdapterName, url: Url = DEFAULT_URL, key: Key = None) -> None:
    """
    Forget an adapter; requests that run with it finish.

    Example:

        penstock adapters unload support
    """
    _call("DELETE", url, key, f"/{name}")
    typer.echo(f"{name}: unloaded")


@app.command()
def pin(
    name: AdapterName,
    off: Annotated[bool, typer.Option("--off", help="Let it be evicted again.")] = False,
    url: Url = DEFAULT_URL,
    key: Key = None,
) -> None:
    """
    Keep an adapter in memory whatever else is used, or stop doing so.

    Examples:

        penstock adapters pin support

        penstock adapters pin support --off
    """
    pinned = _call("PATCH", url, key, f"/{name}", {"pinned": not off})
    typer.echo(f"{pinned['id']}: {'pinned' if pinned['pinned'] else 'not pinned'}")


def _call(method: str, url: str, key: str | None, path: str, body: dict[str, Any] | None = None) -> Any:
    import httpx

    from penstock.errors import PenstockError

    headers = {"authorization": f"Bearer {key}"} if key else {}
    address = f"{url.rstrip('/').removesuffix('/v1')}/admin/adapters{path}"
    try:
        # Loading may have to download: no limit on the answer.
        answer = httpx.request(method, address, json=body, headers=headers, timeout=httpx.Timeout(10.0, read=None))
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        raise PenstockError(f"{address} cannot be reached: {error}; is `penstock serve` running there?") from error
    if answer.is_success:
        return answer.json()
    raise PenstockError(_refusal(answer))


def _refusal(answer: httpx.Response) -> str:
    try:
        return str(answer.json()["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return f"{answer.url} answered HTTP {answer.status_code}"
