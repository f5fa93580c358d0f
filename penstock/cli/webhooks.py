"""`penstock webhooks`: the webhook endpoints of all tenants of a running server, for its operator."""

from __future__ import annotations

import time
from typing import Annotated, Any, Literal
from urllib.parse import quote, urlencode

import typer

from penstock.cli.admin import DEFAULT_URL, Key, Url, call
from penstock.cli.lists import Column, Output
from penstock.cli.lists import show as show_list

app = typer.Typer(
    name="webhooks",
    help="Show the webhook endpoints of tenants on a running server, test and disable them, send again.",
    no_args_is_help=True,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
)

Id = Annotated[str, typer.Argument(metavar="ID", help="Id of the endpoint, as shown by `list`.")]


@app.command("list")
def list_(
    tenant: Annotated[str | None, typer.Option(help="Only those of this tenant.")] = None,
    state: Annotated[Literal["failing", "disabled"] | None, typer.Option(help="Only those in this state.")] = None,
    output: Output = "table",
    url: Url = DEFAULT_URL,
    key: Key = None,
) -> None:
    """
    Show the endpoints: their state, the last delivery, and what they were not told of yet.

    Examples:

        penstock webhooks list

        penstock webhooks list --state failing -o json
    """
    asked = {"tenant": tenant, "state": state, "limit": "100", "after": None}
    found: list[dict[str, Any]] = []
    while True:
        given = {name: value for name, value in asked.items() if value is not None}
        page = call("GET", url, key, f"/webhooks?{urlencode(given)}")
        found += page["data"]
        if not page["has_more"]:
            break
        asked["after"] = page["last_id"]
    columns: list[Column[dict[str, Any]]] = [
        Column("endpoint", lambda one: one["id"], rank=0),
        Column("state", lambda one: one["state"], rank=0),
        Column("tenant", lambda one: one["tenant"], rank=1),
        Column("user", lambda one: one["user"], rank=6),
        Column("name", lambda one: one["name"], rank=5),
        Column("url", lambda one: one["url"], rank=1, fold=True),
        Column("delivered", lambda one: one["last_delivery_at"], lambda one: _when(one["last_delivery_at"]), rank=3),
        Column("failures", lambda one: one["failures"], rank=2),
        Column("waiting", lambda one: one["waiting"], rank=2),
        Column("given up", lambda one: one["given_up"], rank=2),
        Column("problem", lambda one: one["last_problem"], rank=4, fold=True),
    ]
    show_list(columns, found, output, empty="No webhook endpoints.")


@app.command()
def show(id: Id, output: Output = "table", url: Url = DEFAULT_URL, key: Key = None) -> None:
    """
    Show what an endpoint was not told of yet: events that wait, and those that were given up.

    Example:

        penstock webhooks show whe_0123
    """
    found = call("GET", url, key, _path(id))
    if output == "table":
        _say(found)
    columns: list[Column[dict[str, Any]]] = [
        Column("event", lambda one: one["event"], rank=0),
        Column("type", lambda one: one["type"], rank=1),
        Column("about", lambda one: one["data"]["id"], rank=2),
        Column("status", lambda one: one["status"], rank=0),
        Column("attempts", lambda one: one["attempts"]),
        Column("created", lambda one: one["created_at"], lambda one: _when(one["created_at"]), rank=3),
        Column("due", lambda one: one["due_at"], lambda one: _when(one["due_at"]), rank=4),
    ]
    show_list(columns, found["deliveries"], output, empty="It was told of everything.")


@app.command()
def test(
    id: Id,
    event_type: Annotated[
        str | None, typer.Option("--event-type", help="What the example is of; by default the first that it wants.")
    ] = None,
    url: Url = DEFAULT_URL,
    key: Key = None,
) -> None:
    """
    Send an example to an endpoint, also to one that is disabled, and show the status that comes back.

    Example:

        penstock webhooks test whe_0123
    """
    from penstock.errors import PenstockError

    found = call("POST", url, key, f"{_path(id)}/test", {"event_type": event_type})
    if not found["success"]:
        raise PenstockError(f"{id} replied to {found['event_type']} with status {found['status_code']}")
    typer.echo(f"{id} replied to {found['event_type']} with status {found['status_code']}")


@app.command()
def disable(id: Id, url: Url = DEFAULT_URL, key: Key = None) -> None:
    """
    Send nothing to an endpoint any more. What waits is kept; events from now on are not.

    Example:

        penstock webhooks disable whe_0123
    """
    _say(call("PATCH", url, key, _path(id), {"disabled": True}))


@app.command()
def enable(id: Id, url: Url = DEFAULT_URL, key: Key = None) -> None:
    """
    Send to an endpoint again.

    Example:

        penstock webhooks enable whe_0123
    """
    _say(call("PATCH", url, key, _path(id), {"disabled": False}))


@app.command()
def resend(
    id: Id,
    event: Annotated[str | None, typer.Option(help="Only this event, as shown by `show`.")] = None,
    url: Url = DEFAULT_URL,
    key: Key = None,
) -> None:
    """
    Send what an endpoint was not told of now, with what was given up.

    Examples:

        penstock webhooks resend whe_0123

        penstock webhooks resend whe_0123 --event evt_4567
    """
    count = call("POST", url, key, f"{_path(id)}/resend", {"event": event})["deliveries"]
    typer.echo(f"{id}: {count} {'delivery' if count == 1 else 'deliveries'} sent again")


@app.command()
def delete(id: Id, url: Url = DEFAULT_URL, key: Key = None) -> None:
    """
    Delete an endpoint, with what it was still to be told.

    Example:

        penstock webhooks delete whe_0123
    """
    call("DELETE", url, key, _path(id))
    typer.echo(f"{id} deleted")


def _path(id: str) -> str:
    return f"/webhooks/{quote(id, safe='')}"


def _say(one: dict[str, Any]) -> None:
    from penstock.telemetry.printable import printable

    problem = f"; {one['last_problem']}" if one["last_problem"] else ""
    typer.echo(
        printable(
            f"{one['id']}  {one['state']}  {one['tenant']}  {one['url']}  {one['waiting']} waiting, "
            f"{one['given_up']} given up{problem}"
        )
    )


def _when(seconds: float | None) -> str:
    return "" if seconds is None else time.strftime("%Y-%m-%d %H:%M", time.localtime(seconds))
