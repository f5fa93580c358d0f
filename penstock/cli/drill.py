"""`penstock drill`: break a fleet under load on purpose, and prove that nothing is lost."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from penstock.cli.lists import Format, Output

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from penstock.fleet.drills.run import Fault, Result, Size


def drill(
    name: Annotated[
        list[str], typer.Argument(metavar="NAME...|all|list|soak", help="Drills to hold; `list` shows their names.")
    ],
    url: Annotated[
        list[str] | None, typer.Option(help="Gateway of a running fleet; repeat it for more. Its processes are killed!")
    ] = None,
    key: Annotated[
        str | None,
        typer.Option(envvar="PENSTOCK_API_KEY", show_envvar=True, help="Key with the scopes `admin` and `metrics`."),
    ] = None,
    yes: Annotated[bool, typer.Option("--yes", help="Yes, break the running fleet.")] = False,
    model: Annotated[
        str | None,
        typer.Option(
            help="A model in place of the tiny random one; with --url, the model to ask (default: the first)."
        ),
    ] = None,
    streams: Annotated[int, typer.Option(min=2, max=1000, help="Streams at the same time.")] = 6,
    tokens: Annotated[int, typer.Option(min=20, max=1500, help="Tokens of each stream.")] = 300,
    minutes: Annotated[float | None, typer.Option(min=0.5, help="Length of a soak; by default 60.")] = None,
    settings: Annotated[
        list[str] | None,
        typer.Option("--set", "-s", metavar="KEY=VALUE", help="Setting of the throw-away fleet; may be repeated."),
    ] = None,
    report: Annotated[Path | None, typer.Option("--report", metavar="FILE.html", help="Write a report page.")] = None,
    output: Output = "table",
) -> None:
    """
    Break a fleet under load on purpose, heal it, and prove that nothing was lost.

    Without `--url` it starts a fleet of its own: two gateways, three engines, Redis and PostgreSQL on this machine,
    in a temporary folder. `soak` breaks nothing: it loads the fleet with everything at once for an hour and watches
    memory, file descriptors and the ledger. Exit code 1: something was lost, or leaked.

    Examples:

        penstock drill list

        penstock drill engine

        penstock drill all --report drills.html

        penstock drill redis postgres --streams 20 -o json

        penstock drill node --model smollm2-135m --tokens 100

        penstock drill engine gateway --url http://127.0.0.1:8000 --key $ADMIN_KEY --yes

        penstock drill soak --minutes 60 --report soak.html
    """
    import asyncio
    import signal

    from penstock.errors import ConfigError

    if minutes is not None and name != ["soak"]:
        raise ConfigError("--minutes is for `penstock drill soak`")
    if url and settings:
        raise ConfigError("--set is for the throw-away fleet; a running one (--url) has its own configuration")
    if name == ["list"]:
        _list(output)
        return
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # as Ctrl-C: the fleet is stopped and removed
    if name == ["soak"]:
        if url:
            raise ConfigError("a soak needs to see every process: it runs on a throw-away fleet, without --url")
        from penstock.cli.drill_soak import soak

        soak(60.0 if minutes is None else minutes, _source(model), streams, _table(settings), report, output)
        return
    chosen = _chosen(name, running=bool(url))
    if url and not yes:
        raise ConfigError(f"this kills processes of {', '.join(url)} under load: add --yes if that is what you want")
    from penstock.fleet.drills.run import Size

    size = Size(streams, tokens)
    with Progress(len(chosen)) as progress:
        if url:
            results = asyncio.run(_on_running(chosen, url, key or "", model or "", size, progress))
        else:
            results = asyncio.run(_on_throwaway(chosen, _source(model), size, _table(settings), progress))
    _show(results, output)
    if report is not None:
        from penstock.cli.drill_page import render

        report.write_text(render(results))
        typer.echo(f"report: {report}", err=True)
    if any(not result.passed for result in results):
        raise typer.Exit(1)


def _list(output: Format) -> None:
    from penstock.cli.lists import Column, show
    from penstock.fleet.drills.faults import FAULTS

    columns: list[Column[Fault]] = [
        Column("drill", lambda fault: fault.name, rank=0),
        Column("what happens", lambda fault: fault.title, fold=True),
        Column("on a running fleet", lambda fault: fault.outside is not None),
    ]
    show(columns, FAULTS.values(), output)


def _chosen(names: list[str], *, running: bool) -> list[Fault]:
    from penstock.errors import ConfigError
    from penstock.fleet.drills.faults import FAULTS

    if names == ["all"]:
        return [fault for fault in FAULTS.values() if fault.outside is not None or not running]
    unknown = [name for name in names if name not in FAULTS]
    if unknown:
        raise ConfigError(f"no drill is called {', '.join(unknown)}; there are {', '.join(FAULTS)}, and all")
    inside = [name for name in names if running and FAULTS[name].outside is None]
    if inside:
        raise ConfigError(f"{', '.join(inside)}: only on a throw-away fleet; leave out --url")
    return [FAULTS[name] for name in dict.fromkeys(names)]


def _table(settings: list[str] | None) -> dict[str, Any]:
    """`--set resilience.stall_s=2` as a nested table."""
    import yaml

    from penstock.errors import ConfigError

    table: dict[str, Any] = {}
    for setting in settings or ():
        path, equals, value = setting.partition("=")
        if not equals:
            raise ConfigError(f"--set {setting}: write it as KEY=VALUE, for example resilience.stall_s=2")
        *above, last = path.split(".")
        place = table
        for word in above:
            place = place.setdefault(word, {})
        place[last] = yaml.safe_load(value)
    return table


async def _on_throwaway(
    faults: Sequence[Fault], source: Path | None, size: Size, settings: dict[str, Any], progress: Progress
) -> list[Result]:
    """One fleet per layout."""
    from penstock.fleet.drills.run import hold
    from penstock.fleet.drills.throwaway import Layout, ThrowAway

    layouts: dict[Layout, list[Fault]] = {}
    for fault in faults:
        layouts.setdefault(fault.layout, []).append(fault)
    results = []
    for layout, some in layouts.items():
        tell = progress.drill("a fleet")
        async with ThrowAway(layout, source, settings, tell=tell) as fleet:
            for fault in some:
                results.append(await hold(fault, fleet, size, progress.drill(fault.name)))
                progress.done(results[-1])
    return results


async def _on_running(
    faults: Sequence[Fault], urls: list[str], key: str, model: str, size: Size, progress: Progress
) -> list[Result]:
    from penstock.fleet.drills.live import Running
    from penstock.fleet.drills.run import hold

    results = []
    for fault in faults:
        async with Running([url.rstrip("/") for url in urls], key, model) as fleet:
            results.append(await hold(fault, fleet, size, progress.drill(fault.name)))
        progress.done(results[-1])
    return results


def _source(model: str | None) -> Path | None:
    """Where the checkpoint of `--model` is; it is fetched if need be."""
    if model is None:
        return None
    from penstock.cli.terminal import download_bar, stderr
    from penstock.sources.resolve import resolve

    with download_bar(stderr(), model) as bar:
        return resolve(model, bar)


class Progress:
    """A line per drill on standard error, with what happens now in the last one."""

    def __init__(self, total: int) -> None:
        from penstock.cli.terminal import stderr

        self._console = stderr()
        self._status = self._console.status("")
        self._total, self._number = total, 0

    def __enter__(self) -> Progress:
        self._status.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._status.stop()

    def drill(self, name: str) -> Callable[[str], None]:
        def tell(what: str) -> None:
            line = f"{name} ({self._number} of {self._total} done): {what}"
            if self._console.is_terminal:
                self._status.update(line)
            else:
                self._console.print(line)

        return tell

    def done(self, result: Result) -> None:
        from penstock.cli.drill_page import verdict

        self._number += 1
        style = "green" if result.passed else "bold red"
        self._console.print(f"{result.name}: {verdict(result)} ({result.seconds:.0f} s)", style=style, markup=False)


def _show(results: list[Result], output: Format) -> None:
    from penstock.cli.drill_page import seconds, verdict
    from penstock.cli.terminal import stdout

    if output == "json":
        import json

        typer.echo(json.dumps([result.as_dict() for result in results], indent=2))
        return
    from penstock.cli.lists import Column, show

    columns: list[Column[Result]] = [
        Column("drill", lambda result: result.name, rank=0),
        Column("lost", lambda result: sum(result.losses.counts().values()), verdict, rank=0),
        Column("detected s", lambda result: result.detected_s, lambda result: seconds(result.detected_s), rank=1),
        Column(
            "first token s", lambda result: result.again_s, lambda result: seconds(result.again_s, "no pause"), rank=1
        ),
        Column("full s", lambda result: result.full_s, lambda result: seconds(result.full_s), rank=1),
        Column("streams", lambda result: result.streams, rank=2),
        Column("resumed", lambda result: result.resumed, rank=3),
        Column("restarted", lambda result: result.restarted, rank=3),
        Column("tokens", lambda result: result.tokens, rank=3),
        Column("charges", lambda result: result.ledger.charges, rank=2),
        Column("exact", lambda result: result.ledger.exact, rank=3),
    ]
    show(columns, results, output)
    if output == "table":
        for result in results:
            for line in result.losses.lines()[:20]:
                stdout().print(f"{result.name}: lost {line}")
