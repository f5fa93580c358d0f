"""How results look: one rich table per benchmark, and the same figures as JSON for machines.

The JSON carries what a reader needs to judge a figure: the date, the command's settings, the machine, the versions.
"""

from __future__ import annotations

import datetime
import json
import os
import platform
import shutil
import subprocess
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    SpinnerColumn,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.table import Table

from penstock.machine import usable_cores


def progress_bar(console: Console) -> Progress:
    """Goes to the console's own stream and leaves nothing behind, so that a saved report stays clean."""
    columns = (
        SpinnerColumn(),
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
    )
    return Progress(*columns, console=console, transient=True)


def number(value: float | None, digits: int = 1) -> str:
    """Thousands separated; a dash where there is nothing to say."""
    return "–" if value is None else f"{value:,.{digits}f}"


def share(value: float | None) -> str:
    return "–" if value is None else f"{value:.0%}"


def table(title: str, *columns: str) -> Table:
    result = Table(title=title or None, title_justify="left", header_style="bold")
    for index, column in enumerate(columns):
        # In a narrow terminal figures go on in the next line: one that is cut short reads as another figure.
        result.add_column(column, justify="left" if index == 0 else "right", no_wrap=index == 0, overflow="fold")
    return result


def print_fitting(
    console: Console, title: str, columns: Sequence[str], rows: Sequence[Sequence[str]], *, expendable: Sequence[str]
) -> None:
    """Prints a table. Where the terminal is too narrow for it, `expendable` columns are left out, the first ones
    first, and it says so."""
    left_out: list[str] = []
    while True:
        kept = [index for index, column in enumerate(columns) if column not in left_out]
        made = table(title, *(columns[index] for index in kept))
        for row in rows:
            made.add_row(*(row[index] for index in kept))
        if (
            len(left_out) == len(expendable)
            or console.measure(made, options=console.options.update(width=1000)).maximum <= console.width
        ):
            break
        left_out.append(expendable[len(left_out)])
    console.print(made)
    if left_out:
        console.print(f"Left out for want of room: {', '.join(left_out)}; --json has them.", style="dim")


def cpu_name() -> str:
    """The processor in words, as the operating system tells it."""
    lscpu = shutil.which("lscpu")
    if lscpu is not None:
        env = os.environ | {"LC_ALL": "C"}
        listed = subprocess.run([lscpu], capture_output=True, text=True, check=False, timeout=10, env=env).stdout
        for line in listed.splitlines():
            name, _, value = line.partition(":")
            if name.strip() == "Model name" and value.strip() != "-":
                return value.strip()
    return platform.processor() or platform.machine()


def machine() -> dict[str, Any]:
    """Where the figures were taken."""
    versions = {}
    for package in ("penstock", "torch", "transformers"):
        try:
            versions[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    return {
        "cpu": cpu_name(),
        "arch": platform.machine(),
        "cores": usable_cores(),
        "system": platform.system(),
        "python": platform.python_version(),
        "versions": versions,
    }


def machine_line() -> str:
    facts = machine()
    packages = ", ".join(f"{name} {version}" for name, version in facts["versions"].items())
    return f"{facts['cpu']} ({facts['arch']}), {facts['cores']} cores; Python {facts['python']}, {packages}"


def write_text(path: Path, text: str) -> None:
    """A chart or a page; its folder is made."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def write_json(path: Path, kind: str, settings: dict[str, Any], results: Any) -> None:
    """One self-describing file per benchmark run."""
    document = {
        "benchmark": kind,
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "machine": machine(),
        "settings": settings,
        "results": results,
    }
    write_text(path, json.dumps(document, indent=2) + "\n")
