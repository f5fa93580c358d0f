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

from penstock.bench import stats
from penstock.bench.arrivals import Planned
from penstock.bench.goodput import Served
from penstock.bench.stream import AnswerError, check_length, explain, read_answer
from penstock.bench.wire import ConnectError, Connection, Target, WireError
from penstock.errors import PenstockError

Result = TypeVar("Result")
DEFAULT_VOCAB = 32000
"""Used when the server does not say: smaller than the vocabulary of any model commonly served."""


class _Model(msgspec.Struct):
    id: str
    vocab_size: int | None = None
    max_model_len: int | None = None


class _Models(msgspec.Struct):
    data: list[_Model]


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
        except (AnswerError, WireError) as error:
            tally.errors[explain(error)] += 1

    async def _one(self, connection: Connection, request: Ready, due: float, tally: Tally) -> None:
        answer = await read_answer(connection, "/v1/completions", request.body)
        check_length(answer, asked := request.planned.output_len)
        per_token = (answer.last - answer.first) / (asked - 1) if asked > 1 else None
        began = tally.began
        slow_gap = stats.percentile(sorted(answer.gaps), 0.99) if answer.gaps else None
        tally.served.append(Served(due - began, answer.first - began, answer.end - began, per_token, slow_gap))
        tally.gaps.extend(answer.gaps)
        tally.prompt_tokens += answer.prompt_tokens
        tally.output_tokens += answer.output_tokens
        tally.cached_tokens += answer.cached_tokens or 0


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


@dataclass(frozen=True, slots=True)
class ModelThere:
    """A model of the server."""

    name: str
    vocab_size: int
    context_window: int | None
    """None: the server does not say."""


async def find_model(target: Target, name: str | None, vocab_size: int | None = None) -> ModelThere:
    """The model of that name, or the first that the server lists. `vocab_size` overrides what the server says."""
    models = (await discover(target)).data
    if name is None and not models:
        raise PenstockError(f"{target.host}:{target.port} serves no model; pass --model")
    name = name or models[0].id
    known = {model.id: model for model in models}.get(name) or _Model(name)
    return ModelThere(name, vocab_size or known.vocab_size or DEFAULT_VOCAB, known.max_model_len)


def run_loop(main: Coroutine[Any, Any, Result]) -> Result:
    """As `asyncio.run`, on the faster loop where there is one: the load generator shares cores with what it loads."""
    if importlib.util.find_spec("uvloop") is None:
        return asyncio.run(main)
    import uvloop

    return uvloop.run(main)
