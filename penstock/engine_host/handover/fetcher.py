"""Fetches blocks from other engines on its own thread: the engine's thread only learns which slots are full.

Commands come in through one queue, news go out through another; a pair of sockets wakes the side that waits. Blocks of
a fetch arrive in order. Invariants: every fetch that was started ends in exactly one `Ended`, after everything that
arrived for it; a fetch asks for at most as many blocks as there are slots, and all fetches together for at most four
times that, so that memory is bounded however many there are.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections import deque
from dataclasses import dataclass, field
from typing import TypeAlias

import numpy as np
import zmq

from penstock.engine.kv.block_hash import is_state
from penstock.engine.request import Delta, EngineInfo, Handover, Request
from penstock.engine_host.handover.link import Link
from penstock.errors import ConfigError
from penstock.protocol.codec import ProtocolError, decode_from_engine
from penstock.protocol.messages import NOT_REGISTERED, Abort, Begun, Block, Pull, Ready, Step, Stopped, Submit

log = logging.getLogger("penstock.protocol")

CONNECT_S = 2.0
"""How long to wait for an engine that has never answered; later it is only used while it is connected."""
FORGET_S = 60.0
"""A connection that is down and was not used for this long is dropped."""
TICK_MS = 50
_ARRIVED = int(zmq.POLLIN)
SLOT_SHARES = 4
"""Blocks in transit, in all, as a multiple of the slots."""


@dataclass(slots=True, eq=False)
class Fetch:
    """Blocks wanted from another engine. Belongs to the fetching thread until it has ended."""

    request: Request
    """The request that makes the other engine compute them."""
    names: list[bytes]
    """Of the blocks, and of the state behind them, if there is one."""
    source: Handover
    began: float
    heard: float = 0.0
    """When the other engine was last known to make progress."""
    submitted: bool = False
    computed: bool = False
    """Whether the other engine has finished the request."""
    cached_tokens: int = 0
    """Tokens that it found in its own cache."""
    asked: int = 0
    arrived: int = 0
    frames: deque[list[zmq.Frame]] = field(default_factory=deque)
    """Blocks that wait for a slot."""

    @property
    def expected(self) -> bytes | None:
        """The name of the block that comes next, if one was asked for."""
        at = self.arrived + len(self.frames)
        return self.names[at] if at < self.asked else None

    def is_state(self, at: int) -> bool:
        """Whether the `at`-th of what is wanted is a state."""
        return is_state(self.names[at])

    @property
    def complete(self) -> bool:
        return self.arrived == len(self.names)


@dataclass(frozen=True, slots=True)
class Begins:
    """The other engine begins to compute the blocks of a fetch whose request has a `patience_s`."""

    fetch: Fetch


@dataclass(frozen=True, slots=True)
class Arrived:
    """The next block of a fetch is in a slot."""

    fetch: Fetch
    slot: int


@dataclass(frozen=True, slots=True)
class Ended:
    """A fetch is over. Without a problem everything has arrived."""

    fetch: Fetch
    problem: str = ""


News: TypeAlias = Begins | Arrived | Ended


class Fetcher:
    """The thread and its commands. Slots are memory that it may write to until it reports them full."""

    def __init__(
        self,
        own: EngineInfo,
        secret_key: str,
        slots: dict[int, list[memoryview]],
        state_slots: dict[int, list[memoryview]] | None = None,
    ) -> None:
        """`state_slots`: for what is no block but a state (`block_hash.is_state`)."""
        self.news: deque[News] = deque()
        self._own = own
        self._secret_key = secret_key
        everything = slots | (state_slots or {})
        self._slots = {slot: [np.frombuffer(part, np.uint8) for part in parts] for slot, parts in everything.items()}
        self._free = (list(slots), list(state_slots or {}))
        """Of blocks, and of states."""
        self._of_states = frozenset(state_slots or {})
        self._sizes = tuple(
            [len(part) for part in next(iter(kind.values()), [])] for kind in (slots, state_slots or {})
        )
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self.wake: zmq.Socket[bytes] = self._pair()
        """Readable when there is news."""
        self.wake.bind("inproc://fetcher")
        self._bell = self._pair()
        self._bell.connect("inproc://fetcher")
        self._commands: queue.SimpleQueue[Fetch | tuple[Fetch, str] | int | None] = queue.SimpleQueue()
        self._links: dict[tuple[str, str], Link] = {}
        self._poller = zmq.Poller()
        self._poller.register(self._bell, zmq.POLLIN)
        self._thread = threading.Thread(target=self._run, name="block fetcher", daemon=True)
        self._thread.start()

    def start(self, fetch: Fetch) -> None:
        self._tell(fetch)

    def cancel(self, fetch: Fetch, why: str) -> None:
        """It ends soon, if it has not ended yet."""
        self._tell((fetch, why))

    def give_back(self, slot: int) -> None:
        """A slot has been emptied."""
        self._tell(slot)

    def close(self) -> None:
        self._tell(None)
        self._thread.join()
        self.wake.close()
        self._context.term()

    def _pair(self) -> zmq.Socket[bytes]:
        socket = self._context.socket(zmq.PAIR)
        socket.setsockopt(zmq.LINGER, 0)
        return socket

    def _tell(self, command: Fetch | tuple[Fetch, str] | int | None) -> None:
        self._commands.put(command)
        _ring(self.wake)

    @property
    def alive(self) -> bool:
        return self._thread.is_alive()

    def _run(self) -> None:
        try:
            self._serve()
        except Exception:
            log.exception("the block fetcher failed; prompts are computed here from now on")
        finally:
            for link in self._links.values():
                link.close()
            self._bell.close()

    def _serve(self) -> None:
        while self._carry_out():
            for link in self._links.values():
                self._receive_all(link)
            self._place()
            self._ask()
            busy = any(link.fetches for link in self._links.values())
            self._poller.poll(TICK_MS if busy else None)

    def _carry_out(self) -> bool:
        """Carry out the commands; False when one of them is to stop."""
        silence(self._bell)
        while True:
            try:
                command = self._commands.get_nowait()
            except queue.Empty:
                return True
            if command is None:
                return False
            if isinstance(command, int):
                self._free[command in self._of_states].append(command)
            elif isinstance(command, Fetch):
                self._begin(command)
            else:
                fetch, why = command
                link = self._links.get((fetch.source.endpoint, fetch.source.public_key))
                if link is not None and fetch.request.request_id in link.fetches:
                    self._end(link, fetch, why)

    def _begin(self, fetch: Fetch) -> None:
        key = (fetch.source.endpoint, fetch.source.public_key)
        fetch.heard = time.monotonic()
        self._forget(fetch.heard)
        link = self._links.get(key)
        known = link is not None
        if link is None:
            try:
                link = Link(self._context, fetch.source, own=self._own, secret_key=self._secret_key)
            except ConfigError as error:
                self._say(Ended(fetch, str(error)))
                return
            self._links[key] = link
            self._poller.register(link.socket, zmq.POLLIN)
            self._poller.register(link.monitor, zmq.POLLIN)
        link.fetches[fetch.request.request_id] = fetch
        if known and not link.up and len(link.fetches) == 1:
            self._end(link, fetch, link.problem or "it is not connected")

    def _forget(self, now: float) -> None:
        """Drop connections to engines that did not come back: restarts with new addresses would add ever more."""
        for key, link in list(self._links.items()):
            if not link.up and not link.fetches and now - link.used > FORGET_S:
                self._poller.unregister(link.socket)
                self._poller.unregister(link.monitor)
                self._links.pop(key).close()

    def _receive_all(self, link: Link) -> None:
        lost = link.watch()
        if lost:
            self._end_all(link, lost)
        while True:
            try:
                head, *parts = link.socket.recv_multipart(zmq.DONTWAIT, copy=False)
            except zmq.Again:
                break
            try:
                self._handle(link, decode_from_engine(head.bytes), parts)
            except ProtocolError as error:
                self._end_all(link, str(error))
        now = time.monotonic()
        for fetch in list(link.fetches.values()):
            if not link.up and now - fetch.heard > min(CONNECT_S, fetch.source.wait_s):
                self._end(link, fetch, link.problem or f"it did not answer within {CONNECT_S:g} s")
            elif (fetch.asked > fetch.arrived or fetch.complete) and now - fetch.heard > fetch.source.wait_s:
                self._end(link, fetch, "" if fetch.complete else f"it made no progress for {fetch.source.wait_s:g} s")

    def _handle(self, link: Link, message: object, parts: list[zmq.Frame]) -> None:
        match message:
            case Ready():
                if link.up:
                    self._end_all(link, "it has restarted")
                link.introduced(message)
                if link.problem:
                    self._end_all(link, link.problem)
            case Step(output):
                if output.load.steps != link.steps:  # it makes progress, if not on this request
                    link.steps, now = output.load.steps, time.monotonic()
                    for waiting in link.fetches.values():
                        waiting.heard = now
                for delta in output.deltas:
                    fetch = link.fetches.get(delta.request_id)
                    if fetch is not None:
                        self._computed(link, fetch, delta)
            case Begun(request_ids):
                for request_id in request_ids:
                    if (fetch := link.fetches.get(request_id)) is not None:
                        self._say(Begins(fetch))
            case Block(request_id, name, found):
                fetch = link.fetches.get(request_id)
                if fetch is not None:
                    self._receive(link, fetch, parts, found and name == fetch.expected)
            case Stopped(reason):
                link.up = False
                self._end_all(link, reason)

    def _computed(self, link: Link, fetch: Fetch, delta: Delta) -> None:
        fetch.cached_tokens = max(fetch.cached_tokens, delta.cached_tokens or 0)
        fetch.computed = delta.finish_reason is not None
        if delta.error is not None:
            if delta.error.startswith(NOT_REGISTERED):
                link.up = False
                link.say_hello()
            self._end(link, fetch, delta.error)

    def _receive(self, link: Link, fetch: Fetch, parts: list[zmq.Frame], usable: bool) -> None:
        if not usable:
            self._end(link, fetch, "it evicted a block before sending it")
        elif [len(part.buffer) for part in parts] != self._sizes[fetch.is_state(fetch.arrived + len(fetch.frames))]:
            self._end(link, fetch, "it sent a block of another size")
        else:
            fetch.frames.append(parts)
            fetch.heard = time.monotonic()

    def _place(self) -> None:
        """Copy blocks that have arrived into free slots."""
        for link in self._links.values():
            for fetch in list(link.fetches.values()):
                while fetch.frames and (free := self._free[fetch.is_state(fetch.arrived)]):
                    slot = free.pop()
                    for target, part in zip(self._slots[slot], fetch.frames.popleft(), strict=True):
                        np.copyto(target, np.frombuffer(part.buffer, np.uint8))  # releases the interpreter lock
                    fetch.arrived += 1
                    self._say(Arrived(fetch, slot))
                if fetch.complete and fetch.computed:
                    self._end(link, fetch)

    def _ask(self) -> None:
        """Submit new fetches, and ask for as many blocks as there is room for."""
        links = [link for link in self._links.values() if link.up]
        in_transit = sum(fetch.asked - fetch.arrived for link in links for fetch in link.fetches.values())
        for link in links:
            for fetch in list(link.fetches.values()):
                if not fetch.submitted:
                    fetch.submitted = link.send(Submit(fetch.request))
                room = min(len(self._slots), SLOT_SHARES * len(self._slots) - in_transit)
                end = min(fetch.arrived + room, len(fetch.names))
                if not fetch.submitted or end <= fetch.asked:
                    continue
                if link.send(Pull(fetch.request.request_id, fetch.names[fetch.asked : end])):
                    if fetch.asked == fetch.arrived:
                        fetch.heard = time.monotonic()
                    in_transit += end - fetch.asked
                    fetch.asked = end

    def _end_all(self, link: Link, why: str) -> None:
        for fetch in list(link.fetches.values()):
            self._end(link, fetch, why)

    def _end(self, link: Link, fetch: Fetch, problem: str = "") -> None:
        del link.fetches[fetch.request.request_id]
        link.used = time.monotonic()
        fetch.frames.clear()
        if fetch.submitted and not fetch.computed and link.up:
            link.send(Abort(fetch.request.request_id))
        self._say(Ended(fetch, problem))

    def _say(self, news: News) -> None:
        self.news.append(news)
        _ring(self._bell)


def _ring(socket: zmq.Socket[bytes]) -> None:
    try:
        socket.send(b"", zmq.DONTWAIT)
    except zmq.Again:
        return  # enough wake-ups are queued already


def silence(socket: zmq.Socket[bytes]) -> None:
    """Consume every wake-up on a socket."""
    while int(socket.getsockopt(zmq.EVENTS)) & _ARRIVED:  # an exception would cost more than this check
        socket.recv(zmq.DONTWAIT)
