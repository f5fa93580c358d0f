"""Terminal output: the console for messages, errors, and download progress. rich is imported on first use."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Console, ConsoleRenderable, RenderableType

    from penstock.config import Config


def stderr() -> Console:
    """The console for everything that is not the result itself."""
    from rich.console import Console

    return Console(stderr=True, highlight=False)


def stdout() -> Console:
    """The console for results. What tenants named or wrote is shown as it is: neither markup nor control characters of
    theirs have an effect on the terminal."""
    from rich.console import Console, RenderHook

    class Harmless(RenderHook):
        def process_renderables(self, renderables: list[ConsoleRenderable]) -> list[ConsoleRenderable]:
            return [harmless(renderable) for renderable in renderables]

    console = Console(markup=False)
    console.push_render_hook(Harmless())
    return console


def harmless(content: RenderableType) -> ConsoleRenderable:
    """`content` with its control characters escaped, but not those of its styles."""
    from rich.console import ConsoleOptions, RenderResult
    from rich.segment import Segment

    from penstock.telemetry.printable import printable

    class Printable:
        def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
            for text, style, control in console.render(content, options):
                yield Segment(text if control else printable(text, keep="\n\t"), style, control)

    return Printable()


def show_error(message: str) -> None:
    from rich.text import Text

    from penstock.telemetry.printable import printable

    text = printable(message, keep="\n\t")  # it may quote what a server said
    stderr().print(Text.assemble(("error: ", "bold red"), (text, "red")), soft_wrap=True)


def flags(settings: list[str] | None, **named: object) -> dict[str, str]:
    """Configuration keys from the options of a command: `--set server.port=9000`, and the `named` options given.

    In `named`, `__` stands for a dot and `each` for every item of a list (`models__each__device`).
    """
    from penstock.errors import ConfigError

    found = {}
    for setting in settings or []:
        key, equals, value = setting.partition("=")
        if not equals or not key:
            raise ConfigError(f"--set {setting}: write it as KEY=VALUE, for example --set server.drain_s=5")
        found[key.strip()] = value
    for name, given in named.items():
        if given is not None:
            found[name.replace("__", ".").replace("each", "*")] = str(given)
    return found


Progress = Callable[[str, int, int | None], None]


@contextmanager
def download_bar(console: Console, name: str) -> Iterator[Progress]:
    """A progress bar that appears with the first report; without a terminal, plain lines."""
    if not console.is_terminal:
        yield _plain_progress(console, name)
        return
    from rich.progress import BarColumn, DownloadColumn, SpinnerColumn, TextColumn, TransferSpeedColumn
    from rich.progress import Progress as Bars

    columns = (
        SpinnerColumn(),
        TextColumn("[bold]{task.fields[model]}[/] {task.description}"),
        BarColumn(bar_width=30),
        DownloadColumn(),
        TransferSpeedColumn(),
    )
    with Bars(*columns, console=console, transient=True) as bars:
        task = bars.add_task("", total=None, model=name, visible=False)
        phase = ""

        def report(what: str, done: int, total: int | None) -> None:
            nonlocal phase
            if what != phase:
                phase = what
                bars.reset(task, description=what, total=total, visible=True)
            bars.update(task, completed=done, total=total)

        yield report


def _plain_progress(console: Console, name: str) -> Progress:
    phase = ""

    def report(what: str, done: int, total: int | None) -> None:
        nonlocal phase
        if what != phase:
            phase = what
            console.print(f"{name}: {what}", markup=False)

    return report


def resolve_models(config: Config, console: Console, *, weights: bool = True) -> dict[str, Path]:
    """The local path of every model; downloads missing models and shows progress."""
    from penstock.sources.resolve import resolve

    paths = {}
    for model in config.models:
        with download_bar(console, model.name) as progress:
            paths[model.name] = resolve(model.source, progress, weights=weights)
    return paths


def resolve_drafts(config: Config, console: Console) -> Config:
    """`config` with every draft model's source replaced by its local path."""
    from penstock.sources.resolve import resolve

    models = []
    for model in config.models:
        if model.draft_model is not None:
            with download_bar(console, f"draft of {model.name}") as progress:
                path = resolve(model.draft_model, progress, pickled=True)
                model = dataclasses.replace(model, draft_model=str(path))
        models.append(model)
    return dataclasses.replace(config, models=tuple(models))
