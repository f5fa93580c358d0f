"""The backend interface, and the bookkeeping shared by engine clients.

A backend turns `Request`s into deltas in a `Mailbox`. Invariant: every accepted request ends in its mailbox
with exactly one final delta or one error, also when the engine dies; after `abort` the final delta still comes, with
what was produced until the engine heard of it.
"""

from __future__ import annotations

import asyncio
import dataclasses
import itertools
import math
import time
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import suppress
from typing import Protocol

from penstock.backends.errors import adapter_error, error_of
from penstock.backends.mailbox import DeltaSink, Mailbox
from penstock.backends.round_trip import RoundTrip
from penstock.backends.token_gap import TokenGap
from penstock.engine.adapters.spec import AdapterSpec, AdapterStatus
from penstock.engine.request import Delta, EngineInfo, EngineLoad, EngineState, Request, StepOutput
from penstock.protocol.errors import ApiError, EngineUnavailable, Overloaded
from penstock.protocol.messages import (
    AdapterOperation,
    AdapterResult,
    Claimed,
    Erased,
    LoadAdapter,
    PinAdapter,
    Placement,
    Produced,
    Sleep,
    State,
    UnloadAdapter,
    Wake,
)
from penstock.telemetry.exposition import Buckets

STEP_TOKENS = tuple(float(1 << power) for power in range(15))

Clock = Callable[[], float]


class Backend(Protocol):
    """Runs requests for one model."""

    name: str
    """Distinguishes the replicas of a model."""

    @property
    def replicas(self) -> Sequence[Backend]:
        """Its engines; for a single engine, itself."""

    @property
    def info(self) -> EngineInfo | None:
        """What the engine reports about itself; None until it was ready once."""

    @property
    def ready(self) -> bool: ...

    @property
    def load(self) -> EngineLoad: ...

    @property
    def stalled_s(self) -> float:
        """Seconds since the engine last completed a step, while it has work; 0 when it is idle."""

    @property
    def idle_s(self) -> float:
        """Seconds since the engine last produced a token."""

    @property
    def in_flight(self) -> int: ...

    async def start(self) -> None: ...

    async def close(self) -> None: ...

    async def wait_ready(self, within: float, *, at_most: float = math.inf) -> EngineInfo:
        """The engine's info once it is ready; `EngineUnavailable` after `within` seconds. `at_most`: what the client
        allows, also where requests are held longer than `within`."""

    def submit(self, request: Request, mailbox: DeltaSink, index: int = 0) -> str:
        """Runs `request`; its deltas go to `mailbox` as choice `index`. Returns the replica (`x-penstock-replica`).
        Raises `ApiError` when it cannot run it."""

    def abort(self, request_id: str, *, resumable: bool = False) -> None:
        """Aborts a request. Unknown ids are ignored. `resumable`: its client may come back for the rest."""

    def holds(self, request_id: str) -> bool:
        """Whether the final delta of a request is still outstanding."""

    async def produced(self, charges: Sequence[str]) -> list[Produced]:
        """What the engine produced for these charges, of any gateway. `ApiError` when it cannot be asked."""

    async def claim(self, charge: str, request: Request) -> Claimed:
        """The tokens of a resumable request of this charge; see `Claim`."""

    async def erase(self, owner: str) -> dict[str, Erased]:
        """Erases what the requests of an owner have left in the KV caches; see `Erase`. The outcome by replica; that of
        one that cannot be asked says why."""

    def generate(self, request: Request) -> AsyncIterator[Delta]:
        """The deltas of one request. Closing the iterator early aborts the request."""

    @property
    def state(self) -> EngineState:
        """Whether the engine is awake; only meaningful while it is `ready`."""

    async def sleep(self) -> None:
        """Finishes running requests, then frees the engine's memory; returns when done. `ApiError` when it fails."""

    async def wake(self) -> None:
        """Returns when the engine can run requests again."""

    @property
    def adapters(self) -> Mapping[str, AdapterStatus] | None:
        """The engine's adapters by name; None until it has reported them."""

    async def load_adapter(self, spec: AdapterSpec) -> AdapterStatus:
        """Loads an adapter; returns when it is usable. Raises `ApiError` when it cannot be loaded."""

    async def unload_adapter(self, name: str) -> None: ...

    async def pin_adapter(self, name: str, pinned: bool) -> AdapterStatus: ...


class EngineClient(ABC):
    """Routes step outputs to mailboxes and tracks the engine's progress; subclasses transport the messages."""

    def __init__(self, name: str, *, max_in_flight: int, max_waiters: int, clock: Clock) -> None:
        self.name = name
        self._max_in_flight = max_in_flight
        self._max_waiters = max_waiters
        self._clock = clock
        self._routes: dict[str, tuple[DeltaSink, int]] = {}
        self._aborted: set[str] = set()
        self._info: EngineInfo | None = None
        self._up = False
        """Whether the engine has registered us; `_ready`: it also accepts requests."""
        self._ready = asyncio.Event()
        self._waiters = 0
        self._load = EngineLoad()
        self.token_gap = TokenGap()
        self.step_tokens = Buckets(STEP_TOKENS)
        """How many tokens the engine's steps computed."""
        self._progress_at = clock()
        self._token_at = float("-inf")
        self._state: EngineState = "awake"
        self._state_waiters: set[asyncio.Queue[State | ApiError]] = set()
        self._adapters: dict[str, AdapterStatus] | None = None
        self._operations: dict[str, asyncio.Future[AdapterResult]] = {}
        self._serial = itertools.count()
        self.round_trip = RoundTrip()
        self.problem = ""
        """Why the engine cannot be used, if that is known."""
        self.on_placement: Callable[[Placement], None] = lambda placement: None
        """Called with what other gateways sent to the engine."""
        self.on_begun: Callable[[list[str]], None] = lambda request_ids: None
        """Called with requests that have a `patience_s`, when the engine begins to compute their prompts."""

    @property
    def replicas(self) -> Sequence[Backend]:
        return (self,)

    @property
    def info(self) -> EngineInfo | None:
        return self._info

    @property
    def ready(self) -> bool:
        return self._ready.is_set()

    @property
    def load(self) -> EngineLoad:
        return self._load

    @property
    def tells_begun(self) -> bool:
        """Whether `on_begun` is called. If not, only the engine itself refuses what has waited too long."""
        return False

    @property
    def stalled_s(self) -> float:
        busy = bool(self._routes) or self._load.running > 0 or self._load.waiting > 0
        return self._clock() - self._progress_at if busy else 0.0

    @property
    def idle_s(self) -> float:
        return self._clock() - self._token_at

    @property
    def in_flight(self) -> int:
        return len(self._routes) - len(self._aborted)

    @abstractmethod
    async def start(self) -> None: ...

    @abstractmethod
    async def close(self) -> None: ...

    async def wait_ready(self, within: float, *, at_most: float = math.inf) -> EngineInfo:
        within = min(within, at_most)
        if not self._ready.is_set():
            if self._waiters >= self._max_waiters:
                raise EngineUnavailable(
                    f"The engine for this model is down and {self._waiters} requests already wait for it.",
                    reason="queue_full",
                    retry_after=within,
                )
            self._waiters += 1
            try:
                with suppress(TimeoutError):
                    await asyncio.wait_for(self._ready.wait(), within)
            finally:
                self._waiters -= 1
        if not self._ready.is_set() or self._info is None:
            why = f"cannot be used: {self.problem}." if self.problem else f"is down (waited {within:.3g} s)."
            raise EngineUnavailable(
                f"The engine for this model {why}{'' if self.problem else ' It may be starting; try again.'}",
                reason="queue_timeout",
                retry_after=5.0,
            )
        return self._info

    def submit(self, request: Request, mailbox: DeltaSink, index: int = 0) -> str:
        if not self._ready.is_set():
            raise EngineUnavailable("The engine for this model is restarting; try again.")
        if request.request_id in self._routes:
            raise EngineUnavailable("The engine is still running an earlier attempt at this request; try again.")
        if self.in_flight >= self._max_in_flight:
            raise Overloaded(
                f"{self.in_flight} requests are already running or waiting; try again shortly.",
                retry_after=2.0,
            )
        if not self._routes:
            self._progress_at = self._clock()
        self._routes[request.request_id] = (mailbox, index)
        try:
            self._send_submit(request)
        except BaseException:
            del self._routes[request.request_id]
            raise
        return self.name

    def abort(self, request_id: str, *, resumable: bool = False) -> None:
        if request_id in self._routes and request_id not in self._aborted:
            self._aborted.add(request_id)
            self._send_abort(request_id, resumable)

    def holds(self, request_id: str) -> bool:
        return request_id in self._routes

    async def produced(self, charges: Sequence[str]) -> list[Produced]:
        return []  # an in-process engine knows nothing that its only gateway does not know

    async def claim(self, charge: str, request: Request) -> Claimed:
        return Claimed("")

    async def erase(self, owner: str) -> dict[str, Erased]:
        return {self.name: Erased("", error="this engine cannot erase")}

    def generate(self, request: Request) -> AsyncIterator[Delta]:
        return deltas_of(self, request)

    @property
    def state(self) -> EngineState:
        return self._state

    async def sleep(self) -> None:
        await self._reach("sleeping", Sleep())

    async def wake(self) -> None:
        await self._reach("awake", Wake())

    async def _reach(self, state: EngineState, message: Sleep | Wake) -> None:
        """Sends the message and waits until the engine reports `state`."""
        if not self._ready.is_set():
            raise EngineUnavailable("The engine for this model is restarting; try again.")
        heard: asyncio.Queue[State | ApiError] = asyncio.Queue()
        self._state_waiters.add(heard)
        try:
            self._send_state(message)
            while True:
                now = await heard.get()
                if isinstance(now, ApiError):
                    raise now
                if now.problem:
                    raise EngineUnavailable(f"The engine reports: {now.problem}.")
                if now.state == state:
                    return
                if state == "sleeping" and now.state == "awake":
                    raise EngineUnavailable("The model was woken before it was asleep.")
        finally:
            self._state_waiters.discard(heard)

    def _on_state(self, message: State) -> None:
        self._state, self._info = message.state, message.info
        for waiter in self._state_waiters:
            waiter.put_nowait(message)

    @property
    def adapters(self) -> Mapping[str, AdapterStatus] | None:
        return self._adapters

    async def load_adapter(self, spec: AdapterSpec) -> AdapterStatus:
        result = await self._operate(LoadAdapter(self._next_operation(), spec))
        return self._known(result)

    async def unload_adapter(self, name: str) -> None:
        await self._operate(UnloadAdapter(self._next_operation(), name))
        if self._adapters is not None:
            self._adapters.pop(name, None)

    async def pin_adapter(self, name: str, pinned: bool) -> AdapterStatus:
        return self._known(await self._operate(PinAdapter(self._next_operation(), name, pinned)))

    def _known(self, result: AdapterResult) -> AdapterStatus:
        """Applies the result of an operation at once; the engine's own list follows later."""
        status = result.status
        assert status is not None
        self._adapters = {**(self._adapters or {}), status.name: status}
        return status

    def _next_operation(self) -> str:
        return f"{self.name}-{next(self._serial)}"

    async def _operate(self, operation: AdapterOperation) -> AdapterResult:
        """Sends an operation and waits for its result; raises its error."""
        if not self._ready.is_set():
            raise EngineUnavailable("The engine for this model is restarting; try again.")
        future: asyncio.Future[AdapterResult] = asyncio.get_running_loop().create_future()
        self._operations[operation.operation] = future
        try:
            self._send_operation(operation)
            result = await future
        finally:
            del self._operations[operation.operation]
        if result.error:
            raise adapter_error(result.error, param="source" if isinstance(operation, LoadAdapter) else "model")
        return result

    def _finish_operation(self, result: AdapterResult) -> None:
        future = self._operations.get(result.operation)
        if future is not None and not future.done():
            future.set_result(result)

    def _tell_adapters(self, statuses: list[AdapterStatus]) -> None:
        self._adapters = {status.name: status for status in statuses}

    def tell_placement(self, placement: Placement) -> None:  # noqa: B027 (an engine in this process has no others)
        """Tells the other gateways of the engine, if any, what was sent to it."""

    @abstractmethod
    def _send_state(self, message: Sleep | Wake) -> None: ...

    @abstractmethod
    def _send_operation(self, operation: AdapterOperation) -> None: ...

    @abstractmethod
    def _send_submit(self, request: Request) -> None: ...

    @abstractmethod
    def _send_abort(self, request_id: str, resumable: bool = False) -> None: ...

    def _came_up(self, info: EngineInfo, state: EngineState = "awake") -> None:
        if self._info is not None and info.instance != self._info.instance:
            self._load = EngineLoad()  # a restarted engine counts from zero; one that was only unreachable does not
        self._info = info
        self._state = state
        self._progress_at = self._clock()
        self._up = True
        self._ready.set()

    def _leaves(self) -> None:
        """The engine drains: running requests continue, no new ones are sent."""
        self._ready.clear()

    def _went_down(self, error: ApiError) -> None:
        """The engine is gone, and all its requests with it."""
        self._up = False
        self._ready.clear()
        self._load = dataclasses.replace(self._load, running=0, waiting=0, used_blocks=0)
        self.token_gap.interrupt()
        routes, self._routes = self._routes, {}
        self._aborted.clear()
        for mailbox, _ in routes.values():
            mailbox.fail(error)
        for future in self._operations.values():
            if not future.done():
                future.set_exception(error)
        for waiter in self._state_waiters:
            waiter.put_nowait(error)

    def _deliver(self, output: StepOutput) -> None:
        state = output.load.adapters
        reading = state is not None and state.loading > 0 and not output.load.running
        # An engine that waits for blocks from a prefill engine is not stuck either.
        fetching = output.load.handover is not None and output.load.handover.waiting > 0 and not output.load.running
        if output.load.steps != self._load.steps or reading or fetching:
            self._progress_at = self._clock()
        if output.load.generation_tokens > self._load.generation_tokens:
            self._token_at = self._clock()
        steps = output.load.steps - self._load.steps
        if steps > 0:  # several, where only the last one had something to say
            self.step_tokens.observe((output.load.step_tokens - self._load.step_tokens) / steps, steps)
        self.token_gap.reported(self._load, output.load, self._clock())
        self._load = output.load
        for delta in output.deltas:
            route = self._routes.get(delta.request_id)
            if route is None:
                continue  # it has already ended
            if delta.finish_reason is not None:
                del self._routes[delta.request_id]
                self._aborted.discard(delta.request_id)
            if delta.finish_reason == "error":
                route[0].fail(error_of(delta))
            else:
                route[0].put(route[1], delta)


async def deltas_of(backend: Backend, request: Request) -> AsyncIterator[Delta]:
    """The deltas of one request; it is aborted when the iterator is closed."""
    mailbox = Mailbox()
    backend.submit(request, mailbox)
    try:
        while True:
            for arrival in await mailbox.take():
                yield arrival.delta
                if arrival.delta.finish_reason is not None:
                    return
    finally:
        backend.abort(request.request_id)


monotonic: Clock = time.monotonic
