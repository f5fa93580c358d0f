"""`penstock bench gguf-reader`: our GGUF reader beside the `gguf` package, on one file.

Each reading happens in a fresh process, the readers in turn: open the file and list its tensors (what an engine does
first), then read the whole vocabulary (what a tokenizer does). Seconds, and megabytes of memory that are not the file's
own pages. The names, shapes and tokens that both find are compared. What it does not show: reading tensors, which both
do through a memory map, or writing files, which only `gguf` can.

    python -m penstock.bench.libraries.gguf_reader penstock|gguf FILE
"""

from __future__ import annotations

import dataclasses
import hashlib
import importlib.util
import json
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console

from penstock.bench import report
from penstock.bench.stats import median
from penstock.errors import ConfigError, PenstockError
from penstock.interpreter import module
from penstock.sources.resolve import resolve

VOCABULARY = "tokenizer.ggml.tokens"
Tensors = list[tuple[str, tuple[int, ...]]]


@dataclass(frozen=True, slots=True)
class GgufReaderBenchSettings:
    model: str = "smollm2-135m"
    rounds: int = 5


def read_ours(path: str) -> tuple[Callable[[], Tensors], Callable[[], list[str]]]:
    from penstock.engine.loading.gguf import GGUFFile

    opened: list[GGUFFile] = []

    def tensors() -> Tensors:
        opened.append(GGUFFile(path))
        return [(name, tuple(info.shape)) for name, info in opened[0].tensors.items()]

    return tensors, lambda: list(opened[0].metadata[VOCABULARY])


def read_gguf(path: str) -> tuple[Callable[[], Tensors], Callable[[], list[str]]]:
    import gguf

    opened: list[Any] = []

    def tensors() -> Tensors:
        opened.append(gguf.GGUFReader(path))
        return [(tensor.name, tuple(int(size) for size in tensor.shape[::-1])) for tensor in opened[0].tensors]

    return tensors, lambda: list(opened[0].get_field(VOCABULARY).contents())


READERS = {"penstock": read_ours, "gguf": read_gguf}


def anonymous_memory() -> float:
    """Megabytes of this process that are not pages of files."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("RssAnon:")) / 1024


def read_once(reader: str, path: str) -> dict[str, Any]:
    """One reading in this process."""
    begin = time.perf_counter()
    tensors, vocabulary = READERS[reader](path)
    imported = time.perf_counter()
    before = anonymous_memory()
    begin_open = time.perf_counter()
    found = tensors()
    opened = time.perf_counter()
    memory = anonymous_memory() - before
    tokens = vocabulary()
    return {
        "import_s": imported - begin,
        "open_s": opened - begin_open,
        "open_mb": memory,
        "vocabulary_s": time.perf_counter() - opened,
        "both_mb": anonymous_memory() - before,
        "tensors": len(found),
        "digest": hashlib.sha256(json.dumps([sorted(found), tokens]).encode()).hexdigest(),
    }


def measure(path: str, rounds: int) -> dict[str, list[dict[str, Any]]]:
    results: dict[str, list[dict[str, Any]]] = {name: [] for name in READERS}
    for turn in range(rounds + 1):  # the first brings the file into the page cache and is not counted
        for name in READERS:
            command = [*module("penstock.bench.libraries.gguf_reader"), name, path]
            ran = subprocess.run(command, capture_output=True, text=True, check=False)
            if ran.returncode:
                raise PenstockError(f"{name} could not read {path}: {ran.stderr[-2000:]}")
            if turn:
                results[name].append(json.loads(ran.stdout))
    if len({reading["digest"] for readings in results.values() for reading in readings}) > 1:
        raise PenstockError("the two readers do not find the same tensors and tokens")
    return results


def main(settings: GgufReaderBenchSettings, json_file: Path | None, console: Console) -> None:
    if importlib.util.find_spec("gguf") is None:
        raise ConfigError("the package gguf is not installed: pip install gguf")
    path = resolve(settings.model)
    if path.suffix != ".gguf":
        raise ConfigError(f"{settings.model} is not a GGUF file")
    results = measure(str(path), settings.rounds)
    console.print(report.machine_line(), highlight=False)
    title = f"{path.name}: {results['penstock'][0]['tensors']} tensors, {path.stat().st_size / 1e6:,.0f} MB"
    columns = {
        "import_s": ("import ms", 1e3),
        "open_s": ("open ms", 1e3),
        "open_mb": ("open MB", 1.0),
        "vocabulary_s": ("vocabulary ms", 1e3),
        "both_mb": ("both MB", 1.0),
    }
    table = report.table(title, "", *(heading for heading, _ in columns.values()))
    for name, readings in results.items():
        figures = ((median(reading[key] for reading in readings) or 0.0) * scale for key, (_, scale) in columns.items())
        table.add_row(name, *(report.number(figure) for figure in figures))
    console.print(table)
    if json_file is not None:
        report.write_json(json_file, "gguf-reader", dataclasses.asdict(settings), results)


if __name__ == "__main__":
    print(json.dumps(read_once(sys.argv[1], sys.argv[2])))
