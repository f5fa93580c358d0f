"""A small mutation fuzzer: seeds and a corpus are mutated for a while, and every input must end as its target promises.

A target is a function that takes one input and raises when a promise is broken (an exception that is not the documented
error, a wrong answer, a process that died). The harness adds two promises of its own: no input takes longer than
`limit_s`, and a run is repeatable from its seed. A failing input is written to `found/<target>/`; once it
is mended, it moves to `corpus/<target>/`, which every later run replays first.

The quick suite always takes the same seed and the same `quick` inputs (a slow machine fewer, within 2 seconds), so that
it finds the same on every machine. The slow one takes a new seed each time, and `PENSTOCK_FUZZ_SECONDS` per target: 600
(six targets: an hour).
"""

from __future__ import annotations

import hashlib
import json
import os
import random
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import pytest

FOLDER = Path(__file__).parent
QUICK_S = 2.0
SLOW_S = 600.0
# A target's test takes its time from here: once in the quick suite, once, for longer, in the slow one.
DURATIONS = [
    pytest.param(QUICK_S, id="quick"),
    pytest.param(SLOW_S, id="slow", marks=[pytest.mark.slow, pytest.mark.timeout(0)]),
]

Mutate = Callable[[bytes, random.Random, Sequence[bytes]], bytes]


@dataclass(frozen=True, slots=True)
class Report:
    """What one run did; also appended as a JSON line to the file that `PENSTOCK_FUZZ_REPORT` names."""

    target: str
    seed: int
    seconds: float
    inputs: int
    slowest_s: float


class FuzzFailure(AssertionError):
    """An input broke a promise; the message says which input, and how to run it again."""


def fuzz(
    target: str,
    run: Callable[[bytes], None],
    seeds: Iterable[bytes],
    *,
    seconds: float,
    quick: int,
    limit_s: float = 2.0,
    mutate: Mutate | None = None,
    max_size: int = 1 << 20,
) -> Report:
    """Run `run` on the corpus, the seeds and mutations of both for `seconds`; the first failure raises FuzzFailure."""
    given = "PENSTOCK_FUZZ_SECONDS" in os.environ
    seed = 1 if seconds == QUICK_S else random.SystemRandom().randrange(1 << 32)
    most = quick if seconds == QUICK_S and not given else None
    seed = int(os.environ.get("PENSTOCK_FUZZ_SEED", seed))
    seconds = float(os.environ.get("PENSTOCK_FUZZ_SECONDS", seconds))
    rng = random.Random(seed)
    mutate = mutate or mutate_bytes
    pool = [path.read_bytes() for path in sorted((FOLDER / "corpus" / target).glob("*"))] + list(seeds)
    begun = time.monotonic()
    inputs, slowest = 0, 0.0
    while inputs < len(pool) or (time.monotonic() - begun < seconds and (most is None or inputs < most)):
        data = pool[inputs] if inputs < len(pool) else mutate(rng.choice(pool), rng, pool)[:max_size]
        took = _run_one(target, run, data, limit_s, seed)
        inputs, slowest = inputs + 1, max(slowest, took)
    report = Report(target, seed, round(time.monotonic() - begun, 1), inputs, round(slowest, 3))
    if path := os.environ.get("PENSTOCK_FUZZ_REPORT"):
        with open(path, "a") as file:
            file.write(json.dumps(asdict(report)) + "\n")
    return report


def _run_one(target: str, run: Callable[[bytes], None], data: bytes, limit_s: float, seed: int) -> float:
    begun = time.monotonic()
    try:
        run(data)
    except Exception as error:
        raise _failure(target, data, seed, f"{type(error).__name__}: {error}") from error
    took = time.monotonic() - begun
    if took > limit_s:
        # A busy machine can stall any input: a slow input counts only if it is slow again, without the time it waited
        # for a core.
        begun, waited = time.monotonic(), _waited_s()
        run(data)
        took = min(took, time.monotonic() - begun - (_waited_s() - waited))
        if took > limit_s:
            raise _failure(target, data, seed, f"took {took:.1f} s, more than {limit_s} s")
    return took


def _waited_s() -> float:
    """How long this thread has been ready to run without a core so far; 0 where the system does not say."""
    try:
        return int(Path("/proc/thread-self/schedstat").read_text().split()[1]) / 1e9
    except (OSError, IndexError, ValueError):
        return 0.0


def _failure(target: str, data: bytes, seed: int, reason: str) -> FuzzFailure:
    found = FOLDER / "found" / target
    found.mkdir(parents=True, exist_ok=True)
    path = found / hashlib.sha256(data).hexdigest()[:16]
    path.write_bytes(data)
    shown = data[:300] + (b"..." if len(data) > 300 else b"")
    return FuzzFailure(
        f"{target}: {reason}\ninput ({len(data)} bytes, saved as {path}): {shown!r}\n"
        f"repeat the run with PENSTOCK_FUZZ_SEED={seed}"
    )


INTERESTING = [
    b"\x00",
    b"\xff",
    b"\r\n",
    b"\n\n",
    b"0",
    b"-1",
    b"2147483648",
    b"18446744073709551616",
    b"1e999",
    b"NaN",
    b"\xed\xa0\x80",
    "\u202e\U0001f600".encode(),
    b"%00",
    b"../",
    b"{{",
    b"{%",
    b"[" * 64,
    b"(" * 64,
    b"a" * 300,
]


def mutate_bytes(data: bytes, rng: random.Random, pool: Sequence[bytes]) -> bytes:
    """One to four edits: flip, insert, delete, repeat, or splice in a piece of another input."""
    out = bytearray(data)
    for _ in range(rng.randint(1, 4)):
        at = rng.randrange(len(out) + 1)
        size = min(len(out) - at, 1 << rng.randrange(8))
        match rng.randrange(6):
            case 0 if at < len(out):
                out[at] ^= 1 << rng.randrange(8)
            case 1:
                out[at:at] = rng.choice(INTERESTING)
            case 2:
                del out[at : at + size]
            case 3:
                out[at:at] = out[at : at + size] * (1 << rng.randrange(8))
            case 4:
                other = rng.choice(pool)
                begin = rng.randrange(len(other) + 1)
                out[at : at + size] = other[begin : begin + (1 << rng.randrange(9))]
            case _:
                out[at:at] = rng.randbytes(rng.randint(1, 8))
    return bytes(out)


def mutate_json(data: bytes, rng: random.Random, pool: Sequence[bytes]) -> bytes:
    """Edit the parsed document: drop, double, nest or replace values; now and then edit the bytes instead."""
    if rng.random() < 0.1:
        return mutate_bytes(data, rng, pool)
    try:
        document = json.loads(data)
    except (ValueError, RecursionError):
        return mutate_bytes(data, rng, pool)
    for _ in range(rng.randint(1, 3)):
        document = _edit(document, rng)
    return json.dumps(document).encode()


def _edit(node: object, rng: random.Random) -> object:
    if isinstance(node, dict) and node and rng.random() < 0.85:
        key = rng.choice(list(node))
        edited = dict(node)
        match rng.randrange(8):
            case 0:
                del edited[key]
            case 1:
                edited[str(_value(rng))] = edited[key]
            case _:
                edited[key] = _edit(edited[key], rng)
        return edited
    if isinstance(node, list) and node and rng.random() < 0.85:
        at = rng.randrange(len(node))
        items = list(node)
        match rng.randrange(8):
            case 0:
                del items[at]
            case 1:
                items[at:at] = [items[at]] * (1 << rng.randrange(6))
            case _:
                items[at] = _edit(items[at], rng)
        return items
    return _value(rng) if rng.random() < 0.8 else {"type": "object", "properties": {"a": node}, "items": [node]}


def _value(rng: random.Random) -> object:
    choices: list[object] = [
        None,
        True,
        False,
        0,
        -1,
        1,
        2**31,
        2**63,
        2**64,
        -(2**63),
        0.5,
        1e308,
        "",
        "a",
        "\x00",
        "\ud83d\ude00",
        "a" * 5000,
        [],
        {},
        [[]],
        [None],
        "null",
        "../x",
        "\x1b[31m",
        "😀" * 100,
        {"": ""},
    ]
    return rng.choice(choices)
