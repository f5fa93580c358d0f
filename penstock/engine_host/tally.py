"""How many tokens an engine produced for each request, including those whose gateway died.

A gateway that dies leaves charges open; the gateway that settles them asks the engine what was really produced. The ids
of the requests behind one charge begin with the charge's id, up to the colon (`charge_of`). Finished requests are
remembered for `keep_s`, at most `most` of them; the oldest are forgotten first.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable, Iterable

from penstock.engine.request import Delta
from penstock.protocol.messages import TALLY_KEEP_S, Produced, charge_of

MOST = 65_536


class Tally:
    """Counts what deltas say. One thread uses it."""

    def __init__(
        self, *, keep_s: float = TALLY_KEEP_S, most: int = MOST, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._keep_s = keep_s
        self._most = most
        self._clock = clock
        self._running: dict[str, Produced] = {}
        self._ended: OrderedDict[str, float] = OrderedDict()
        self._groups: dict[str, dict[str, Produced]] = {}

    def begin(self, request_id: str, *, already: int = 0) -> None:
        """A request was accepted; it brings `already` tokens from where it ran before. A reused id starts over."""
        self._forget(request_id)
        entry = self._running[request_id] = Produced(request_id, already)
        self._groups.setdefault(charge_of(request_id), {})[request_id] = entry

    def add(self, deltas: Iterable[Delta]) -> None:
        running = self._running
        for delta in deltas:
            entry = running.get(delta.request_id)
            if entry is None:
                continue  # it has finished already, or was never accepted
            entry.tokens += len(delta.tokens)
            if delta.cached_tokens is not None:
                entry.cached_tokens = delta.cached_tokens
            if delta.finish_reason is not None:
                entry.finish_reason = delta.finish_reason
                del running[delta.request_id]
                self._ended[delta.request_id] = self._clock()
                self._trim()

    def of(self, groups: Iterable[str]) -> list[Produced]:
        """Every request of these charges that is running or remembered."""
        return [entry for group in groups for entry in self._groups.get(group, {}).values()]

    def _trim(self) -> None:
        """Called for each request that ends, and looks at two, so that old entries go while there is traffic."""
        oldest = self._clock() - self._keep_s
        for _ in range(2):
            if not self._ended:
                return
            request_id, at = next(iter(self._ended.items()))
            if at > oldest and len(self._ended) <= self._most:
                return
            self._forget(request_id)

    def _forget(self, request_id: str) -> None:
        self._ended.pop(request_id, None)
        self._running.pop(request_id, None)
        group = self._groups.get(charge_of(request_id))
        if group is not None and group.pop(request_id, None) is not None and not group:
            del self._groups[charge_of(request_id)]
