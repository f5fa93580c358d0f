"""`penstock bench serve`: a closed loop of streaming completions against any OpenAI-compatible server.

N slots each send a request, read its stream to the end and send the next, so the server always has N in flight.
Prompts are token ids and end-of-text is ignored, so every request is exactly as long as asked; one that is not
counts as an error, never as a fast request.
"""

from __future__ import annotations

import asyncio
import dataclasses
import importlib.util
import random
import time
from collections import Counter
from collections.abc import Callable, Coroutine, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import msgspec
from rich.console import Console

from penstock.bench import report, stats
from penstock.bench.wire import Connection, StatusError, Target, WireError
from penstock.errors import PenstockError

Result = TypeVar("Result")
DEFAULT_VOCAB = 32000
"""Used when the server does not say: smaller than the vocabulary of any model commonly served."""


@dataclass(frozen=True, slots=True)
class Settings:
    url: str = "http://127.0.0.1:8000"
    model: str | None = None
    """The first of `/v1/models` when not set."""
    concurrency: int = 16
    requests: int | None = None
    """Four per slot when not set."""
    input_len: int = 128
    output_len: int = 128
    temperature: float = 0.0
    seed: int = 0
    warm_up: int | None = None
    """Short requests before the clock starts; one per slot when not set."""
    timeout_s: float = 300.0
    vocab_size: int | None = None

    @property
    def total(self) -> int:
        return 4 * self.concurrency if self.requests is None else self.requests


class _Choice(msgspec.Struct):
    text: str = ""
    finish_reason: str | None = None


class _PromptDetails(msgspec.Struct):
    cached_tokens: int | None = None


class _Usage(msgspec.Struct):
    prompt_tokens: int = 0
    completion_tokens: int = 0
    prompt_tokens_details: _PromptDetails | None = None


class _Error(msgspec.Struct):
    message: str = ""
    code: str | int | None = None
    type: str | None = None


class _Event(msgspec.Struct):
    choices: list[_Choice] = []
    usage: _Usage | None = None
    error: _Error | None = None


class _Model(msgspec.Struct):
    id: str
    vocab_size: int | None = None


class _Models(msgspec.Struct):
    data: list[_Model]


_event_decoder = msgspec.json.Decoder(_Event)


@dataclass(slots=True)
class Tally:
    """What every request did. Times in seconds."""

    ttft: list[float] = field(default_factory=list)
    gaps: list[float] = field(default_factory=list)
    """Between two pieces of text of one stream; a server may put several tokens into one piece."""
    per_token: list[float] = field(default_factory=list)
    """Per request: first to last piece, over the tokens after the first."""
    latency: list[float] = field(default_factory=list)
    prompt_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0
    errors: Counter[str] = field(default_factory=Counter)
    seconds: float = 0.0


class Load:
    """Closed-loop load on one server."""

    def __init__(self, settings: Settings, target: Target, model: str, vocab_size: int) -> None:
        self.settings = settings
        self.target = target
        self.model = model
        self.vocab_size = vocab_size

    def bodies(self, count: int, input_len: int, output_len: int, seed: int) -> Iterator[bytes]:
        rng = random.Random(seed)
        ids = range(self.vocab_size)
        for index in range(count):
            yield msgspec.json.encode(
                {
                    "model": self.model,
                    "prompt": rng.choices(ids, k=input_len),
                    "max_tokens": output_len,
                    "temperature": self.settings.temperature,
                    "seed": index,
                    "ignore_eos": True,
                    "stream": True,
                    "stream_options": {"include_usage": True},
                }
            )

    async def run(self, bodies: list[bytes], output_len: int, done: Callable[[], None]) -> Tally:
        """Sends every body, at most `concurrency` in flight."""
        tally = Tally()
        queue = iter(bodies)
        begin = time.perf_counter()
        async with asyncio.TaskGroup() as group:
            for _ in range(min(self.settings.concurrency, len(bodies))):
                group.create_task(self._slot(queue, output_len, tally, done))
        tally.seconds = time.perf_counter() - begin
        return tally

    async def _slot(self, queue: Iterator[bytes], output_len: int, tally: Tally, done: Callable[[], None]) -> None:
        connection = Connection(self.target)
        try:
            for body in queue:
                try:
                    async with asyncio.timeout(self.settings.timeout_s):
                        await self._one(connection, body, output_len, tally)
                except TimeoutError:
                    tally.errors[f"no end after {self.settings.timeout_s:.0f} s"] += 1
                except StatusError as error:
                    tally.errors[_describe(error)] += 1
                except WireError as error:
                    tally.errors[str(error)] += 1
                done()
        finally:
            await connection.close()

    async def _one(self, connection: Connection, body: bytes, output_len: int, tally: Tally) -> None:
        begin = time.perf_counter()
        first = last = 0.0
        usage: _Usage | None = None
        gaps: list[float] = []
        async for payload in connection.events("/v1/completions", body):
            now = time.perf_counter()
            if payload == b"[DONE]":
                continue
            event = _event_decoder.decode(payload)
            if event.error is not None:
                tally.errors[f"in stream: {event.error.code or event.error.type}: {event.error.message}"] += 1
                return
            usage = event.usage or usage
            if not event.choices:
                continue
            if first:
                gaps.append(now - last)
            else:
                first = now
            last = now
        end = time.perf_counter()
        if usage is None or not first:
            tally.errors["stream ended without text and usage"] += 1
            return
        if usage.completion_tokens != output_len:
            tally.errors[f"fewer tokens than the {output_len} asked for (does the server limit a request's time?)"] += 1
            return
        tally.ttft.append(first - begin)
        tally.latency.append(end - begin)
        tally.gaps.extend(gaps)
        if output_len > 1:
            tally.per_token.append((last - first) / (output_len - 1))
        tally.prompt_tokens += usage.prompt_tokens
        tally.output_tokens += usage.completion_tokens
        if usage.prompt_tokens_details is not None:
            tally.cached_tokens += usage.prompt_tokens_details.cached_tokens or 0


def _describe(error: StatusError) -> str:
    """Short enough to count equal errors together."""
    try:
        detail = _event_decoder.decode(error.body).error
    except msgspec.MsgspecError:
        detail = None
    if detail is None:
        return f"HTTP {error.status}"
    return f"HTTP {error.status} {detail.code or detail.type}: {detail.message}"


async def discover(target: Target) -> _Models:
    """What the server serves; the first sign that it can be reached at all."""
    connection = Connection(target)
    try:
        async with asyncio.timeout(10):
            body = await connection.request("GET", "/v1/models")
        return msgspec.json.decode(body, type=_Models)
    except TimeoutError:
        raise PenstockError(f"{target.host}:{target.port} did not answer GET /v1/models in 10 s") from None
    except msgspec.MsgspecError as error:
        raise PenstockError(f"{target.host}:{target.port} gave an unreadable /v1/models: {error}") from error
    finally:
        await connection.close()


async def measure(settings: Settings, api_key: str | None, console: Console) -> tuple[str, Tally]:
    target = Target.parse(settings.url, api_key)
    models = (await discover(target)).data
    known = {model.id: model for model in models}
    if settings.model is None and not known:
        raise PenstockError(f"{settings.url} serves no model; pass --model")
    name = settings.model or models[0].id
    vocab_size = settings.vocab_size or (known[name].vocab_size if name in known else None) or DEFAULT_VOCAB
    load = Load(settings, target, name, vocab_size)
    warm_up = settings.concurrency if settings.warm_up is None else settings.warm_up
    bodies = list(load.bodies(settings.total, settings.input_len, settings.output_len, settings.seed))
    with report.progress_bar(console) as bar:
        if warm_up:
            short = list(load.bodies(warm_up, min(32, settings.input_len), 8, settings.seed + 1_000_003))
            task = bar.add_task("warm-up", total=warm_up)
            before = await load.run(short, 8, lambda: bar.advance(task))
            if before.errors and not before.latency:
                raise PenstockError(f"every warm-up request failed: {next(iter(before.errors))}")
            bar.remove_task(task)
        task = bar.add_task(f"{name}: {settings.concurrency} in flight", total=len(bodies))
        return name, await load.run(bodies, settings.output_len, lambda: bar.advance(task))


def run_loop(main: Coroutine[Any, Any, Result]) -> Result:
    """As `asyncio.run`, on the faster loop where there is one: the load generator shares cores with what it loads."""
    if importlib.util.find_spec("uvloop") is None:
        return asyncio.run(main)
    import uvloop

    return uvloop.run(main)


def main(settings: Settings, api_key: str | None, json_file: Path | None, console: Console) -> bool:
    """Runs, prints, and says whether every request succeeded."""
    name, tally = run_loop(measure(settings, api_key, console))
    rows = {
        "TTFT": stats.percentiles(tally.ttft),
        "ITL": stats.percentiles(tally.gaps),
        "TPOT": stats.percentiles(tally.per_token),
        "E2E": stats.percentiles(tally.latency),
    }
    title = (
        f"{name} at {settings.url}: {settings.concurrency} in flight, {settings.total} requests, "
        f"{settings.input_len} in / {settings.output_len} out"
    )
    console.print(title, style="bold", highlight=False)
    latencies = report.table("", "ms", "p50", "p90", "p99", "mean", "max")
    for label, values in rows.items():
        columns = ("p50", "p90", "p99", "mean", "largest")
        figures = [None if values is None else 1e3 * getattr(values, column) for column in columns]
        latencies.add_row(label, *(report.number(figure) for figure in figures))
    console.print(latencies)
    succeeded, failed = len(tally.latency), sum(tally.errors.values())
    throughput = {
        "seconds": tally.seconds,
        "requests_per_s": succeeded / tally.seconds,
        "output_tps": tally.output_tokens / tally.seconds,
        "total_tps": (tally.prompt_tokens + tally.output_tokens) / tally.seconds,
    }
    console.print(
        f"{report.number(throughput['output_tps'])} output tok/s, "
        f"{report.number(throughput['total_tps'])} total tok/s, "
        f"{report.number(throughput['requests_per_s'], 2)} requests/s"
    )
    console.print(f"{succeeded} succeeded, {failed} failed in {tally.seconds:.1f} s")
    for what, count in tally.errors.most_common(5):
        console.print(f"{count} x {what}", style="red", markup=False)
    if tally.cached_tokens:
        console.print(
            f"{tally.cached_tokens} prompt tokens came from the server's prefix cache (an earlier run with the "
            "same seed?): TTFT is flattered. Pass another --seed.",
            style="yellow",
        )
    if json_file is not None:
        results = throughput | {
            "succeeded": succeeded,
            "cached_tokens": tally.cached_tokens,
            "errors": dict(tally.errors),
            "latency_s": {label: values.as_dict() if values else None for label, values in rows.items()},
        }
        report.write_json(json_file, "serve", dataclasses.asdict(settings) | {"model": name}, results)
    return failed == 0
