"""`penstock cache`: size of a running server's response cache, and clearing it."""

from __future__ import annotations

from typing import Annotated
from urllib.parse import urlencode

import typer

from penstock.cli.admin import DEFAULT_URL, Key, Url, call

app = typer.Typer(
    name="cache",
    help="Show and clear the response cache of a running server.",
    no_args_is_help=True,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
)

Tenant = Annotated[str | None, typer.Option(help="Only answers of this tenant.")]


@app.command()
def show(tenant: Tenant = None, url: Url = DEFAULT_URL, key: Key = None) -> None:
    """
    Show the number and size of the cached answers.

    Example:

        penstock cache show --tenant acme
    """
    found = call("GET", url, key, f"/cache{_query(tenant=tenant)}")
    typer.echo(
        f"{found['answers']} answers, {found['bytes']:,} bytes; exact: {found['exact']}, semantic: "
        f"{found['semantic']}, kept {found['ttl_s']:g} s{' in Redis' if found['shared'] else ''}"
    )


@app.command()
def clear(
    tenant: Tenant = None,
    model: Annotated[str | None, typer.Option(help="Only answers of this model.")] = None,
    url: Url = DEFAULT_URL,
    key: Key = None,
) -> None:
    """
    Delete cached answers: of one tenant, of one model, or all.

    Example:

        penstock cache clear --tenant acme --model smollm2-135m
    """
    gone = call("DELETE", url, key, f"/cache{_query(tenant=tenant, model=model)}")
    typer.echo(f"{gone['answers']} answers deleted")


def _query(**asked: str | None) -> str:
    given = {name: value for name, value in asked.items() if value is not None}
    return f"?{urlencode(given)}" if given else ""
