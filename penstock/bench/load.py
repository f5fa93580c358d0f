"""Streaming completions on any OpenAI-compatible server, timed one by one.

Prompts are token ids and end-of-text is ignored, so every request is exactly as long as asked; one that is not counts
as an error, never as a fast request. In an open loop a request's time begins when it was due, not when it was sent: a
client that falls behind must not make the server look quick.
"""

from __future__ import annotations

import asyncio
import importlib.util
import random
import time
from collections import Counter
from collections.abc import Callable, Coroutine, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import msgspec

from penstock.bench.arrivals import Planned
from penstock.bench.goodput import Served
from penstock.bench.wire import ConnectError, Connection, StatusError, Target, WireError
from penstock.errors import PenstockError

Result = TypeVar("Result")
DEFAULT_VOCAB = 32000
"""Used when the server does not say: smaller than the vocabulary of any model commonly served."""


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


@dataclass(frozen=True, slots=True)
class Ready:
    """An encoded request that waits for its time."""

    planned: Planned
    body: bytes


@dataclass(slots=True)
class Tally:
    """The outcome of the requests of a run."""

    served: list[Served] = field(default_factory=list)
    gaps: list[float] = field(default_factory=list)
    """Seconds between two pieces of text of one stream; a server may put several tokens into one piece."""
    prompt_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0
    errors: Counter[str] = field(default_factory=Counter)
    late: int = 0
    """Requests of an open loop that were sent later than due, because too many were in flight."""
    began: float = 0.0
    seconds: float = 0.0

    @property
    def ttft(self) -> list[float]:
        return [request.ttft for request in self.served]

    @property
    def per_token(self) -> list[float]:
        return [request.per_token for request in self.served if request.per_token is not None]

    @property
    def latency(self) -> list[float]:
        return [request.latency for request in self.served]


class LoadGenerator:
    """Requests for one model of one server."""

    def __init__(
        self, target: Target, model: str, vocab_size: int, *, temperature: float = 0.0, timeout_s: float = 300.0
    ) -> None:
        self.target = target
        self.model = model
        self.vocab_size = vocab_size
        self.temperature = temperature
        self.timeout_s = timeout_s

    def ready(self, plan: Sequence[Planned], seed: int) -> list[Ready]:
        """Random prompts for a plan."""
        rng = random.Random(seed)
        ids = range(self.vocab_size)
        return [
            Ready(
                planned,
                msgspec.json.encode(
                    {
                        "model": self.model,
                        "prompt": rng.choices(ids, k=planned.input_len),
                        "max_tokens": planned.output_len,
                        "temperature": self.temperature,
                        "seed": index,
                        "ignore_eos": True,
                        "stream": True,
                        "stream_options": {"include_usage": True},
                    }
                ),
            )
            for index, planned in enumerate(plan)
        ]

    async def closed(self, requests: Sequence[Ready], concurrency: int, done: Callable[[], None]) -> Tally:
        """Always `concurrency` in flight: each slot sends a request, reads its stream to the end and sends the next."""
        tally, queue = Tally(began=time.perf_counter()), iter(requests)
        async with asyncio.TaskGroup() as group:
            for _ in range(min(concurrency, len(requests))):
                group.create_task(self._slot(queue, tally, done))
        tally.seconds = time.perf_counter() - tally.began
        return tally

    async def open(self, requests: Sequence[Ready], most: int, done: Callable[[], None]) -> Tally:
        """Every request when it is due, at most `most` in flight; those that must wait are counted as late."""
        tally, places, idle = Tally(began=time.perf_counter()), asyncio.Semaphore(most), list[Connection]()
        try:
            async with asyncio.TaskGroup() as group:
                for request in requests:
                    due = tally.began + request.planned.at
                    await asyncio.sleep(max(0.0, due - time.perf_counter()))
                    tally.late += places.locked()
                    await places.acquire()
                    group.create_task(self._guest(request, due, places, idle, tally, done))
        finally:
            for connection in idle:
                await connection.close()
        tally.seconds = time.perf_counter() - tally.began
        return tally

    async def _slot(self, queue: Iterator[Ready], tally: Tally, done: Callable[[], None]) -> None:
        connection = Connection(self.target)
        try:
            for request in queue:
                await self._counted(connection, request, time.perf_counter(), tally)
                done()
        finally:
            await connection.close()

    async def _guest(
        self, request: Ready, due: float, places: asyncio.Semaphore, idle: list[Connection], tally: Tally,
        done: Callable[[], None],
    ) -> None:  # fmt: skip
        connection = idle.pop() if idle else Connection(self.target)
        try:
            await self._counted(connection, request, due, tally)
        finally:
            idle.append(connection)
            places.release()
        done()

    async def _counted(self, connection: Connection, request: Ready, due: float, tally: Tally) -> None:
        try:
            async with asyncio.timeout(self.timeout_s):
                await self._one(connection, request, due, tally)
        except TimeoutError:
            tally.errors[f"no end after {self.timeout_s:.0f} s"] += 1
        except StatusError as error:
            tally.errors[_describe(error)] += 1
        except WireError as error:
            tally.errors[str(error)] += 1

    async def _one(self, connection: Connection, request: Ready, due: float, tally: Tally) -> None:
        first = last = 0.0
        usage: _Usage | None = None
        gaps: list[float] = []
        async for payload in connection.events("/v1/completions", request.body):
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
        end, asked = time.perf_counter(), request.planned.output_len
        if usage is None or not first:
            tally.errors["stream ended without text and usage"] += 1
            return
        if usage.completion_tokens != asked:
            tally.errors[f"fewer tokens than the {asked} asked for (does the server limit a request's time?)"] += 1
            return
        per_token = (last - first) / (asked - 1) if asked > 1 else None
        began = tally.began
        tally.served.append(Served(due - began, first - began, end - began, per_token))
        tally.gaps.extend(gaps)
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
    """The models of the server; also the first check that it can be reached."""
    connection = Connection(target)
    try:
        async with asyncio.timeout(10):
            body = await connection.request("GET", "/v1/models")
        return msgspec.json.decode(body, type=_Models)
    except TimeoutError:
        raise PenstockError(f"{target.host}:{target.port} did not answer GET /v1/models in 10 s") from None
    except ConnectError as error:
        raise PenstockError(f"{error}; start a server with `penstock serve`, or give its address with --url") from None
    except msgspec.MsgspecError as error:
        raise PenstockError(f"{target.host}:{target.port} gave an unreadable /v1/models: {error}") from error
    finally:
        await connection.close()


def run_loop(main: Coroutine[Any, Any, Result]) -> Result:
    """As `asyncio.run`, on the faster loop where there is one: the load generator shares cores with what it loads."""
    if importlib.util.find_spec("uvloop") is None:
        return asyncio.run(main)
    import uvloop

    return uvloop.run(main)
