"""Responses in the background: a request with `background: true` is answered at once, and its response is generated
without a client.

The work is a request in memory that is answered like any other: the same checks, limits, admission, charges, guardrails
and log. Its state is in the store, so that every gateway process can show it, send its events and cancel it; the
process that generates it holds the lease (`background_store`). When that process dies, another one, or the next in its
place, takes the response over and generates it anew; one that is stopped hands over what it cannot finish. Invariants:
what was accepted ends in a state that says how it ended, and is billed once; every task belongs to
`BackgroundResponses`, which ends them at its close.
"""

from __future__ import annotations

import asyncio
import logging
import time
import uuid
from collections import Counter
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import aclosing, suppress
from typing import Any

import msgspec

from penstock.gateway.api.openai.responses.background_run import BackgroundRun, WorkRequest
from penstock.gateway.api.openai.responses.background_store import BackgroundStore, TakenOver, number_of
from penstock.gateway.api.openai.responses.output_calls import Event
from penstock.gateway.api.openai.responses.renderer import QUEUED_EVENTS
from penstock.gateway.api.openai.responses.replay import encode_event
from penstock.gateway.api.openai.responses.store import ResponseRecord
from penstock.gateway.app.exchange import Exchange, encode_json
from penstock.gateway.app.memory_request import Reply
from penstock.gateway.app.store_access import store_of
from penstock.gateway.generation.renderer import Renderer
from penstock.gateway.generation.schemas import ChatMessage
from penstock.identity import Caller
from penstock.protocol.errors import (
    ApiError,
    AuthenticationError,
    Draining,
    Overloaded,
    RateLimitExceeded,
    ServiceUnavailable,
)
from penstock.storage import DatabaseError
from penstock.telemetry.exposition import MetricRegistry

log = logging.getLogger("penstock.gateway")

MOST = 1024
"""Responses in the background that one gateway process generates, or has waiting, at a time."""
QUEUE_S = 600.0
"""How long a response may wait for a place, where limits or load refuse it one at first."""
LONGEST_PAUSE_S = 30.0
BEAT_S = 1.0
"""How often leases are renewed, new events stored, and cancellations through other gateways noticed."""
CLOSE_S = 5.0
"""How long the ends of responses may take to be stored when the gateway closes."""
POLL_S = 0.25
"""How often events that another gateway stores are looked for."""
_OWN_HEADERS = ("content-type", "content-length", "x-request-id", "openai-processing-ms", "x-penstock-ignored")
_AWAY = "The store of responses cannot be reached at the moment."
LOOK_S = 5.0
"""How often responses that lost their gateways are looked for, at the least."""
TAKEN_AT_ONCE = 16
"""Responses that are taken over before leases are renewed again."""

Answerer = Callable[[Exchange], Awaitable[None]]
Holder = Callable[[str, str], Awaitable[Caller]]
"""The caller with this tenant and key, as it is now."""


class BackgroundResponses:
    """Those of one gateway process. `most`: of one tenant at a time; 0: there are none."""

    def __init__(
        self, store: BackgroundStore, holder: Holder, *, most: int, lease_s: float, metrics: MetricRegistry
    ) -> None:
        self._store = store
        self._holder = holder
        self._most = most
        self._lease_s = lease_s
        self._name = uuid.uuid4().hex
        self._answer: Answerer | None = None
        self._held = False
        self._closed = False
        self._look_at = float("-inf")
        """When responses that lost their gateways are looked for next."""
        self._crowded = False
        """Whether there may be some for which there was no room here."""
        self._tasks: dict[BackgroundRun, asyncio.Task[None]] = {}
        self._wake = asyncio.Event()
        self._writing = asyncio.Lock()
        """Chunks of events are written one after the other."""
        self._keeper: asyncio.Task[None] | None = None
        self._taken_over = metrics.counter(
            "penstock_background_takeovers_total",
            "Responses in the background that were taken over from a gateway that died or was stopped.",
        ).child()
        metrics.sampled(
            "gauge",
            "penstock_background_responses",
            "Responses in the background that wait or are generated.",
            (),
            self._running_now,
            merge="sum",
        )

    def _running_now(self) -> list[tuple[tuple[str, ...], float]]:
        return [((), len(self._tasks))]

    @property
    def enabled(self) -> bool:
        return self._most > 0

    def start(self, answer: Answerer) -> None:
        """`answer` answers the requests that generate responses."""
        self._answer = answer
        self.wake()  # there may be some that this gateway left when it died
        self._keeper = asyncio.create_task(self._keep(), name="keeper of background responses")

    def hold(self) -> None:
        """The gateway drains: what is generated may finish, what has no place waits for another gateway."""
        self._held = True
        for run in self._tasks:
            run.woken.set()

    async def close(self) -> None:
        """Give up what still runs, for others to take over. An end that is being written must not be interrupted: the
        response would be generated again for nothing."""
        self._held = self._closed = True
        tasks = list(self._tasks.items())
        for run, task in tasks:
            if not run.ended:
                run.goes_on = True
                task.cancel()
        if tasks:
            _, late = await asyncio.wait([task for _, task in tasks], timeout=CLOSE_S)
            for task in late:
                task.cancel()
            await asyncio.gather(*late, return_exceptions=True)
        if self._keeper is not None:
            self._keeper.cancel()
            await asyncio.gather(self._keeper, return_exceptions=True)

    def wake(self) -> None:
        """Store now what is new."""
        self._wake.set()

    async def create(self, exchange: Exchange, body: bytes, *, stream: bool) -> None:
        """Answer a request with `background: true`."""
        self._check_room(exchange.caller.tenant)
        run = BackgroundRun.asked(exchange, body, stream=stream)
        task = self._begin(run)
        exchange.handed_over = True
        await asyncio.wait((run.accepted, task), return_when=asyncio.FIRST_COMPLETED)
        if not run.accepted.done():
            await _refuse(exchange, run.reply)
            return
        exchange.extra_headers += run.accepted.result()
        exchange.ignored += run.ignored
        if not stream:
            await exchange.reply_json({**run.response, "status": "queued"})
            return
        await self.send_events(exchange, run.id, -1)

    def _begin(self, run: BackgroundRun) -> asyncio.Task[None]:
        run.owned = self._owns
        task = asyncio.create_task(self._drive(run), name="background response")
        self._tasks[run] = task
        task.add_done_callback(lambda _: self._over(run))
        self.wake()  # leases are renewed more often than lost responses are looked for
        return task

    async def _owns(self, id: str) -> bool:
        return await self._store.owner(id) == self._name

    def _over(self, run: BackgroundRun) -> None:
        self._tasks.pop(run, None)
        if self._crowded:
            self._look_at = float("-inf")
            self.wake()

    async def send_events(self, exchange: Exchange, id: str, after: int) -> None:
        """The events of a response as they come, from the one behind `after` on."""
        await exchange.start_stream()
        await exchange.write(Renderer.keep_alive)  # the head goes out with it: the first event may take a while
        try:
            async with aclosing(self._events(id, after)) as found:
                async for events in found:
                    await exchange.write(events or Renderer.keep_alive)
        except DatabaseError as error:
            log.warning("events of a response in the background cannot be read: %s", error, extra={"response": id})
            problem = {"type": "error", "code": "server_error", "message": _AWAY, "param": None}
            await exchange.end_stream(b"event: error\ndata: " + encode_json(problem) + b"\n\n")
        else:
            await exchange.end_stream()

    async def recorded(self, id: str) -> bool:
        """Whether the events of a response are kept."""
        return await self._store.recorded(id)

    async def cancel(self, id: str, response: dict[str, Any]) -> bool:
        """Whether a response that is generated, or waits, was cancelled now."""
        cancelled = encode_json({**response, "status": "cancelled"})
        if not await self._store.end(id, None, cancelled):
            return False
        self.stop(id)
        return True

    def stop(self, id: str) -> None:
        """Generate no more of a response, if that is done here; elsewhere it is noticed within a second."""
        for run in self._tasks:
            if run.id == id:
                run.ended = True
                run.aborted.set()
                run.woken.set()

    def hands_over(self, run: BackgroundRun) -> bool:
        """Whether a run that breaks off now is another gateway's to begin anew: this one is being stopped."""
        run.goes_on = run.goes_on or (self._held and bool(run.id))
        return run.goes_on

    async def accept(self, run: BackgroundRun, head: dict[str, Any], record: ResponseRecord) -> None:
        """A response has a place, or waits for one: from now on it exists for clients."""
        id = str(head["id"])
        run.leased_until = time.monotonic() + self._lease_s
        run.response = {**head, "status": "queued"}
        names = ("response.created", "response.queued")
        events = [encode_event((name, {"response": run.response}), number) for number, name in enumerate(names)]
        assert len(events) == QUEUED_EVENTS
        with store_of("responses"):
            await self._store.begin(
                id,
                self._name,
                self._lease_s,
                tenant=run.caller.tenant,
                user=record.user,
                response=encode_json(run.response),
                items=record.items(id),
                events=b"".join(events) if run.stream else b"",
                work=run.work,
            )
        run.id = id
        run.record(events)
        run.forget_events(len(run.events))

    async def finish(
        self, run: BackgroundRun, body: bytes, conversation: Sequence[ChatMessage] | None, last: Sequence[bytes]
    ) -> None:
        """The store may be away for as long as the lease lasts; then readers have found the response abandoned."""
        run.ended = True
        until = time.monotonic() + self._lease_s
        while True:
            try:
                async with self._writing:
                    first, unstored = run.unstored()
                    events = (first, unstored + b"".join(last) if run.stream else b"")
                    if await self._store.end(run.id, self._name, body, conversation, events):
                        run.record(last)
                return
            except DatabaseError as error:
                if time.monotonic() + BEAT_S > until:
                    run.ended = False
                    raise ServiceUnavailable(_AWAY) from error
            await asyncio.sleep(BEAT_S)

    def _check_room(self, tenant: str) -> None:
        if len(self._tasks) >= MOST:
            raise Overloaded(
                f"{MOST} responses are generated in the background already; send this one again later.", retry_after=5.0
            )
        if sum(run.caller.tenant == tenant for run in self._tasks) >= self._most:
            raise RateLimitExceeded(
                f"{self._most} responses of yours wait or are generated in the background, which is the limit "
                "(`store.background_per_tenant`).",
                param="background",
                retry_after=5.0,
            )

    async def _drive(self, run: BackgroundRun) -> None:
        """Generate a response; where limits or load refuse it a place, try again."""
        assert self._answer is not None
        deadline = time.monotonic() + QUEUE_S
        attempt = 0
        try:
            while True:
                request = WorkRequest(run)
                await self._answer(request.exchange)
                run.reply = request.reply
                attempt += 1
                problem = _problem(run.reply)
                pause = None if run.begun or run.ended or self._held else _pause(run.reply, attempt)
                if not run.id or pause is None or time.monotonic() + pause > deadline:
                    break
                with suppress(TimeoutError):
                    await asyncio.wait_for(run.woken.wait(), pause)
                    break
                if (refused := await self._refused(run)) is not None:
                    problem = refused
                    break
            if not run.id or run.ended:
                return
            if self.hands_over(run):
                await self._release(run)
            else:
                await self._failed(run, *problem)
        except asyncio.CancelledError:
            if run.id and not run.ended:
                await self._release(run)
            raise
        finally:
            run.over = True
            run.tell()

    async def _release(self, run: BackgroundRun) -> None:
        """Let another gateway generate a response."""
        run.ended = True
        try:
            async with self._writing:  # or a lease that is being renewed would outlast it
                await self._store.release(run.id, self._name)
        except DatabaseError as error:  # its lease expires, which does the same later
            log.warning("a response in the background could not be handed over: %s", error, extra={"response": run.id})

    async def _refused(self, run: BackgroundRun) -> tuple[str, str] | None:
        """Why a response that has waited may no longer be generated: its key may have been revoked meanwhile."""
        try:
            run.caller = await self._holder(run.caller.tenant, run.caller.key)
        except AuthenticationError as error:
            return error.code or "server_error", error.message
        except (ApiError, DatabaseError):  # keys cannot be looked up at the moment
            pass
        return None

    async def _failed(self, run: BackgroundRun, code: str, message: str) -> None:
        """The end of a response that nothing else ended."""
        body, last = run.failure, list[bytes]()
        if body is None:
            problem = {"code": code, "message": message}
            response = {**run.response, "status": "failed", "error": problem}
            body = encode_json(response)
            numbered: tuple[Event, ...] = (
                ("error", {**problem, "param": None}),
                ("response.failed", {"response": response}),
            )
            last = [encode_event(event, run.event_count + number) for number, event in enumerate(numbered)]
        try:
            await self.finish(run, body, None, last)
        except ServiceUnavailable:  # its lease expires, which says the same to readers
            log.warning("the end of a response in the background could not be stored", extra={"response": run.id})

    async def _keep(self) -> None:
        """Renews leases, stores events, notices what was cancelled or deleted through other gateways, and takes over
        what lost its own."""
        look_s = min(LOOK_S, self._lease_s / 4)
        while True:
            with suppress(TimeoutError):
                await asyncio.wait_for(self._wake.wait(), min(BEAT_S, look_s) if self._tasks else look_s)
            self._wake.clear()
            try:
                async with self._writing:
                    await self._store_news([run for run in self._tasks if run.id and not run.ended])
                if time.monotonic() >= self._look_at:
                    self._look_at = time.monotonic() + look_s
                    await self._take_over()
            except DatabaseError as error:
                log.warning("cannot store the state of responses in the background: %s", error)
                await asyncio.sleep(BEAT_S)
            except Exception:  # without this task all leases would expire
                log.exception("the keeper of responses in the background failed, and goes on")
                await asyncio.sleep(BEAT_S)

    async def _take_over(self) -> None:
        """Generate what dead gateways have begun, as far as there is room here."""
        for _ in range(TAKEN_AT_ONCE):
            if not self.enabled or self._held:
                return
            counts = Counter(run.caller.tenant for run in self._tasks)
            full = [tenant for tenant, count in counts.items() if count >= self._most]
            self._crowded = bool(full) or len(self._tasks) >= MOST
            if len(self._tasks) >= MOST:
                return
            asked_at = time.monotonic()
            found = await self._store.take_over(self._name, self._lease_s, not_of=full)
            if found is None:
                return
            self._taken_over.inc()
            log.warning("took over a response in the background", extra={"response": found.id})
            if not await self._resume(found, asked_at):
                return
        self._look_at = float("-inf")  # there may be more
        self.wake()

    async def _resume(self, found: TakenOver, taken_at: float) -> bool:
        """Whether keys can be looked up: otherwise nothing can be taken over at the moment."""
        work = found.work
        try:
            caller = await self._holder(work.tenant, work.key)
        except AuthenticationError as error:
            run = BackgroundRun.taken_over(found, Caller(work.tenant, key=work.key))
            await self._failed(run, error.code or "server_error", error.message)
        except (ApiError, DatabaseError) as error:
            log.warning("cannot look up the key of a response: %s", error, extra={"response": found.id})
            await self._store.release(found.id, self._name)
            return False
        else:
            run = BackgroundRun.taken_over(found, caller)
            run.leased_until = taken_at + self._lease_s
            self._begin(run)
        return True

    async def _store_news(self, runs: Sequence[BackgroundRun]) -> None:
        if not runs:
            return
        asked_at = time.monotonic()
        begun = [run for run in runs if run.begun and not run.begun_stored]
        news = [(run, len(run.events)) for run in runs if run.events]
        owners = await self._store.keep(
            self._name,
            self._lease_s,
            [run.id for run in runs],
            [(run.id, encode_json(run.response)) for run in begun],
            [(run.id, *run.unstored()) for run, _ in news],
        )
        late = {run for run in runs if time.monotonic() > run.leased_until}
        for run in begun:
            run.begun_stored = True
        for run, count in news:
            run.forget_events(count)
        for run in runs:
            run.leased_until = asked_at + self._lease_s
            whose = owners.get(run.id, "")
            if whose != self._name and not run.ended:
                # This process was too slow, and another has taken it over, and may have ended it since. Otherwise a
                # client has ended it.
                run.goes_on = whose != "" or run in late
                self.stop(run.id)

    async def _events(self, id: str, after: int) -> AsyncGenerator[bytes, None]:
        """Events as they come; empty when there were none for a while."""
        run = next((run for run in self._tasks if run.id == id), None)
        while run is not None:
            news, ahead = run.news, after + 1 - run.stored_events
            found = await self._store.events(id, after) if ahead < 0 else run.events[ahead:]
            if found:
                after = number_of(found[-1])
                yield b"".join(found)
            elif run.over and run.goes_on and not self._closed:
                run = None  # what comes next is another gateway's
            elif run.over:
                return
            else:
                try:
                    await asyncio.wait_for(news.wait(), 10.0)
                except TimeoutError:
                    yield b""
        quiet = 0.0
        while True:
            running = await self._store.running(id)
            if found := await self._store.events(id, after):
                after, quiet = number_of(found[-1]), 0.0
                yield b"".join(found)
            elif not running or self._closed:
                return
            else:
                await asyncio.sleep(POLL_S)
                quiet += POLL_S
                if quiet >= 10.0:
                    quiet = 0.0
                    yield b""


async def _refuse(exchange: Exchange, reply: Reply | None) -> None:
    """Tell the client why there is no response."""
    if reply is None or reply.status is None:
        raise Draining
    headers = [(name.encode(), value.encode()) for name, value in reply.headers.items() if name not in _OWN_HEADERS]
    await exchange.reply(reply.status, reply.body, headers=headers)


def _pause(reply: Reply, attempt: int) -> float | None:
    """How long to wait before a place is asked for again; None where that does not help."""
    if reply.status not in (409, 429, 503) or reply.headers.get("x-should-retry") == "false":
        return None
    if reply.headers.get("x-penstock-reason") == "draining":
        return None
    told = reply.headers.get("retry-after", "")
    longer = min(0.5 * 2 ** min(attempt, 10), LONGEST_PAUSE_S)
    return min(max(float(told), 0.5), LONGEST_PAUSE_S) if told.isdigit() else longer


def _problem(reply: Reply | None) -> tuple[str, str]:
    """Code and message of an error."""
    with suppress(msgspec.DecodeError, TypeError, KeyError):
        error = msgspec.json.decode(b"" if reply is None else reply.body)["error"]
        return str(error["code"] or "server_error"), str(error["message"])
    return "server_error", "The response could not be generated."
