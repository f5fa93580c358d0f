"""`penstock bench offload`: resuming a conversation whose KV blocks are on the host, against recomputing it.

The device cache has room for one conversation, the host for several. Conversations take turns, so that each return
finds its blocks on the host; in between, others of the same length are computed from scratch. Both kinds of request go
through the same engine in the same run, and the time is that of their first token. Beside streams
(`Gaps`), what counts is how long these wait for a token while a conversation comes back.
"""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable
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
    from penstock.engine.core import Engine

STREAMED = 512
"""Tokens of a stream at most."""
SETTLING = 16
"""Tokens of each stream before a return."""
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


@dataclass(frozen=True, slots=True)
class Gaps:
    """Seconds between the tokens of streams: the median without a return, the longest of each return, and how long its
    own first token took."""

    usual: float
    longest: list[float]
    returned: list[float]


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


def measure_gaps(engine: Engine, vocab_size: int, tokens: int, repeat: int, streams: int) -> Gaps:
    """Conversations return beside streams. The first round warms up and is not counted."""
    rng = random.Random(1)
    greedy = SamplingParams(max_tokens=1, temperature=0.0)
    endless = SamplingParams(max_tokens=STREAMED, temperature=0.0)

    def text(length: int) -> list[int]:
        return [rng.randrange(vocab_size) for _ in range(length)]

    def come_back(turn: int, history: list[int]) -> tuple[list[float], float, float]:
        """Gaps before, the longest meanwhile, and the time to the first token."""
        clock, names = StreamClock(engine), [f"stream-{turn}-{stream}" for stream in range(streams)]
        for name in names:
            engine.submit(Request(name, text(NEW_TOKENS), endless))
        clock.run(lambda: all(clock.tokens.get(name, 0) > SETTLING for name in names))
        clock.gaps.clear()
        clock.run(lambda: len(clock.gaps) >= SETTLING * streams)
        before, clock.gaps = clock.gaps, []
        begin = time.perf_counter()
        engine.submit(Request(f"return-{turn}", history + text(NEW_TOKENS), greedy))
        clock.run(lambda: f"return-{turn}" in clock.tokens)
        seconds = time.perf_counter() - begin
        for name in names:
            engine.abort(name)
        while engine.has_work:
            engine.step()
        return before, max(clock.gaps, default=0.0), seconds

    usual, longest, returned = list[float](), list[float](), list[float]()
    history = text(tokens)
    first_token(engine, Request("beginning of all", history, greedy))
    for turn in range(repeat + 1):
        other = text(tokens)
        first_token(engine, Request(f"other-{turn}", other, greedy))
        before, most, seconds = come_back(turn, history)
        if turn:
            usual += before
            longest.append(most)
            returned.append(seconds)
        history = other
    return Gaps(statistics.median(usual), longest, returned)


class StreamClock:
    """Steps an engine and notes how long each stream waits for its tokens."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._last: dict[str, float] = {}
        self.tokens: dict[str, int] = {}
        self.gaps: list[float] = []

    def run(self, enough: Callable[[], bool]) -> None:
        while not enough():
            if not self._engine.has_work:
                raise BenchError("the streams ended before the conversation was back; repeat with fewer --tokens")
            output = self._engine.step()
            now = time.perf_counter()
            for delta in output.deltas if output is not None else ():
                if delta.error is not None:
                    raise BenchError(f"the benchmark's request failed: {delta.error}")
                name = delta.request_id
                if name in self._last and delta.tokens:
                    self.gaps.append(now - self._last[name])
                if delta.tokens:
                    self._last[name] = now
                    self.tokens[name] = self.tokens.get(name, 0) + len(delta.tokens)


def main(settings: OfflineBenchSettings, tokens: int, streams: int, json_file: Path | None, console: Console) -> None:
    """Load an engine whose device cache holds one conversation, and measure."""
    loaded = load(settings, [], console)
    info, load_now = loaded.engine.info, loaded.engine.load_snapshot
    with console.status(f"{settings.repeat} returns to a conversation of {tokens:,} tokens"):
        times = measure(loaded.engine, info.vocab_size, tokens, settings.repeat)
    gaps = None
    if streams:
        with console.status(f"{settings.repeat} returns beside {streams} streams"):
            gaps = measure_gaps(loaded.engine, info.vocab_size, tokens, settings.repeat, streams)
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
    if gaps is not None:
        rows = report.table(f"The same beside {streams} streams", "", "ms")
        rows.add_row("between two tokens of a stream (median)", report.number(1e3 * gaps.usual, 2))
        longest, back = (statistics.median(values) for values in (gaps.longest, gaps.returned))
        rows.add_row("the longest while the conversation comes back", report.number(1e3 * longest, 2))
        rows.add_row("its own first token", report.number(1e3 * back, 2))
        console.print(rows)
    if json_file is not None:
        found = asdict(times) | {"ratio": times.ratio} | ({} if gaps is None else {"beside_streams": asdict(gaps)})
        report.write_json(json_file, "offload", asdict(settings), found)
