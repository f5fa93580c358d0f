"""Runs conversations on a server: each turn sends the whole history, reads the answer and waits for its tools.

A turn that fails ends its conversation: what would follow has lost its history, and its times would mean nothing. A run
that is ended early sends no further turns, and those under way are answered first.
"""

from __future__ import annotations

import asyncio
import dataclasses
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

from penstock.bench.agents.history import Histories, History
from penstock.bench.agents.plan import Conversation, Turn
from penstock.bench.stream import Answer, AnswerError, check_length, explain, read_answer
from penstock.bench.wire import Connection, Target, WireError


@dataclass(frozen=True, slots=True)
class Answered:
    """A turn that succeeded. Seconds are after the start of the run."""

    turn: int
    """From 0."""
    sent: float
    first: float
    end: float
    prompt_tokens: int
    history_tokens: int
    """Of the prompt, those that the server had read or generated in the turn before."""
    cached_tokens: int | None
    output_tokens: int

    @property
    def ttft(self) -> float:
        return self.first - self.sent


@dataclass(slots=True)
class Tally:
    """The outcome of a run."""

    turns: list[Answered] = field(default_factory=list)
    gaps: list[float] = field(default_factory=list)
    errors: Counter[str] = field(default_factory=Counter)
    lost: int = 0
    """Turns that were not sent, because one before them had failed."""
    unsent: int = 0
    """Turns that were not sent, because the run was ended before their time."""
    began: float = 0.0
    seconds: float = 0.0


@dataclass(slots=True)
class Progress:
    """What the conversations do at this moment; every change is told."""

    told: Callable[[Progress], None]
    asking: int = 0
    pausing: int = 0
    """Their tools run."""
    done: int = 0
    """Turns, failed and lost ones included."""
    tally: Tally = field(default_factory=Tally)
    """What there is so far."""

    def change(self, *, asking: int = 0, pausing: int = 0, done: int = 0) -> None:
        self.asking += asking
        self.pausing += pausing
        self.done += done
        self.told(self)

    def __str__(self) -> str:
        return f"{self.asking} asking, {self.pausing} in tools"


class Agents:
    """Conversations with one model of one server."""

    def __init__(
        self,
        target: Target,
        model: str,
        histories: Histories,
        *,
        temperature: float = 0.0,
        ignore_eos: bool = True,
        session_header: str | None = None,
        timeout_s: float = 300.0,
    ) -> None:
        self._target = target
        self._histories = histories
        self._common = {
            "model": model,
            "temperature": temperature,
            "stream": True,
            "stream_options": {"include_usage": True},
            **({"ignore_eos": True} if ignore_eos else {}),
        }
        self._ignore_eos = ignore_eos
        self._session_header = session_header
        self._timeout_s = timeout_s

    async def run(
        self,
        conversations: Sequence[Conversation],
        concurrency: int,
        told: Callable[[Progress], None],
        over: asyncio.Event | None = None,
    ) -> Tally:
        """Always `concurrency` at once, while there are as many left, and until `over` is set."""
        tally, queue = Tally(began=time.perf_counter()), iter(conversations)
        progress, over = Progress(told, tally=tally), over or asyncio.Event()
        async with asyncio.TaskGroup() as group:
            for _ in range(min(concurrency, len(conversations))):
                group.create_task(self._slot(queue, tally, progress, over))
        tally.seconds = time.perf_counter() - tally.began
        return tally

    async def _slot(self, queue: Iterator[Conversation], tally: Tally, progress: Progress, over: asyncio.Event) -> None:
        for conversation in queue:
            succeeded, failed = await self._converse(conversation, tally, progress, over)
            missing = len(conversation.turns) - succeeded
            if failed:
                tally.lost += missing - 1
                progress.change(done=missing)
            else:
                tally.unsent += missing

    async def _converse(
        self, conversation: Conversation, tally: Tally, progress: Progress, over: asyncio.Event
    ) -> tuple[int, bool]:
        """Returns the number of turns that succeeded, and whether one failed."""
        target = self._target
        if self._session_header is not None:
            target = dataclasses.replace(target, headers=((self._session_header, conversation.key),))
        history, connection, known = self._histories.new(conversation), Connection(target), 0
        try:
            for number, turn in enumerate(conversation.turns):
                body = self._body(conversation, turn, history.ask(turn))
                progress.change(pausing=1)
                ended = await _set_within(over, turn.pause_s)
                progress.change(pausing=-1)
                if ended:
                    return number, False
                progress.change(asking=1)
                sent = time.perf_counter()
                answer = await self._answer(connection, history, turn, body, tally)
                progress.change(asking=-1)
                if answer is None:
                    return number, True
                began = tally.began
                tally.turns.append(
                    Answered(
                        number,
                        sent - began,
                        answer.first - began,
                        answer.end - began,
                        prompt_tokens=answer.prompt_tokens,
                        history_tokens=min(known, answer.prompt_tokens),
                        cached_tokens=answer.cached_tokens,
                        output_tokens=answer.output_tokens,
                    )
                )
                tally.gaps.extend(answer.gaps)
                known = answer.prompt_tokens + answer.output_tokens
                progress.change(done=1)
        finally:
            await connection.close()
        return len(conversation.turns), False

    def _body(self, conversation: Conversation, turn: Turn, fields: dict[str, Any]) -> bytes:
        own = {"max_tokens": turn.output_len, "seed": conversation.seed, "prompt_cache_key": conversation.key}
        return msgspec.json.encode(self._common | own | fields)

    async def _answer(
        self, connection: Connection, history: History, turn: Turn, body: bytes, tally: Tally
    ) -> Answer | None:
        """None: the turn failed, which has been counted."""
        try:
            async with asyncio.timeout(self._timeout_s):
                answer = await read_answer(connection, history.path, body)
            if self._ignore_eos:
                check_length(answer, turn.output_len)
            history.add(answer)
            return answer
        except TimeoutError:
            tally.errors[f"no end after {self._timeout_s:.0f} s"] += 1
        except (AnswerError, WireError) as error:
            tally.errors[explain(error)] += 1
        return None


async def _set_within(event: asyncio.Event, seconds: float) -> bool:
    """Wait so long, or until the event is set: whether it is."""
    try:
        async with asyncio.timeout(seconds):
            return await event.wait()
    except TimeoutError:
        return False
