"""Remote models: chooses the server that answers a request and retries on another one.

Owns the servers of one model, their breakers and the task that checks them. A request goes to the least busy server
whose breaker is not open and whose provider's limits leave room; how busy it is, a server tells itself where it has
metrics, else its requests in flight count. Until the first text arrives a request may be retried on another server,
within the retry budget. After that a broken connection is an error, because no other server can continue in the middle
of a text.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any, Literal, TypeVar

from penstock.backends.base import Clock, monotonic
from penstock.backends.remote.chunk import Chunk, EmbeddingBatch, RerankScores, TokenCount
from penstock.backends.remote.features import Feature, Fit, Operation
from penstock.backends.remote.server import RemoteServer
from penstock.config.sampling import UNSET_DEFAULTS
from penstock.identity.access import Access
from penstock.identity.labels import NO_LABELS, OF_REMOTES, REGION, Demand, Labels, Requirement, closest
from penstock.protocol.errors import ApiError, DataRuleForbids, EngineUnavailable, Overloaded
from penstock.routing.breaker import Breaker, BreakerPolicy
from penstock.routing.regions import RegionChoice
from penstock.routing.retry_budget import RetryBudget
from penstock.text import TextModel

STEP = 0.2
"""Weight of the newest answer in the mean time to the first text."""

T = TypeVar("T")

log = logging.getLogger("penstock.routing")


@dataclass(slots=True)
class RemoteMember:
    """One server of a remote model."""

    server: RemoteServer
    breaker: Breaker
    reachable: bool = True
    """Result of the last health check."""
    region: str = ""
    labels: Labels = OF_REMOTES
    """For data rules: those of its model, and its region."""
    first_text_s: float | None = None
    """Smoothed time to the first text, per request that it had at the time."""

    def said(self, seconds: float) -> None:
        """Takes the time of an answer to its first text into the mean."""
        each = max(seconds - (self.server.round_trip.seconds or 0.0), 0.0) / max(self.server.in_flight, 1)
        known = self.first_text_s
        self.first_text_s = each if known is None else known + STEP * (each - known)

    @property
    def waiting(self) -> int | None:
        """Requests that wait there, as it says; None: it does not tell."""
        return None if self.server.load is None else self.server.load.waiting

    def order(self) -> tuple[bool, bool, int, float]:
        """The least is the server to use: reachable, with the model in memory, with few requests, with room in its KV
        cache."""
        load = self.server.load
        away = load is not None and load.loaded is False
        return not self.reachable, away, self.server.requests, 0.0 if load is None else load.kv_usage or 0.0

    @property
    def expected_s(self) -> float:
        """Predicted time to the first text of the next request, without the round trip."""
        return (self.first_text_s or 0.0) * (self.server.in_flight + 1)


class RemoteModel:
    """A model that clients can name and other servers run."""

    adapter = ""
    sampling = UNSET_DEFAULTS

    def __init__(
        self,
        name: str,
        servers: Sequence[RemoteServer],
        *,
        aliases: Sequence[str] = (),
        input_price: float = 0.0,
        output_price: float = 0.0,
        max_in_flight: int = 256,
        context_window: int | None = None,
        max_waiting: int | None = None,
        check_s: float = 10.0,
        metrics_s: float = 2.0,
        limit_field: str = "max_tokens",
        breaker: BreakerPolicy | None = None,
        retry_share: float = 0.1,
        regions: Sequence[str] = (),
        labels: Labels = NO_LABELS,
        choice: RegionChoice | None = None,
        clock: Clock = monotonic,
    ) -> None:
        """`regions`: of each server. `labels`: for data rules; external unless they say otherwise."""
        self.name = name
        self.aliases = tuple(aliases)
        self.input_price = input_price
        self.output_price = output_price
        self.context_window = context_window
        self.limit_field = limit_field
        """The request field that limits the answer's tokens on these servers."""
        self.fallback: tuple[str, ...] = ()
        """Models that answer when none of its servers can, in order."""
        self.text: TextModel | None = None
        """Its tokenizer, where one is configured."""
        self.kind: Literal["chat", "embedding", "rerank"] = "chat"
        self.dimensions: int | None = None
        """Of an embedding model's vectors, if they are to be checked."""
        self.texts_per_request = 256
        self.created = int(time.time())
        self.budget = RetryBudget(retry_share)
        self.members = [RemoteMember(server, Breaker(breaker or BreakerPolicy(), clock)) for server in servers]
        self.labels = labels.over(OF_REMOTES)
        for index, member in enumerate(self.members):
            member.region = regions[index] if index < len(regions) else self.labels.get(REGION, "")
            member.labels = Labels({REGION: member.region} if member.region else ()).over(self.labels)
        self._regions = choice or RegionChoice()
        self._clock = clock
        self._max_in_flight = max_in_flight
        self._max_waiting = max_waiting
        self._check_s = check_s
        self._metrics_s = metrics_s
        self._watcher: asyncio.Task[None] | None = None

    @property
    def base_name(self) -> str:
        return self.name

    @property
    def fingerprint(self) -> str:
        parts = sorted(f"{member.server.upstream.url}\0{member.server.upstream.model}" for member in self.members)
        return "fp_" + hashlib.sha256("\0".join((self.name, *parts)).encode()).hexdigest()[:10]

    def allowed(self, access: Access) -> bool:
        """Whether it exists for a caller."""
        return access.allows("remote", self.name, aliases=self.aliases)

    @property
    def ready(self) -> bool:
        return any(member.reachable and member.breaker.allows for member in self.members)

    def unmet(self, demand: Demand) -> list[Requirement]:
        """What of a demand none of its servers meets; empty: one of them meets all of it."""
        return closest(demand, (member.labels for member in self.members))

    @property
    def in_flight(self) -> int:
        return sum(member.server.in_flight for member in self.members)

    @property
    def dialect(self) -> str:
        return self.members[0].server.dialect.name

    def supports(self, feature: Feature) -> bool:
        """Whether its servers can do this; they all speak one dialect."""
        return all(member.server.supports(feature) for member in self.members)

    def fit(self, body: Mapping[str, Any], operation: Operation = "chat") -> Fit:
        """How much of a request its servers can express: to be asked before `answer`, which gets the body that fits."""
        return self.members[0].server.fit(body, operation)

    async def start(self) -> None:
        for member in self.members:
            await member.server.start()
        self._watcher = asyncio.create_task(self._look(), name=f"servers of {self.name}")

    async def close(self) -> None:
        if self._watcher is not None:
            self._watcher.cancel()
            await asyncio.gather(self._watcher, return_exceptions=True)
        for member in self.members:
            await member.server.close()

    async def answer(
        self,
        body: Mapping[str, Any],
        request_id: str,
        first: RemoteMember,
        demand: Demand,
        operation: Operation = "chat",
    ) -> AsyncGenerator[Chunk, None]:
        """The chunks of one answer, from the server `first` if it works. `demand`: see `choose`."""
        self.budget.began()
        tried: list[RemoteMember] = []
        while True:
            member = self.choose(demand, tried) if tried else first
            tried.append(member)
            member.breaker.began()
            said, sent_at = False, self._clock()
            try:
                async with aclosing(member.server.stream(body, request_id, operation)) as chunks:
                    async for chunk in chunks:
                        if not said and _says(chunk):
                            said = member.reachable = True
                            member.breaker.succeeded()
                            member.said(self._clock() - sent_at)
                        yield chunk
                return
            except (EngineUnavailable, Overloaded) as error:
                if isinstance(error, EngineUnavailable):
                    member.breaker.failed()
                if said or len(tried) == len(self.members) or not self.budget.take():
                    raise
                self._log_retry(member, request_id, error)

    async def embed(
        self, texts: Sequence[str], request_id: str, demand: Demand, *, dimensions: int | None = None
    ) -> EmbeddingBatch:
        """Vectors of texts."""
        return await self._ask(lambda server: server.embed(texts, request_id, dimensions), request_id, demand)

    async def rerank(self, query: str, documents: Sequence[str], request_id: str, demand: Demand) -> RerankScores:
        """Scores of documents for a query."""
        return await self._ask(lambda server: server.rerank(query, documents, request_id), request_id, demand)

    async def count(self, body: Mapping[str, Any], request_id: str, demand: Demand) -> TokenCount:
        """The tokens of a `prompt` or of `messages`, counted by one of its servers; see the feature `tokenize`."""
        return await self._ask(lambda server: server.count(body, request_id), request_id, demand)

    async def _ask(self, ask: Callable[[RemoteServer], Awaitable[T]], request_id: str, demand: Demand) -> T:
        """What the first server that works says."""
        self.budget.began()
        tried: list[RemoteMember] = []
        while True:
            member = self.choose(demand, tried)
            tried.append(member)
            member.breaker.began()
            try:
                found = await ask(member.server)
            except (EngineUnavailable, Overloaded) as error:
                if isinstance(error, EngineUnavailable):
                    member.breaker.failed()
                if len(tried) == len(self.members) or not self.budget.take():
                    raise
                self._log_retry(member, request_id, error)
            else:
                member.reachable = True
                member.breaker.succeeded()
                return found

    def _log_retry(self, member: RemoteMember, request_id: str, error: ApiError) -> None:
        log.info(
            "request retried on another remote server",
            extra={"request_id": request_id, "model": self.name, "server": member.server.name, "why": str(error)},
        )

    def choose(self, demand: Demand, tried: Sequence[RemoteMember] = (), tokens: int = 1) -> RemoteMember:
        """The server to use next, other than those in `tried`; raises when there is none. Every request to a server is
        preceded by this: `demand` says which labels the server must have to see it. `tokens`: of the prompt, as far as
        known, for limits of its provider."""
        allowed = [member for member in self.members if not demand.unmet(member.labels)] if demand else self.members
        if not allowed:
            raise DataRuleForbids(f"`{self.name}` may not get this request: {demand.why(self.unmet(demand))}.")
        able = [member for member in allowed if member not in tried and member.breaker.allows]
        if not able:
            waits = [member.breaker.opens_in_s for member in self.members]
            raise EngineUnavailable(
                f"No server of `{self.name}` is available at the moment; try again.", retry_after=min(waits) or 1.0
            )
        free = [member for member in able if not member.server.wait_s(tokens)]
        if not free:
            raise Overloaded(
                f"The rate limit of `{self.name}` at its provider is used up; try again later.",
                reason="rate_limit",
                retry_after=min(member.server.wait_s(tokens) for member in able),
            )
        ready = [member for member in free if not self.saturated(member)]
        if not ready:
            waiting = sum(member.waiting or 0 for member in free)
            more = f" and {waiting} waiting" if waiting else ""
            raise Overloaded(
                f"`{self.name}` already has {self.in_flight} requests in flight{more}; try again shortly.",
                retry_after=2.0,
            )
        return min(self._near(ready), key=RemoteMember.order)

    def saturated(self, member: RemoteMember) -> bool:
        """Whether a server has as many requests as it may have."""
        if member.server.in_flight >= self._max_in_flight:
            return True
        return self._max_waiting is not None and (member.waiting or 0) >= self._max_waiting

    def _near(self, able: Sequence[RemoteMember]) -> Sequence[RemoteMember]:
        """Those in the region that is expected to answer first; all, where there is only one region."""
        if len({member.region for member in able}) == 1:
            return able
        now = self._clock()
        self._regions.seen(
            {member.region for member in self.members if member.reachable and member.breaker.allows}, now
        )
        up = [member for member in able if member.reachable] or able
        near = self._regions.choose(
            [member.region for member in up],
            [member.expected_s for member in up],
            [member.server.round_trip.seconds for member in up],
            now,
        )
        return [up[index] for index in near]

    async def _look(self) -> None:
        """Checks servers that have been silent, and the way to all where there are several regions; asks those that
        tell it how busy they are."""
        spread = len({member.region for member in self.members}) > 1
        telling = [member for member in self.members if member.server.tells_load]
        checked_at = float("-inf")
        while True:
            now = self._clock()
            due = now - checked_at >= self._check_s
            if due:
                checked_at = now
            silent = [m for m in self.members if spread or not m.reachable or m.server.idle_s > self._check_s]
            await asyncio.gather(
                *(self._check(member) for member in silent if due),
                *(member.server.look() for member in telling if member.reachable or due),
            )
            await asyncio.sleep(min(self._metrics_s, self._check_s) if telling else self._check_s)

    async def _check(self, member: RemoteMember) -> None:
        try:
            await member.server.check()
        except ApiError as error:
            if member.reachable:
                log.warning(
                    "remote server is unreachable",
                    extra={"model": self.name, "server": member.server.name, "why": error.message},
                )
            member.reachable = False
            member.breaker.failed()
        else:
            member.reachable = True


def _says(chunk: Chunk) -> bool:
    return any(
        choice.delta.content or choice.delta.reasoning_content or choice.delta.tool_calls or choice.finish_reason
        for choice in chunk.choices
    )
