"""When the requests of a load arrive, and how long they are.

A closed loop has no clock: a request is sent when an earlier one has ended. An open loop has one: requests
arrive at a rate, or as a trace recorded them, whether or not the server keeps up.
"""

from __future__ import annotations

import csv
import datetime
import itertools
import json
import random
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from penstock.errors import PenstockError

Pattern = Literal["poisson", "constant", "burst"]


@dataclass(frozen=True, slots=True)
class Planned:
    """One request. `at`: seconds after the start, 0 in a closed loop."""

    at: float
    input_len: int
    output_len: int


def closed(count: int, input_len: int, output_len: int) -> list[Planned]:
    return [Planned(0.0, input_len, output_len)] * count


def at_rate(
    rate: float, pattern: Pattern, count: int, input_len: int, output_len: int, *, burst: int = 8, seed: int = 0
) -> list[Planned]:
    """`count` requests at `rate` per second on average."""
    places = itertools.islice(positions(pattern, random.Random(seed), burst=burst), count)
    return [Planned(place / rate, input_len, output_len) for place in places]


def with_lengths(lengths: Sequence[tuple[int, int]], rate: float | None) -> list[Planned]:
    """Requests of these lengths, at random times at a rate, or in a closed loop."""
    if rate is None:
        return [Planned(0.0, *ends) for ends in lengths]
    due = at_rate(rate, "poisson", len(lengths), 1, 1)
    return [Planned(planned.at, *ends) for planned, ends in zip(due, lengths, strict=True)]


def positions(pattern: Pattern, rng: random.Random, *, burst: int = 8) -> Iterator[float]:
    """When requests arrive at a rate of one per unit of time, without end. `poisson`: independent of each other;
    `constant`: evenly; `burst`: `burst` at once, evenly."""
    if pattern == "poisson":
        at = 0.0
        while True:
            yield at
            at += rng.expovariate(1.0)
    size = burst if pattern == "burst" else 1
    for index in itertools.count():
        yield float(index // size * size)


def from_trace(path: Path, limit: int | None, *, speed: float = 1.0) -> list[Planned]:
    """The first `limit` requests of a recorded trace, from its first one on, `speed` times as fast.

    Lines of JSON or CSV with a header: `at` (seconds), `input_len`, `output_len`. Two public layouts are read as they
    are: `timestamp` (milliseconds), `input_length`, `output_length`, and `TIMESTAMP` (a date and time),
    `ContextTokens`, `GeneratedTokens`.
    """
    try:
        with path.open(newline="") as file:
            rows = _json_lines(file) if path.suffix in (".jsonl", ".json") else enumerate(csv.DictReader(file), 2)
            plan = [_planned(path, number, row) for number, row in _first(rows, limit)]
    except (OSError, UnicodeDecodeError) as error:
        raise PenstockError(f"the trace {path} cannot be read: {error}") from error
    if not plan:
        raise PenstockError(f"the trace {path} has no requests")
    plan.sort(key=lambda planned: planned.at)
    start = plan[0].at
    return [Planned((p.at - start) / speed, p.input_len, p.output_len) for p in plan]


def _first(rows: Iterable[tuple[int, Any]], limit: int | None) -> Iterator[tuple[int, Any]]:
    for taken, row in enumerate(rows):
        if taken == limit:
            return
        yield row


def _json_lines(file: Iterable[str]) -> Iterator[tuple[int, Any]]:
    for number, line in enumerate(file, 1):
        if line.strip():
            try:
                yield number, json.loads(line)
            except ValueError:
                yield number, None


def _planned(path: Path, number: int, row: Any) -> Planned:
    try:
        if "at" in row:
            planned = Planned(float(row["at"]), int(row["input_len"]), int(row["output_len"]))
        elif "timestamp" in row:
            planned = Planned(float(row["timestamp"]) / 1e3, int(row["input_length"]), int(row["output_length"]))
        else:
            when = datetime.datetime.fromisoformat(row["TIMESTAMP"][:26])  # microseconds: some have more digits
            at = when.replace(tzinfo=when.tzinfo or datetime.UTC).timestamp()
            planned = Planned(at, int(row["ContextTokens"]), int(row["GeneratedTokens"]))
    except (KeyError, TypeError, ValueError) as error:
        raise PenstockError(
            f"line {number} of the trace {path} is not a request: it needs at (seconds), input_len and output_len"
        ) from error
    if planned.input_len < 1 or planned.output_len < 1 or not abs(planned.at) < float("inf"):
        raise PenstockError(f"line {number} of the trace {path}: lengths must be at least 1, and the time a number")
    return planned
