"""Requests whose prompt another engine computes: they wait here for their blocks, then go to the engine.

Invariant: a request that waits goes on in any case, with as many of its blocks as have come: when they are all there,
when the other engine is lost, refuses or is silent for too long, when there is no room for more, when its own time is
over. The engine computes what is missing, as for any prompt that it knows the beginning of. Blocks are copied in
between steps, a bounded number at a time.
"""

from __future__ import annotations

import itertools
import logging
import time
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from penstock.engine.request import Delta, EngineInfo, Request, SamplingParams
from penstock.protocol.handover.fetching import Arrived, Ended, Fetch, Fetcher, silence

if TYPE_CHECKING:
    from penstock.engine.kv.exchange import BlockExchange

MOST_WAITING = 256
"""Requests beyond these compute their prompts themselves."""
BYTES_AT_ONCE = 8 << 20
"""Copied between two steps: on CPU one or two milliseconds."""

log = logging.getLogger("penstock.protocol")


@dataclass(slots=True, eq=False)
class _Waiting:
    request: Request
    fetch: Fetch
    since: float
    known_tokens: int
    """What was here already."""
    held: list[int] = field(default_factory=list)
    """Blocks at the beginning of its sequence, kept for it."""
    taken: int = 0
    """Blocks of the fetch that have been copied in."""
    full: bool = False
    """Whether there is no room for more."""


@dataclass(frozen=True, slots=True)
class _Account:
    """What the first delta of a request says of its prompt, so that it is true of both engines together."""

    cached_tokens: int
    waited_s: float


class Incoming:
    """Used by the thread that steps the engine."""

    def __init__(self, exchange: BlockExchange, own: EngineInfo, secret_key: str) -> None:
        self.exchange = exchange
        self._own = own
        slots = {slot: exchange.memory(slot) for slot in exchange.slots}
        exchange.slots.clear()
        self.fetcher = Fetcher(own, secret_key, slots)
        self._waiting: dict[str, _Waiting] = {}
        self._by_fetch: dict[Fetch, _Waiting] = {}
        self._accounts: dict[str, _Account] = {}
        self._emptying: list[int] = []
        """Slots whose copy into the cache is under way."""
        self._serial = itertools.count()
        self._at_once = max(1, BYTES_AT_ONCE // exchange.block_bytes)

    @property
    def waiting(self) -> int:
        return len(self._waiting)

    @property
    def pressing(self) -> bool:
        """Whether there is something to do at once."""
        return bool(self.fetcher.news or self._emptying)

    def begin(self, request: Request) -> bool:
        """Have a request's prompt computed elsewhere. False: it had better go to the engine now."""
        source = request.handover
        names = self.exchange.names(request) if source is not None and self.fetcher.alive else []
        if source is None or not names or len(self._waiting) >= MOST_WAITING:
            return False
        known = self.exchange.present(names)
        block_size = self._own.block_size
        if (len(names) - known) * block_size < max(source.least_tokens, 1):
            return False
        tokens = request.prompt + request.produced
        elsewhere = replace(
            request,
            request_id=f"handover-{self._own.instance}-{next(self._serial)}",
            prompt=tokens[: len(names) * block_size + 1],
            produced=[],
            params=SamplingParams(max_tokens=1, temperature=0.0),
            handover=None,
        )
        now = time.monotonic()
        fetch = Fetch(elsewhere, names[known:], source, now)
        waiting = _Waiting(request, fetch, now, known * block_size, self.exchange.hold(names[:known]))
        self._waiting[request.request_id] = self._by_fetch[fetch] = waiting
        self.exchange.counts.waiting += 1
        self.fetcher.start(fetch)
        return True

    def advance(self) -> list[Request]:
        """Between two steps: take in what has come. The requests that need not wait any more."""
        silence(self.fetcher.wake)
        going = self._take_in()
        if not self.fetcher.alive:
            going += [self._go(waiting, "the thread that fetches has ended") for waiting in self._waiting.values()]
            self._waiting.clear()
        now = time.monotonic()
        for request_id, waiting in list(self._waiting.items()):
            limit = waiting.request.timeout_s
            if limit is not None and now - waiting.since > limit:
                going.append(self._stop(request_id, "its time is over"))
        drying, self._emptying = self._emptying, []
        for slot in drying:
            if self.exchange.settled(slot):
                self.fetcher.give_back(slot)
            else:
                self._emptying.append(slot)
        return going

    def cancel(self, request_id: str) -> bool:
        """Forget a request that waits; whether there was one."""
        if request_id not in self._waiting:
            self._accounts.pop(request_id, None)
            return False
        self._stop(request_id, "the request was aborted")
        self._accounts.pop(request_id, None)
        return True

    def settle(self, deltas: Iterable[Delta]) -> None:
        """Correct what first deltas say: blocks that another engine computed for this request were not cached, and
        waiting for them was its prefill."""
        if not self._accounts:
            return
        for delta in deltas:
            if delta.cached_tokens is None and delta.finish_reason is None:
                continue
            account = self._accounts.pop(delta.request_id, None)
            if account is not None and delta.cached_tokens is not None:
                delta.cached_tokens = min(delta.cached_tokens, account.cached_tokens)
                delta.prefill_s = (delta.prefill_s or 0.0) + account.waited_s

    def close(self) -> None:
        """Nothing waits any more, or never will go on."""
        self.fetcher.close()
        self.exchange.slots.extend(range(self.exchange.num_slots))

    def _take_in(self) -> list[Request]:
        going: list[Request] = []
        news = self.fetcher.news
        for _ in range(self._at_once):
            if not news:
                break
            match news.popleft():
                case Arrived(fetch, slot):
                    self._place(fetch, slot)
                    self._emptying.append(slot)
                case Ended(fetch, problem):
                    waiting = self._by_fetch.get(fetch)
                    if waiting is not None:
                        del self._waiting[waiting.request.request_id]
                        going.append(self._go(waiting, problem))
        return going

    def _place(self, fetch: Fetch, slot: int) -> None:
        waiting = self._by_fetch.get(fetch)
        if waiting is None or waiting.full:
            return  # it has gone on without
        blocks = self.exchange.take_in([(fetch.names[waiting.taken], slot)])
        if blocks:
            waiting.held += blocks
            waiting.taken += 1
        else:
            waiting.full = True
            self.fetcher.cancel(fetch, "there is no room for its blocks")

    def _stop(self, request_id: str, why: str) -> Request:
        waiting = self._waiting.pop(request_id)
        self.fetcher.cancel(waiting.fetch, why)
        return self._go(waiting, why)

    def _go(self, waiting: _Waiting, problem: str) -> Request:
        """Let a request go to the engine, which finds its blocks by their names."""
        del self._by_fetch[waiting.fetch]
        self.exchange.release(waiting.held)
        counts, request = self.exchange.counts, waiting.request
        waited = time.monotonic() - waiting.since
        counts.waiting -= 1
        if problem:
            counts.fallbacks += 1
            log.info("prompt of %s is computed here: %s", request.request_id, problem)
        else:
            counts.handovers += 1
            counts.seconds += waited
        cached = max(waiting.known_tokens, waiting.fetch.cached_tokens)
        self._accounts[request.request_id] = _Account(cached, waited)
        if request.timeout_s is not None:
            request = replace(request, timeout_s=max(request.timeout_s - waited, 0.001))
        return replace(request, handover=None)
