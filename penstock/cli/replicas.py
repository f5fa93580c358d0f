"""`penstock replicas`, `scale`, `autoscale`, `restart` and `drain`: the replicas of a running server, through its admin
API."""

from __future__ import annotations

import time
from typing import Annotated, Any

import typer

from penstock.cli.admin import DEFAULT_URL, Key, Url, call, waiting
from penstock.cli.lists import Column, Format, Output, show

Model = Annotated[str, typer.Argument(help="Name of the model, as clients send it.")]
Replica = Annotated[str | None, typer.Option("--replica", "-r", help="Replica, as shown by `penstock replicas`.")]


def replicas(url: Url = DEFAULT_URL, key: Key = None, output: Output = "table") -> None:
    """
    Show every replica of every model: its state, circuit breaker and load; and what automatic scaling decided.

    Examples:

        penstock replicas

        penstock replicas -o json
    """
    found = call("GET", url, key, "/replicas")
    _show(found["data"], output)
    if found["autoscale"] and output == "table":
        _show_autoscale(found["autoscale"])


def autoscale(
    model: Annotated[str | None, typer.Argument(help="Model to change; by default all are shown.")] = None,
    minimum: Annotated[int | None, typer.Option("--min", min=0, help="New minimum of replicas.")] = None,
    maximum: Annotated[int | None, typer.Option("--max", min=1, help="New maximum of replicas.")] = None,
    pool: Annotated[str | None, typer.Option(help="Which of the model's pools, if they are scaled.")] = None,
    url: Url = DEFAULT_URL,
    key: Key = None,
    output: Output = "table",
) -> None:
    """
    Show what automatic scaling decided and why, or change the limits of a model until the server stops.

    Examples:

        penstock autoscale

        penstock autoscale smollm2-135m --min 2 --max 6

        penstock autoscale smollm2-135m --pool batch --max 3
    """
    from penstock.errors import PenstockError

    if minimum is not None or maximum is not None:
        if model is None:
            raise PenstockError("--min and --max need a model: penstock autoscale MODEL --min N")
        given = (("min", minimum), ("max", maximum), ("pool", pool))
        limits = {name: value for name, value in given if value is not None}
        call("POST", url, key, f"/models/{model}/autoscale", limits)
    found = call("GET", url, key, "/autoscale")["data"]
    shown = [entry for entry in found if model is None or entry["id"] == model]
    shown = [entry for entry in shown if pool is None or entry["pool"] == pool]
    if not shown:
        which = "no model is" if model is None else f"`{model}` is not"
        raise PenstockError(f"{which} scaled automatically; see models[N].autoscale in the configuration")
    _show_autoscale(shown, output)


def scale(
    model: Model,
    count: Annotated[int, typer.Argument(min=1, metavar="N", help="Number of replicas.")],
    pool: Annotated[str | None, typer.Option(help="Which of the model's pools, if it has pools.")] = None,
    url: Url = DEFAULT_URL,
    key: Key = None,
) -> None:
    """
    Set the number of replicas of a model: start new ones, or drain and stop surplus ones. Returns when done.

    Examples:

        penstock scale smollm2-135m 3

        penstock scale smollm2-135m 2 --pool batch
    """
    _tell(model, "scale", {"replicas": count} | ({} if pool is None else {"pool": pool}), url, key)


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
    machine: Annotated[
        str | None, typer.Option(metavar="NAME", help="A machine of the fleet hands its replicas over and stops.")
    ] = None,
    url: Url = DEFAULT_URL,
    key: Key = None,
) -> None:
    """
    Drain a replica: it finishes its running requests and stops, until `penstock restart` starts it again.

    With --notice, a replacement is started, and the replica is drained for good once that is ready or time runs short;
    this is for machines that are taken away, such as spot instances. Without --replica, all replicas are replaced.

    Without a model, drain and stop the whole server. With --machine, a machine of a fleet: its replicas are started
    elsewhere first, if there is room.

    Examples:

        penstock drain smollm2-135m --replica 1

        penstock drain smollm2-135m --replica 1 --notice 120

        penstock drain --machine gpu7 --notice 120

        penstock drain
    """
    from penstock.errors import PenstockError

    if machine is not None:
        if model is not None or replica is not None:
            raise PenstockError("--machine drains all that the machine runs; leave out the model and --replica")
        body = {} if notice is None else {"seconds": notice}
        done = call("POST", url, key, f"/fleet/machines/{machine}/drain", body)
        typer.echo(f"machine {machine} is {done['state']}")
    elif model is None:
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
    with waiting(f"{model}: {verb}"):
        done = call("POST", url, key, f"/models/{model}/{verb}", body)
    _show(done["replicas"])
    typer.echo(f"done after {time.monotonic() - begin:.1f} s")


def _show(entries: list[dict[str, Any]], output: Format = "table") -> None:
    columns: list[Column[dict[str, Any]]] = [
        Column("replica", lambda entry: entry["id"], rank=0),
        *_labels(entries),
        Column("role", lambda entry: entry["role"], rank=4),
        Column("state", lambda entry: "leaving" if entry["leaving"] else entry["state"], rank=0),
        Column("breaker", lambda entry: entry["breaker"], rank=2),
        Column("running", lambda entry: entry["running"]),
        Column("waiting", lambda entry: entry["waiting"]),
        Column("device", lambda entry: entry["device"], rank=3),
    ]
    show(columns, entries, output)


def _labels(entries: list[dict[str, Any]]) -> list[Column[dict[str, Any]]]:
    """Columns that only some servers need: pools, regions, and the way to replicas on other machines."""
    columns: list[Column[dict[str, Any]]] = [
        Column("pool", lambda entry: entry["pool"], rank=1),
        Column("region", lambda entry: entry["region"], rank=1),
        Column("machine", lambda entry: entry["machine"], rank=2),
        Column("round trip ms", lambda entry: entry["round_trip_ms"], rank=3),
    ]
    names = ("pool", "region", "machine", "round_trip_ms")
    return [
        column
        for column, name in zip(columns, names, strict=True)
        if any(entry.get(name) is not None for entry in entries)
    ]


def _show_autoscale(entries: list[dict[str, Any]], output: Format = "table") -> None:
    columns: list[Column[dict[str, Any]]] = [
        Column("model", lambda entry: entry["id"], rank=0),
        *([Column("pool", lambda entry: entry["pool"], rank=0)] if any(entry["pool"] for entry in entries) else []),
        Column("min", lambda entry: entry["min"]),
        Column("max", lambda entry: entry["max"]),
        Column("desired", lambda entry: entry["desired"], rank=0),
        Column("ready", lambda entry: entry["ready"], _ready, rank=0),
        Column("starting", lambda entry: entry["starting"], rank=2),
        Column("why", _why, fold=True),
    ]
    show(columns, entries, output)


def _ready(entry: dict[str, Any]) -> str:
    return str(entry["ready"]) if entry["ready"] + entry["starting"] else "asleep"


def _why(entry: dict[str, Any]) -> str:
    why = f"{entry['reason']}: {entry['detail']}" if entry["reason"] else entry["detail"]
    return why + (f"; the last start failed: {entry['problem']}" if entry["problem"] else "")
