"""`penstock replicas`, `scale`, `autoscale`, `restart` and `drain`: the replicas of a running server, through its admin
API."""

from __future__ import annotations

import time
from typing import Annotated, Any

import typer

from penstock.cli.admin import DEFAULT_URL, Key, Url, call

Model = Annotated[str, typer.Argument(help="Name of the model, as clients send it.")]
Replica = Annotated[str | None, typer.Option("--replica", "-r", help="Replica, as shown by `penstock replicas`.")]


def replicas(url: Url = DEFAULT_URL, key: Key = None) -> None:
    """
    Show every replica of every model: its state, circuit breaker and load; and what automatic scaling decided.

    Example:

        penstock replicas
    """
    found = call("GET", url, key, "/replicas")
    _show(found["data"])
    if found["autoscale"]:
        _show_autoscale(found["autoscale"])


def autoscale(
    model: Annotated[str | None, typer.Argument(help="Model to change; by default all are shown.")] = None,
    minimum: Annotated[int | None, typer.Option("--min", min=0, help="New minimum of replicas.")] = None,
    maximum: Annotated[int | None, typer.Option("--max", min=1, help="New maximum of replicas.")] = None,
    url: Url = DEFAULT_URL,
    key: Key = None,
) -> None:
    """
    Show what automatic scaling decided and why, or change the limits of a model until the server stops.

    Examples:

        penstock autoscale

        penstock autoscale smollm2-135m --min 2 --max 6
    """
    from penstock.errors import PenstockError

    if minimum is not None or maximum is not None:
        if model is None:
            raise PenstockError("--min and --max need a model: penstock autoscale MODEL --min N")
        limits = {name: value for name, value in (("min", minimum), ("max", maximum)) if value is not None}
        call("POST", url, key, f"/models/{model}/autoscale", limits)
    found = call("GET", url, key, "/autoscale")["data"]
    shown = [entry for entry in found if model is None or entry["id"] == model]
    if not shown:
        which = "no model is" if model is None else f"`{model}` is not"
        raise PenstockError(f"{which} scaled automatically; see models[N].autoscale in the configuration")
    _show_autoscale(shown)


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
    notice: Annotated[
        float | None,
        typer.Option(
            min=0, metavar="SECONDS", help="Its machine goes away after this time: start a replacement first."
        ),
    ] = None,
    url: Url = DEFAULT_URL,
    key: Key = None,
) -> None:
    """
    Drain a replica: it finishes its running requests and stops, until `penstock restart` starts it again.

    With --notice, a replacement is started, and the replica is drained for good once that is ready or time runs short;
    this is for machines that are taken away, such as spot instances. Without --replica, all replicas are replaced.

    Without a model, drain and stop the whole server.

    Examples:

        penstock drain smollm2-135m --replica 1

        penstock drain smollm2-135m --replica 1 --notice 120

        penstock drain
    """
    from penstock.errors import PenstockError

    if model is None:
        if replica is not None or notice is not None:
            raise PenstockError("--replica and --notice need a model: penstock drain MODEL --replica NAME")
        typer.echo(f"the server is {call('POST', url, key, '/drain')['state']}")
    elif notice is not None:
        _tell(model, "notice", {"replica": replica, "seconds": notice}, url, key)
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


def _show_autoscale(entries: list[dict[str, Any]]) -> None:
    from rich.table import Table

    from penstock.cli.terminal import stdout

    table = Table("autoscale", "limits", "desired", "ready", "starting", "why", box=None, pad_edge=False)
    for entry in entries:
        why = f"{entry['reason']}: {entry['detail']}" if entry["reason"] else entry["detail"]
        if entry["problem"]:
            why += f"; the last start failed: {entry['problem']}"
        state = "asleep" if not entry["ready"] + entry["starting"] else str(entry["ready"])
        limits = f"{entry['min']} to {entry['max']}"
        table.add_row(entry["id"], limits, str(entry["desired"]), state, str(entry["starting"]), why)
    stdout().print(table)
