"""`penstock replicas`, `scale`, `restart` and `drain`: the engines of a running server, through its admin API."""

from __future__ import annotations

import time
from typing import Annotated, Any

import typer

from penstock.cli.admin import DEFAULT_URL, Key, Url, call

Model = Annotated[str, typer.Argument(help="What clients call the model.")]
Replica = Annotated[str | None, typer.Option("--replica", "-r", help="Which one, as `penstock replicas` names it.")]


def replicas(url: Url = DEFAULT_URL, key: Key = None) -> None:
    """
    Show every replica of every model: whether it is up, its breaker, what it runs.

    Example:

        penstock replicas
    """
    _show(call("GET", url, key, "/replicas")["data"])


def scale(
    model: Model,
    count: Annotated[int, typer.Argument(min=1, metavar="N", help="How many replicas.")],
    url: Url = DEFAULT_URL,
    key: Key = None,
) -> None:
    """
    Run N replicas of a model: start more, or drain those that are too many. Returns when it is done.

    Example:

        penstock scale smollm2-135m 3
    """
    _tell(model, "scale", {"replicas": count}, url, key)


def restart(
    model: Annotated[str | None, typer.Argument(help="What clients call the model; every model by default.")] = None,
    replica: Replica = None,
    url: Url = DEFAULT_URL,
    key: Key = None,
) -> None:
    """
    Drain the replicas of a model and start them again, one after the other; requests go on meanwhile.

    Examples:

        penstock restart

        penstock restart smollm2-135m

        penstock restart smollm2-135m --replica 1
    """
    from penstock.errors import PenstockError

    if model is None and replica is not None:
        raise PenstockError("say whose replica it is: penstock restart MODEL --replica NAME")
    found = call("GET", url, key, "/replicas")["data"]
    here = dict.fromkeys(entry["model"] for entry in found if not entry["remote"])
    for name in [model] if model is not None else here:
        _tell(name, "restart", {"replica": replica}, url, key)


def drain(
    model: Annotated[
        str | None, typer.Argument(help="What clients call the model; the whole server by default.")
    ] = None,
    replica: Replica = None,
    url: Url = DEFAULT_URL,
    key: Key = None,
) -> None:
    """
    Let a replica finish what it runs and stop; `penstock restart` brings it back. Without a model, stop the server so.

    Examples:

        penstock drain smollm2-135m --replica 1

        penstock drain
    """
    from penstock.errors import PenstockError

    if model is None:
        if replica is not None:
            raise PenstockError("say whose replica it is: penstock drain MODEL --replica NAME")
        typer.echo(f"the server is {call('POST', url, key, '/drain')['state']}")
    elif replica is None:
        raise PenstockError("say which replica: penstock drain MODEL --replica NAME")
    else:
        _tell(model, "drain", {"replica": replica}, url, key)


def _tell(model: str, verb: str, body: dict[str, Any], url: str, key: str | None) -> None:
    begin = time.monotonic()
    _show(call("POST", url, key, f"/models/{model}/{verb}", body)["replicas"])
    typer.echo(f"done after {time.monotonic() - begin:.1f} s")


def _show(entries: list[dict[str, Any]]) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table("replica", "role", "state", "breaker", "running", "waiting", "device", box=None, pad_edge=False)
    for entry in entries:
        state = "leaving" if entry["leaving"] else entry["state"]
        running, waiting = str(entry["running"]), str(entry["waiting"])
        role, device = entry["role"] or "-", entry["device"] or "-"
        table.add_row(entry["id"], role, state, entry["breaker"], running, waiting, device)
    Console().print(table)
