"""Shows the supervisor's events on a terminal: progress bars, a banner when ready, prefixed log lines afterwards."""

from __future__ import annotations

import json
from collections import Counter

from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TaskID, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text

from penstock.config import Config
from penstock.engine.request import EngineInfo
from penstock.supervisor.health import local_url
from penstock.supervisor.launch import engine_name
from penstock.supervisor.reporter import Reporter
from penstock.supervisor.start_timeline import StartTimeline
from penstock.telemetry.printable import printable, printable_json

_COLOURS = ("cyan", "green", "magenta", "blue", "yellow")


class TerminalReporter(Reporter):
    """Writes to `console`. With JSON logs, lines of children are passed on unchanged, so the output stays parseable."""

    def __init__(self, console: Console, config: Config, *, bars: bool = True, keys: bool = False) -> None:
        """`keys`: clients need one, so the commands shown have a place for it."""
        self._console = console
        self._config = config
        self._json = config.logging.format == "json"
        self._colours: dict[str, str] = {}
        self._phases: dict[str, str] = {}
        self._bars: Progress | None = None
        self._tasks: dict[str, TaskID] = {}
        self._was_ready = False
        self._keys = keys
        if bars and console.is_terminal and not self._json:
            self._open_bars()

    def show_at(self, config: Config) -> None:
        """The server is elsewhere than was configured; to be called before `ready`."""
        self._config = config

    def line(self, child: str, text: str) -> None:
        if self._json:
            self._console.print(printable_json(text), markup=False, soft_wrap=True)
            return
        text = printable(text, keep="\t")
        colour = self._colours.setdefault(child, _COLOURS[len(self._colours) % len(_COLOURS)])
        self._console.print(Text.assemble((f"{child} ", colour), ("│ ", "dim"), text), soft_wrap=True)

    def progress(self, child: str, phase: str, fraction: float) -> None:
        if self._bars is not None and child in self._tasks:
            self._bars.update(self._tasks[child], phase=phase, completed=fraction * 100, total=100)
        elif self._phases.get(child) != phase and not self._json:
            self._note(f"{child}: {phase}")
        self._phases[child] = phase

    def engine_started(self, child: str, info: EngineInfo) -> None:
        phases = ", ".join(f"{phase} {seconds:.1f} s" for phase, seconds in info.startup.items())
        if not info.num_blocks and not info.dimensions:
            self._note(f"{child}: asleep until a request needs it")
        else:
            where = info.device if info.ranks == 1 else f"{info.ranks} ranks starting at {info.device}"
            self._note(f"{child}: up on {where}, {info.dtype} ({phases})")
            if info.runs_through:
                self._note(f"{child}: runs through {info.runs_through}, exactly but slower than a family of our own")
        if self._bars is not None and child in self._tasks:
            self._bars.update(self._tasks[child], phase="ready", completed=100, total=100)

    def ready(self, engines: list[EngineInfo], seconds: float) -> None:
        self._close_bars()
        self._was_ready = True
        if self._json:
            self._event("ready", seconds=round(seconds, 3))
        else:
            self._banner(engines, seconds)

    def timeline(self, timeline: StartTimeline) -> None:
        if self._json:
            self._event("start", **timeline.fields())
        else:
            self._close_bars()
            self._note(str(timeline))

    def exited(self, child: str, how: str, restart_in_s: float) -> None:
        if self._json:
            self._event("restarting", child=child, how=how, delay_s=restart_in_s)
            return
        text = Text.assemble((f"{child} ", "bold"), f"died ({how}); restarting in {restart_in_s:g} s")
        self._console.print(text, style="yellow", soft_wrap=True)

    def scaled(self, model: str, before: int, after: int, why: str) -> None:
        if self._json:
            self._event("scaled", model=model, before=before, after=after, why=why)
        else:
            self._note(f"{model}: scaled from {before} to {after} replicas: {why}")

    def draining(self, limit_s: float) -> None:
        self._note(f"stopping: running requests have {limit_s:g} s to finish (Ctrl-C again to stop now)")

    def stopped(self) -> None:
        self._close_bars()
        if self._was_ready:
            self._note("stopped")

    def _open_bars(self) -> None:
        columns = (
            SpinnerColumn(),
            TextColumn("[bold]{task.description}[/] {task.fields[phase]}"),
            BarColumn(bar_width=30),
            TimeElapsedColumn(),
        )
        self._bars = Progress(*columns, console=self._console, transient=True)
        for name in (
            engine_name(model, index) for model in self._config.models for index in range(model.first_replicas)
        ):
            self._tasks[name] = self._bars.add_task(name, total=None, phase="starting")
        self._bars.start()

    def _close_bars(self) -> None:
        if self._bars is not None:
            self._bars.stop()
            self._bars = None

    def _banner(self, engines: list[EngineInfo], seconds: float) -> None:
        server = self._config.server
        url = local_url(server.host, server.port)
        body = {"model": self._config.models[0].name, "messages": [{"role": "user", "content": "Hello"}]}
        rows = Table.grid(padding=(0, 2))
        counts = Counter(info.model for info in engines)
        for info in {info.model: info for info in engines}.values():
            size = f"context {info.max_model_len} tokens, KV cache {info.num_blocks * info.block_size} tokens"
            if not info.num_blocks:
                size = "asleep until a request needs it"
            times = f"{counts[info.model]} replicas, each " if counts[info.model] > 1 else ""
            rows.add_row("Model", Text(f"{info.model}  ({times}{info.device}, {info.dtype}, {size})"))
        if server.workers > 1:
            rows.add_row("Gateways", Text(f"{server.workers} processes on one port"))
        chat = f'penstock chat "Hello"{"" if server.port == 8000 else f" --url {url}"}'
        rows.add_row("Console", Text(f"{url}/", style="bold"))
        rows.add_row("API", Text(f"{url}/v1"))
        rows.add_row("Docs", Text(f"{url}/docs"))
        rows.add_row("Try", Text(f"{chat} --key $PENSTOCK_API_KEY" if self._keys else chat))
        rows.add_row("Stop", "Ctrl-C")
        self._console.print()
        self._console.print(Text(f"Penstock is ready after {seconds:.1f} s", style="bold green"))
        self._console.print(rows)
        key = '-H "authorization: Bearer $PENSTOCK_API_KEY" ' if self._keys else ""
        curl = f"curl {url}/v1/chat/completions {key}-H 'content-type: application/json' -d '{json.dumps(body)}'"
        self._console.print(curl, markup=False, soft_wrap=True)  # on one line, for copying
        self._console.print()

    def _note(self, text: str) -> None:
        if self._json:
            self._event(text)
        else:
            self._console.print(Text(text, style="dim"), soft_wrap=True)

    def _event(self, message: str, **fields: object) -> None:
        entry = {"level": "info", "logger": "penstock.supervisor", "message": message, **fields}
        self._console.print(json.dumps(entry), markup=False, soft_wrap=True)
