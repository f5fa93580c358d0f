"""Requests whose prompt another engine computes: they wait here for their blocks, then go to the engine.

Invariant: a waiting request always proceeds, with as many of its blocks as have arrived: when all have, when the other
engine is lost, refuses or is silent for too long, when there is no room for more, or when its own time is up. The
engine computes what is missing, as for any prompt with a cached prefix. Blocks are copied in between steps, a bounded
number at a time. Requests that lack the same block wait for one of them to fetch it.
"""

from __future__ import annotations

import itertools
import logging
import time
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from penstock.engine.request import Delta, EngineInfo, Request, SamplingParams
from penstock.engine_host.handover.fetcher import Arrived, Begins, Fetch, Fetcher, silence

if TYPE_CHECKING:
    from penstock.engine.kv.exchange import BlockExchange, Held

MOST_WAITING = 256
"""Further requests compute their prompts here."""

log = logging.getLogger("penstock.protocol")


@dataclass(slots=True, eq=False)
class _Waiting:
    request: Request
    since: float
    begun: bool = False
    """Whether the other engine has begun with it, if it has a `patience_s`."""
    known_tokens: int = 0
    """Tokens that were cached here already."""
    fetch: Fetch | None = None
    """None: it waits for what another request fetches."""
    cache: int = 0
    """Where its blocks go, in an engine with several caches."""
    held: list[Held] = field(default_factory=list)
    """Blocks at the beginning of its sequence, kept from eviction for it."""
    taken: int = 0
    """Blocks of the fetch that have been copied in."""
    followers: list[_Waiting] = field(default_factory=list)
    """Requests that lack the same block."""


@dataclass(frozen=True, slots=True)
class _Account:
    """Corrections to the first delta of a request, so that it describes the work of both engines."""

    cached_tokens: int | None
    """An upper bound; None: what the engine finds is right."""
    waited_s: float


class Incoming:
    """Used by the thread that steps the engine."""

    def __init__(self, exchange: BlockExchange, own: EngineInfo, secret_key: str) -> None:
        self.exchange = exchange
        self._own = own
        slots = exchange.take_all()
        states = {slot: exchange.memory(slot) for slot in slots if exchange.holds_state(slot)}
        blocks = {slot: exchange.memory(slot) for slot in slots if slot not in states}
        self.fetcher = Fetcher(own, secret_key, blocks, states)
        self._waiting: dict[str, _Waiting] = {}
        self._by_fetch: dict[Fetch, _Waiting] = {}
        self._by_block: dict[bytes, _Waiting] = {}
        """By the first block that is being fetched."""
        self._accounts: dict[str, _Account] = {}
        self.begun: list[str] = []
        """Requests with a `patience_s` that another engine has begun with, until they are told of."""
        self._going: list[Request] = []
        """Requests that no longer wait."""
        self._emptying: list[int] = []
        """Slots that are being copied into the cache."""
        self._serial = itertools.count()
        self._losses = exchange.losses

    @property
    def waiting(self) -> int:
        return len(self._waiting)

    @property
    def pressing(self) -> bool:
        """Whether there is something to do at once."""
        return bool(self.fetcher.news or self._emptying or self._going)

    def begin(self, request: Request) -> bool:
        """Have a request's prompt computed elsewhere. False when the engine should take it now."""
        if len(self._waiting) >= MOST_WAITING or not self.fetcher.alive:
            return False
        self._note_losses()
        waiting = _Waiting(request, time.monotonic())
        if not self._fetch_missing(waiting):
            return False
        self._waiting[request.request_id] = waiting
        self.exchange.counts.waiting += 1
        return True

    def take_in(self) -> None:
        """Called between two steps: take in blocks that have arrived. `ReplicaLost` where a rank is gone."""
        self._note_losses()
        silence(self.fetcher.wake)
        self._take_in()
        idle = [slot for slot in self._emptying if self.exchange.is_idle(slot)]
        for slot in idle:
            self._emptying.remove(slot)
            self.fetcher.give_back(slot)

    def gone(self) -> list[Request]:
        """The requests that no longer wait."""
        now, alive = time.monotonic(), self.fetcher.alive
        for waiting in list(self._waiting.values()):
            limit = waiting.request.timeout_s
            if limit is not None and now - waiting.since > limit:
                self._stop(waiting, "its time is up")
            elif not alive:
                self._stop(waiting, "the block fetcher has failed")
        going, self._going = self._going, []
        return going

    def cancel(self, request_id: str) -> bool:
        """Forget a request; returns whether it waited here."""
        self._accounts.pop(request_id, None)
        waiting = self._waiting.get(request_id)
        if waiting is None:
            return False
        if waiting.fetch is not None:
            self.fetcher.cancel(waiting.fetch, "the request was aborted")
        self._leave(waiting)
        return True

    def settle(self, deltas: Iterable[Delta]) -> None:
        """Correct first deltas: blocks that another engine computed for this request were not cached, and waiting for
        them was its prefill."""
        if not self._accounts:
            return
        for delta in deltas:
            if delta.cached_tokens is None and delta.finish_reason is None:
                continue
            account = self._accounts.pop(delta.request_id, None)
            if account is not None and delta.cached_tokens is not None:
                if account.cached_tokens is not None:
                    delta.cached_tokens = min(delta.cached_tokens, account.cached_tokens)
                delta.prefill_s = (delta.prefill_s or 0.0) + account.waited_s

    def close(self) -> None:
        """Stop fetching. Requests that still wait are dropped."""
        self.fetcher.close()
        self.exchange.give_back_all()

    def _fetch_missing(self, waiting: _Waiting) -> bool:
        """Fetch what a request lacks, or wait for another that lacks the same. False when too little is missing."""
        request = waiting.request
        source, names = request.handover, self.exchange.names(request)
        waiting.cache = cache = self.exchange.choose(names, self._expected())
        usable, lacking = self.exchange.missing(names, cache)
        block_size = self._own.block_size
        if source is None or (len(names) - usable) * block_size < max(source.least_tokens, 1):
            return False
        leader = self._by_block.get(lacking[0])
        if leader is not None:
            leader.followers.append(waiting)
            return True
        # The other engine puts the adapter's virtual tokens before the prompt, too.
        virtual = self.exchange.virtual(request)
        elsewhere = replace(
            request,
            request_id=f"handover-{self._own.instance}-{next(self._serial)}",
            prompt=(request.prompt + request.produced)[: max(1, len(names) * block_size + 1 - virtual)],
            produced=[],
            params=SamplingParams(max_tokens=1, temperature=0.0),
            patience_s=_patience_left(waiting),
            handover=None,
        )
        waiting.known_tokens = max(0, usable * block_size - virtual)
        waiting.held = self.exchange.hold(names, cache)
        waiting.fetch = Fetch(elsewhere, lacking, source, time.monotonic())
        self._by_fetch[waiting.fetch] = self._by_block[lacking[0]] = waiting
        self.fetcher.start(waiting.fetch)
        return True

    def _note_losses(self) -> None:
        """Where blocks were lost that had been taken in, or were about to be, all of them are fetched again."""
        if self._losses == self.exchange.losses:
            return
        self._losses = self.exchange.losses
        every = list(self._waiting.values())
        for waiting in every:
            if waiting.fetch is not None:
                self.fetcher.cancel(waiting.fetch, "a rank was lost")
            self.exchange.release(waiting.held)
            waiting.fetch, waiting.held, waiting.taken, waiting.followers = None, [], 0, []
        self._by_fetch.clear()
        self._by_block.clear()
        for waiting in every:
            if not self._fetch_missing(waiting):
                self._go(waiting)

    def _take_in(self) -> None:
        news, arrived = self.fetcher.news, list[tuple[_Waiting, int]]()
        for _ in range(self.exchange.at_once):
            if not news:
                break
            item = news.popleft()
            waiting = self._by_fetch.get(item.fetch)
            if isinstance(item, Begins):
                if waiting is not None and not waiting.begun:
                    waiting.begun = True
                    self.begun.append(waiting.request.request_id)
            elif isinstance(item, Arrived):
                self._emptying.append(item.slot)
                if waiting is not None:
                    arrived.append((waiting, item.slot))
            elif waiting is not None:
                self._place(arrived)
                arrived.clear()
                if item.fetch in self._by_fetch:  # there was room for its last blocks
                    self._go(waiting, item.problem)
        self._place(arrived)

    def _place(self, arrived: list[tuple[_Waiting, int]]) -> None:
        """Copy blocks that have arrived into the cache; a request that finds no room there stops waiting."""
        for cache, group in itertools.groupby(arrived, key=lambda pair: pair[0].cache):
            # One that found no room for an earlier block does not wait any more.
            came, pairs = [pair for pair in group if pair[0].fetch in self._by_fetch], []
            for waiting, slot in came:
                assert waiting.fetch is not None
                pairs.append((waiting.fetch.names[waiting.taken], slot))
                waiting.taken += 1
            blocks = self.exchange.take_in(pairs, cache) if pairs else []
            for (waiting, _), block in zip(came, blocks, strict=False):
                waiting.held.append(block)
            for waiting, _ in came[len(blocks) :]:
                self._stop(waiting, "there is no room for its blocks")

    def _expected(self) -> dict[int, int]:
        """By cache: blocks that are still to come."""
        expected: dict[int, int] = {}
        for waiting in self._by_fetch.values():
            assert waiting.fetch is not None
            expected[waiting.cache] = expected.get(waiting.cache, 0) + len(waiting.fetch.names) - waiting.taken
        return expected

    def _stop(self, waiting: _Waiting, why: str) -> None:
        if waiting.request.request_id in self._waiting:
            if waiting.fetch is not None:
                self.fetcher.cancel(waiting.fetch, why)
            self._go(waiting, why)

    def _go(self, waiting: _Waiting, problem: str = "") -> None:
        """Pass a request on to the engine, which finds its blocks by their hashes."""
        request, counts, fetch = waiting.request, self.exchange.counts, waiting.fetch
        waited = time.monotonic() - waiting.since
        if problem:
            counts.fallbacks += 1
            log.info("the rest of the prompt of %s is computed here: %s", request.request_id, problem)
        elif fetch is not None:
            counts.handovers += 1
            counts.seconds += time.monotonic() - fetch.began
        cached = None if fetch is None else max(waiting.known_tokens, fetch.cached_tokens)
        self._accounts[request.request_id] = _Account(cached, waited)
        if request.timeout_s is not None:
            request = replace(request, timeout_s=max(request.timeout_s - waited, 0.001))
        self._going.append(replace(request, patience_s=_patience_left(waiting), handover=None))
        self._leave(waiting)

    def _leave(self, waiting: _Waiting) -> None:
        """It waits no more. Requests that waited for its blocks look for what they still lack."""
        del self._waiting[waiting.request.request_id]
        self.exchange.counts.waiting -= 1
        self.exchange.release(waiting.held)
        if waiting.fetch is not None:
            del self._by_fetch[waiting.fetch]
            del self._by_block[waiting.fetch.names[0]]
        for follower in waiting.followers:
            if follower.request.request_id in self._waiting and not self._fetch_missing(follower):
                self._go(follower)


def _patience_left(waiting: _Waiting) -> float | None:
    """How much longer a request may wait before it is begun. One that has begun is finished, wherever that is."""
    patience_s = waiting.request.patience_s
    if patience_s is None or waiting.begun or waiting.request.produced:
        return None
    return max(patience_s - (time.monotonic() - waiting.since), 0.0)
