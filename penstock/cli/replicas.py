"""`penstock replicas`, `scale`, `restart` and `drain`: the replicas of a running server, through its admin API."""

from __future__ import annotations

import time
from typing import Annotated, Any

import typer

from penstock.cli.admin import DEFAULT_URL, Key, Url, call

Model = Annotated[str, typer.Argument(help="Name of the model, as clients send it.")]
Replica = Annotated[str | None, typer.Option("--replica", "-r", help="Replica, as shown by `penstock replicas`.")]


def replicas(url: Url = DEFAULT_URL, key: Key = None) -> None:
    """
    Show every replica of every model: its state, circuit breaker and load.

    Example:

        penstock replicas
    """
    _show(call("GET", url, key, "/replicas")["data"])


def scale(
    model: Model,
    count: Annotated[int, typer.Argument(min=1, metavar="N", help="Number of replicas.")],
    url: Url = DEFAULT_URL,
    key: Key = None,
) -> None:
    """
    Set the number of replicas of a model: start new ones, or drain and stop surplus ones. Returns when done.

    Example:

        penstock scale smollm2-135m 3
    """
    _tell(model, "scale", {"replicas": count}, url, key)


def restart(
    model: Annotated[str | None, typer.Argument(help="Name of the model; by default every model.")] = None,
    replica: Replica = None,
    url: Url = DEFAULT_URL,
    key: Key = None,
) -> None:
    """
    Rolling restart: drain and restart the replicas of a model one after the other, while the others serve.

    Examples:

        penstock restart

        penstock restart smollm2-135m

        penstock restart smollm2-135m --replica 1
    """
    from penstock.errors import PenstockError

    if model is None and replica is not None:
        raise PenstockError("--replica needs a model: penstock restart MODEL --replica NAME")
    found = call("GET", url, key, "/replicas")["data"]
    here = dict.fromkeys(entry["model"] for entry in found if not entry["remote"])
    for name in [model] if model is not None else here:
        _tell(name, "restart", {"replica": replica}, url, key)


def drain(
    model: Annotated[
        str | None, typer.Argument(help="Name of the model; without it, the whole server is drained and stopped.")
    ] = None,
    replica: Replica = None,
    url: Url = DEFAULT_URL,
    key: Key = None,
) -> None:
    """
    Drain a replica: it finishes its running requests and stops, until `penstock restart` starts it again.

    Without a model, drain and stop the whole server.

    Examples:

        penstock drain smollm2-135m --replica 1

        penstock drain
    """
    from penstock.errors import PenstockError

    if model is None:
        if replica is not None:
            raise PenstockError("--replica needs a model: penstock drain MODEL --replica NAME")
        typer.echo(f"the server is {call('POST', url, key, '/drain')['state']}")
    elif replica is None:
        raise PenstockError("give the replica to drain: penstock drain MODEL --replica NAME")
    else:
        _tell(model, "drain", {"replica": replica}, url, key)


def _tell(model: str, verb: str, body: dict[str, Any], url: str, key: str | None) -> None:
    begin = time.monotonic()
    _show(call("POST", url, key, f"/models/{model}/{verb}", body)["replicas"])
    typer.echo(f"done after {time.monotonic() - begin:.1f} s")


def _show(entries: list[dict[str, Any]]) -> None:
    from rich.table import Table

    from penstock.cli.terminal import stdout

    table = Table("replica", "role", "state", "breaker", "running", "waiting", "device", box=None, pad_edge=False)
    for entry in entries:
        state = "leaving" if entry["leaving"] else entry["state"]
        running, waiting = str(entry["running"]), str(entry["waiting"])
        role, device = entry["role"] or "-", entry["device"] or "-"
        table.add_row(entry["id"], role, state, entry["breaker"], running, waiting, device)
    stdout().print(table)
