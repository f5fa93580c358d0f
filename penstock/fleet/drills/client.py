"""Clients as they should be written: they resume a stream that breaks off, at another gateway if need be, wait when
they are told to, and start over only when nobody knows their stream any more."""

from __future__ import annotations

import asyncio
import itertools
import json
import time
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import httpx

from penstock.fleet.drills.accounting import Attempt, Usage

RETRY_S = 0.25
_TRANSIENT = frozenset((408, 409, 425, 429, 500, 502, 503, 504))


@dataclass(frozen=True, slots=True)
class Case:
    """A request of the load, of which the answer is known."""

    number: int
    body: dict[str, Any]

    @property
    def most(self) -> int:
        return int(self.body["max_tokens"])


@dataclass(slots=True)
class Followed:
    """A stream from its beginning to its end, over as many connections as it took."""

    name: str
    case: Case
    attempts: list[Attempt] = field(default_factory=list)
    text: str = ""
    complete: bool = False
    problem: str = ""
    resumed: int = 0
    """How often it went on after its connection broke."""
    restarted: int = 0
    """How often it had to begin again."""
    began: float = 0.0
    times: list[float] = field(default_factory=list)
    """When its pieces arrived, by the monotonic clock."""


async def lines(reply: httpx.Response) -> AsyncIterator[bytes]:
    """Lines end with a newline only: a random model says every other kind of line break."""
    rest = b""
    async for part in reply.aiter_raw():
        *whole, rest = (rest + part).split(b"\n")
        for line in whole:
            yield line


class Client:
    """Asks the gateways of a fleet in turn. `late` tells when to give up on everything that has not ended."""

    def __init__(self, http: httpx.AsyncClient, urls: Sequence[str], key: str, late: Callable[[], bool]) -> None:
        self._http = http
        self._urls = itertools.cycle(urls)
        self._key = key
        self._late = late
        self._url = next(self._urls)

    def headers(self, request_id: str, **more: str) -> dict[str, str]:
        own = {"authorization": f"Bearer {self._key}", "x-request-id": request_id}
        return {**own, **{name.replace("_", "-"): value for name, value in more.items()}}

    async def follow(self, stream: Followed) -> None:
        """Until its end, or until it is too late."""
        name, case = stream.name, stream.case
        stream.began = time.monotonic()
        attempt = Attempt(name, case.most)
        stream.attempts.append(attempt)
        last = "new"
        while not stream.complete:
            if self._late():
                stream.problem = stream.problem or "it took too long"
                return
            if last == "new":
                attempt.sent += 1
            else:
                stream.resumed += 1
            status, last = await self._connection(stream, attempt, last)
            if status == 404 and last != "new":
                stream.text, last, attempt.abandoned = "", "new", True
                stream.restarted += 1
                attempt = Attempt(f"{name}.{stream.restarted}", case.most)
                stream.attempts.append(attempt)
            elif status and status not in _TRANSIENT and status != 200:
                return
            elif last == "new" and status in _TRANSIENT:
                attempt.refused += 1
            if not stream.complete:
                await asyncio.sleep(RETRY_S)
                self._url = next(self._urls)

    async def _connection(self, stream: Followed, attempt: Attempt, last: str) -> tuple[int, str]:
        """Reads until the end or until it breaks; the status (0: no reply) and the last event's id."""
        status = 0
        try:
            async with self._http.stream(
                "POST",
                f"{self._url}/v1/chat/completions",
                json=stream.case.body,
                headers=self.headers(attempt.request_id, last_event_id=last),
            ) as reply:
                status = reply.status_code
                if status != 200:
                    stream.problem = f"{status}: {(await reply.aread()).decode(errors='replace')[:200]}"
                    return status, last
                usage = None
                async for line in lines(reply):
                    if line.startswith(b"id: "):
                        last = line[4:].decode()
                    elif line == b"data: [DONE]":
                        stream.complete, attempt.usage, stream.problem = True, usage, ""
                    elif line.startswith(b"data: {"):
                        event = json.loads(line[6:])
                        if "error" in event:
                            stream.problem = str(event["error"])[:200]
                            return status, last
                        usage = _usage(event.get("usage")) or usage
                        piece = "".join(choice["delta"].get("content") or "" for choice in event.get("choices", ()))
                        if piece:
                            stream.text += piece
                            attempt.received += 1
                            stream.times.append(time.monotonic())
        except httpx.HTTPError as error:
            stream.problem = repr(error)[:200]
        return status, last

    async def ask(self, name: str, path: str, body: dict[str, Any]) -> tuple[dict[str, Any] | None, Attempt]:
        """A request without a stream, sent again until it has a reply."""
        attempt = Attempt(name, int(body.get("max_output_tokens", body.get("max_tokens", 0))))
        while not self._late():
            attempt.sent += 1
            try:
                reply = await self._http.post(f"{self._url}{path}", json=body, headers=self.headers(name))
            except httpx.HTTPError:
                pass
            else:
                if reply.status_code == 200:
                    answer = reply.json()
                    attempt.usage = _usage(answer.get("usage"))
                    return answer, attempt
                if reply.status_code not in _TRANSIENT:
                    return None, attempt
                attempt.refused += 1
            await asyncio.sleep(RETRY_S)
            self._url = next(self._urls)
        return None, attempt


def _usage(told: dict[str, Any] | None) -> Usage | None:
    """Of either API."""
    if told is None:
        return None
    if "input_tokens" in told:
        return Usage(told["input_tokens"], told["output_tokens"])
    return Usage(told["prompt_tokens"], told.get("completion_tokens", 0))


def check_alive(tasks: Iterable[asyncio.Task[None]]) -> None:
    """Raises what one of them died of."""
    for task in tasks:
        if task.done() and not task.cancelled() and (error := task.exception()) is not None:
            raise error
