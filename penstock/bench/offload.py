"""`penstock bench offload`: resuming a conversation whose KV blocks are on the host, against recomputing it.

The device cache has room for one conversation, the host for several. Conversations take turns, so that each return
finds its blocks on the host; in between, others of the same length are computed from scratch. Both kinds of request go
through the same engine in the same run, and the time is that of their first token.
"""

from __future__ import annotations

import random
import statistics
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from penstock.bench import report
from penstock.bench.engine import BenchError
from penstock.bench.offline import OfflineBenchSettings, load
from penstock.engine.request import Delta, Request, SamplingParams

if TYPE_CHECKING:
    from rich.console import Console

    from penstock.bench.engine import Steppable

NEW_TOKENS = 16
"""Tokens that a returning user adds to the conversation."""


@dataclass(frozen=True, slots=True)
class Times:
    """Seconds to the first token, round by round, and how much came from the host."""

    computed: list[float]
    returned: list[float]
    restored_tokens: int

    @property
    def ratio(self) -> float:
        return statistics.median(self.computed) / statistics.median(self.returned)


def first_token(engine: Steppable, request: Request) -> tuple[float, Delta]:
    """Seconds until the first token, and its delta; the request is over then."""
    begin = time.perf_counter()
    engine.submit(request)
    found: tuple[float, Delta] | None = None
    while engine.has_work:
        output = engine.step()
        for delta in output.deltas if output is not None else ():
            if delta.error is not None:
                raise BenchError(f"the benchmark's request failed: {delta.error}")
            found = found or (time.perf_counter() - begin, delta)
    assert found is not None
    return found


def measure(engine: Steppable, vocab_size: int, tokens: int, repeat: int) -> Times:
    """The first round warms up and is not counted."""
    rng = random.Random(0)
    greedy = SamplingParams(max_tokens=1, temperature=0.0)

    def text(length: int) -> list[int]:
        return [rng.randrange(vocab_size) for _ in range(length)]

    computed, returned, restored = [], [], 0
    history = text(tokens)
    first_token(engine, Request("beginning", history, greedy))
    for turn in range(repeat + 1):
        other = text(tokens)
        cold, delta = first_token(engine, Request(f"cold-{turn}", other + text(NEW_TOKENS), greedy))
        if delta.cached_tokens:
            raise BenchError("a fresh prompt was found in the cache")
        warm, delta = first_token(engine, Request(f"back-{turn}", history + text(NEW_TOKENS), greedy))
        restored = delta.cached_tokens or 0
        if restored < tokens * 0.9:
            raise BenchError(f"only {restored} of {tokens} tokens came back from the host")
        if turn:
            computed.append(cold)
            returned.append(warm)
        history = other
    return Times(computed, returned, restored)


def main(settings: OfflineBenchSettings, tokens: int, json_file: Path | None, console: Console) -> None:
    """Load an engine whose device cache holds one conversation, and measure."""
    loaded = load(settings, [], console)
    info, load_now = loaded.engine.info, loaded.engine.load_snapshot
    with console.status(f"{settings.repeat} returns to a conversation of {tokens:,} tokens"):
        times = measure(loaded.engine, info.vocab_size, tokens, settings.repeat)
    if load_now().restored_blocks == 0:
        raise BenchError("nothing was restored from the host: the device cache held both conversations")
    shape = loaded.engine.runner.kv.shape
    moved = times.restored_tokens // info.block_size * shape.block_bytes
    console.print(f"[bold]{loaded.label}[/bold], {loaded.numbers}: {report.machine_line()}")
    rows = report.table(f"Back to an evicted conversation of {tokens:,} tokens", "", "ms to the first token")
    again, back = (statistics.median(values) for values in (times.computed, times.returned))
    rows.add_row("computed again", report.number(1e3 * again, 2))
    rows.add_row(f"restored from the host ({moved / 2**20:,.0f} MiB)", report.number(1e3 * back, 2))
    console.print(rows)
    console.print(f"{times.ratio:.1f} times faster; {load_now().restored_blocks} blocks restored in all.")
    if json_file is not None:
        report.write_json(json_file, "offload", asdict(settings), asdict(times) | {"ratio": times.ratio})
