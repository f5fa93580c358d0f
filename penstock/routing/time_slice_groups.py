"""Carries out the decisions of `TimeSlicePolicy`: requests wait until their model is awake, engines sleep and wake.

Owns one task per group of models that share memory. Invariant: a request admitted by `acquire` is counted until its
release, and its model is not put to sleep before that.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from functools import partial

from penstock.backends.base import Backend
from penstock.protocol.errors import ApiError, ModelAsleep
from penstock.routing.registry import ServedModel
from penstock.routing.time_slice import TimeSlicePolicy, Transition

LOOK_S = 1.0
"""How often to check whether the awake engine was restarted; a restarted engine is asleep."""
ENGINE_WAIT_S = 10.0
"""How long to wait for an engine that is down before its requests fail."""

log = logging.getLogger("penstock.routing")
Release = Callable[[], None]


class TimeSliceGroup:
    """Models of which at most one is awake at a time."""

    def __init__(self, backends: Mapping[str, Backend], slice_s: float, clock: Callable[[], float]) -> None:
        self._backends = dict(backends)
        self._policy = TimeSlicePolicy(slice_s, clock)
        self._tickets: dict[int, tuple[str, asyncio.Future[None]]] = {}
        self._poked = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        self._task = asyncio.create_task(self._run(), name=f"time slices of {', '.join(self._backends)}")

    async def close(self) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    async def acquire(self, model: str, within_s: float) -> Release:
        """Waits until `model` is awake and keeps it awake until the release; `ModelAsleep` after `within_s`."""
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        ticket = self._policy.wait(model)
        self._tickets[ticket] = (model, turn)
        self._poked.set()
        try:
            await asyncio.wait((turn,), timeout=within_s)
        except asyncio.CancelledError:
            if turn.done() and turn.exception() is None:
                self._release(model)
            raise
        finally:
            self._tickets.pop(ticket, None)
            self._policy.leave(ticket)
        if not turn.done():
            raise self._not_in_time(model, within_s)
        turn.result()
        return partial(self._release, model)

    def _release(self, model: str) -> None:
        self._policy.release(model)
        self._poked.set()

    def _not_in_time(self, model: str, within_s: float) -> ModelAsleep:
        awake = self._policy.model
        now = f" (`{awake}` is awake)" if awake not in (None, model) else ""
        return ModelAsleep(
            f"`{model}` shares memory with other models and could not be woken within {within_s:g} s{now}; try again.",
            retry_after=max(1.0, self._policy.due_in() or 0.0),
        )

    async def _run(self) -> None:
        while True:
            self._poked.clear()
            self._notice_loss()
            self._admit()
            move = self._policy.next_move()
            if move is not None:
                await self._carry_out(move)
                continue
            due = self._policy.due_in()
            look = LOOK_S if self._policy.phase == "awake" else None
            with suppress(TimeoutError):
                async with asyncio.timeout(min((s for s in (due, look) if s is not None), default=None)):
                    await self._poked.wait()

    def _notice_loss(self) -> None:
        policy = self._policy
        if policy.phase == "awake" and policy.model is not None:
            backend = self._backends[policy.model]
            if backend.ready and backend.state != "awake":
                log.warning("model is asleep after its engine restarted", extra={"model": policy.model})
                policy.slept()

    def _admit(self) -> None:
        for ticket, (model, turn) in list(self._tickets.items()):
            if self._backends[model].ready and not turn.done() and self._policy.admit(ticket):
                turn.set_result(None)

    async def _carry_out(self, move: Transition) -> None:
        backend, begin = self._backends[move.model], time.monotonic()
        self._policy.began(move)
        try:
            if move.kind == "sleep":
                await backend.sleep()
                self._policy.slept()
            else:
                await backend.wait_ready(ENGINE_WAIT_S)
                await backend.wake()
                self._policy.woke()
        except ApiError as error:
            # An engine that was lost is asleep after its restart.
            failed = "model could not be put to sleep" if move.kind == "sleep" else "model could not be woken"
            log.warning(failed, extra={"model": move.model, "why": error.message})
            self._policy.slept()
            if move.kind == "wake":
                self._fail(move.model, error)
        else:
            seconds = round(time.monotonic() - begin, 3)
            done = "model is awake" if move.kind == "wake" else "model is asleep"
            log.info(done, extra={"model": move.model, "s": seconds})

    def _fail(self, model: str, error: ApiError) -> None:
        for ticket, (wanted, turn) in self._tickets.items():
            if wanted == model and not turn.done():
                self._policy.leave(ticket)
                turn.set_exception(error)


class TimeSlices:
    """All time-slice groups of a gateway."""

    def __init__(
        self,
        models: Iterable[ServedModel],
        slice_s: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        members: dict[str, dict[str, Backend]] = {}
        for model in models:
            if model.time_slice:
                members.setdefault(model.time_slice, {})[model.name] = model.backend
        self._groups = [TimeSliceGroup(backends, slice_s, clock) for backends in members.values()]
        self._group_of = {
            name: group for group, backends in zip(self._groups, members.values(), strict=True) for name in backends
        }

    def start(self) -> None:
        for group in self._groups:
            group.start()

    async def close(self) -> None:
        for group in self._groups:
            await group.close()

    async def acquire(self, model: ServedModel, within_s: float) -> Release | None:
        """Keeps a model of a group awake until the release; None for a model without a group. Requests do not wake a
        model that an operator put to sleep."""
        group = self._group_of.get(model.base_name)
        if group is not None:
            return await group.acquire(model.base_name, within_s)
        if model.backend.ready and model.backend.state != "awake":
            raise ModelAsleep(
                f"`{model.base_name}` is asleep; wake it with POST /v1/admin/models/{model.base_name}/wake."
            )
        return None
