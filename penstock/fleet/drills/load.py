"""Continuous load: streams of which the answer is known, and a conversation per tenant, as long as the drill lasts."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

import httpx

from penstock.fleet.drills.accounting import Answer, Attempt, Losses
from penstock.fleet.drills.client import Case, Client, Followed, check_alive
from penstock.fleet.drills.program import DrillError

LONGEST_S = 600.0
"""A stream that has not ended so long after the load was stopped is lost."""
_TURN_TOKENS = 8
_TOPICS = ("rivers", "bridges", "engines", "harbours", "lighthouses", "tunnels")


@dataclass(frozen=True, slots=True)
class Turn:
    """A turn of a conversation that a client was told is stored."""

    key: str
    response: str
    text: str


@dataclass(slots=True)
class Told:
    """Everything that clients were told."""

    streams: list[Followed] = field(default_factory=list)
    turns: list[Turn] = field(default_factory=list)
    attempts: list[Attempt] = field(default_factory=list)
    """Of requests that are not streams."""


def cases(model: str, count: int, tokens: int) -> list[Case]:
    """Greedy and sampled, with different beginnings."""
    made = []
    for number in range(count):
        content = f"Number {number}: tell me about {_TOPICS[number % len(_TOPICS)]}, at length."
        body = {"model": model, "messages": [{"role": "user", "content": content}], "max_tokens": tokens}
        body |= {"ignore_eos": True, "seed": number, "temperature": 0.0 if number % 2 else 0.9}
        made.append(Case(number, {**body, "stream": True, "stream_options": {"include_usage": True}}))
    return made


class Load:
    """`learn` asks every case once, on a healthy fleet: that is what each must say from then on."""

    def __init__(
        self,
        urls: Sequence[str],
        keys: Sequence[str],
        model: str,
        *,
        streams: int,
        tokens: int,
        prefix: str,
        pause_s: float = 0.05,
    ) -> None:
        self.told = Told()
        self.open: dict[int, Followed] = {}
        """By client: the stream that it reads now."""
        self._urls, self._keys, self._model, self._prefix = urls, keys, model, prefix
        self._streams, self._pause_s = streams, pause_s
        self._cases = cases(model, max(4, min(streams, 12)), tokens)
        self._expected: dict[int, str | None] = {}
        self._stop_at: float | None = None
        self._count = 0
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=64)
        self._http = httpx.AsyncClient(timeout=httpx.Timeout(60, connect=5), limits=limits, verify=False)
        self._tasks: list[asyncio.Task[None]] = []

    @property
    def cases(self) -> int:
        return len(self._cases)

    @property
    def done(self) -> int:
        return len(self.told.streams)

    async def learn(self, twice: bool = False) -> int:
        """`twice`: also all at the same time. Returns how many answers are not the same then."""
        client = Client(self._http, self._urls, self._keys[0], lambda: False)
        for case in self._cases:
            await self._learn(client, case)
        if twice:
            alone = dict(self._expected)
            await asyncio.gather(*(self._learn(client, case) for case in self._cases))
            for number, text in alone.items():
                if text != self._expected[number]:
                    self._expected[number] = None
        return sum(text is None for text in self._expected.values())

    async def _learn(self, client: Client, case: Case) -> None:
        stream = Followed(self._name("calm"), case)
        await client.follow(stream)
        if not stream.complete or not stream.text:
            raise DrillError(f"the fleet does not answer before anything is broken: {stream.problem}")
        self._expected[case.number] = stream.text
        self.told.streams.append(stream)

    def start(self) -> None:
        self._tasks = [asyncio.create_task(self._follow(number)) for number in range(self._streams)]
        self._tasks += [asyncio.create_task(self._converse(key)) for key in self._keys]

    async def stop(self) -> None:
        """Lets everything that runs come to its end."""
        self._stop_at = time.monotonic()
        await asyncio.gather(*self._tasks)

    async def close(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._http.aclose()

    def check_alive(self) -> None:
        """Raises what a client died of: that would be a defect of the drill, not of the fleet."""
        check_alive(self._tasks)

    def answers(self) -> list[Answer]:
        return [
            Answer(stream.name, stream.text, self._expected[stream.case.number], stream.complete, stream.problem)
            for stream in self.told.streams
        ]

    def attempts(self) -> list[Attempt]:
        return [attempt for stream in self.told.streams for attempt in stream.attempts] + self.told.attempts

    def arrivals(self) -> list[float]:
        """When pieces of text arrived, over all streams."""
        return sorted(at for stream in self.told.streams for at in stream.times)

    async def check_turns(self, losses: Losses) -> None:
        """Every gateway must have every turn that a client was told is stored."""
        for url in self._urls:
            for turn in self.told.turns:
                headers = {"authorization": f"Bearer {turn.key}"}
                reply = await self._http.get(f"{url}/v1/responses/{turn.response}", headers=headers)
                if reply.status_code != 200:
                    losses.conversations.append(f"{turn.response} is a {reply.status_code} at {url}")
                elif _text(reply.json()) != turn.text:
                    losses.conversations.append(f"{turn.response} has another text at {url}")

    def _name(self, kind: str) -> str:
        self._count += 1
        return f"{self._prefix}-{kind}-{self._count}"

    def _late(self) -> bool:
        return self._stop_at is not None and time.monotonic() > self._stop_at + LONGEST_S

    async def _follow(self, number: int) -> None:
        urls = [*self._urls[number % len(self._urls) :], *self._urls[: number % len(self._urls)]]
        client = Client(self._http, urls, self._keys[number % len(self._keys)], self._late)
        turn = number
        while self._stop_at is None:
            stream = Followed(self._name("stream"), self._cases[turn % len(self._cases)])
            self.open[number] = stream
            await client.follow(stream)
            del self.open[number]
            self.told.streams.append(stream)
            turn += 1
            await asyncio.sleep(self._pause_s)

    async def _converse(self, key: str) -> None:
        """Turn after turn; each goes on from the last one that is stored."""
        client = Client(self._http, self._urls, key, self._late)
        previous = None
        while self._stop_at is None:
            body = {"model": self._model, "input": "And then?", "max_output_tokens": _TURN_TOKENS, "temperature": 0}
            if previous is not None and len(self.told.turns) % 8:  # a conversation ends before its window does
                body["previous_response_id"] = previous
            answer, attempt = await client.ask(self._name("turn"), "/v1/responses", body)
            self.told.attempts.append(attempt)
            if answer is not None:
                previous = answer["id"]
                self.told.turns.append(Turn(key, answer["id"], _text(answer)))
            await asyncio.sleep(0.5)


def _text(response: dict[str, object]) -> str:
    output = response.get("output")
    assert isinstance(output, list)
    return "".join(
        part.get("text", "") for item in output if item.get("type") == "message" for part in item.get("content", ())
    )
