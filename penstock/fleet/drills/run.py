"""One drill: load, break, heal, and account for everything."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from typing import Any

import httpx

from penstock.fleet.drills.accounting import Balance, Losses, compare
from penstock.fleet.drills.load import Load
from penstock.fleet.drills.probe import Logs, Probe
from penstock.fleet.drills.program import DrillError
from penstock.fleet.drills.target import Target
from penstock.fleet.drills.throwaway import Layout, ThrowAway

BIN_S = 0.5
_WARM_S = 300.0
_FULL_S = 600.0
_PAUSE_S = 1.0
"""Shorter pauses are not worth a figure: a busy machine has them too."""


@dataclass
class Stage:
    """What a fault tells the drill."""

    begun: float
    tell: Callable[[str], None]
    broken_at: float | None = None
    healed_at: float | None = None
    losses: Losses = field(default_factory=Losses)
    notes: list[str] = field(default_factory=list)

    def broken(self, what: str) -> None:
        self.broken_at = self.broken_at or time.monotonic()
        self.tell(what)
        self.notes.append(f"{time.monotonic() - self.begun:.1f} s: {what}")

    def healed(self, what: str) -> None:
        self.healed_at = time.monotonic()
        self.tell(what)
        self.notes.append(f"{self.healed_at - self.begun:.1f} s: {what}")

    async def hold(self, seconds: float) -> None:
        """Leaves it broken for a while."""
        await asyncio.sleep(seconds)

    def wrong(self, what: str) -> None:
        self.losses.other.append(what)


@dataclass(frozen=True)
class Fault:
    """A way to break a fleet. `act`: one of our own; `outside`: any, if that is possible from outside."""

    name: str
    title: str
    act: Callable[[ThrowAway, Stage], Awaitable[None]]
    layout: Layout = "split"
    outside: Callable[[Target, Stage], Awaitable[None]] | None = None

    async def run(self, fleet: Target, stage: Stage) -> None:
        if isinstance(fleet, ThrowAway):
            await self.act(fleet, stage)
        elif self.outside is not None:
            await self.outside(fleet, stage)
        else:
            raise DrillError(f"the drill {self.name} needs a throw-away fleet: leave out --url")


@dataclass
class Result:
    """What a drill found. Times are seconds after the fault; None: it was not seen from outside."""

    name: str
    title: str
    seconds: float
    broken_s: float
    healed_s: float
    detected_s: float | None
    noticed: str
    pause_s: float
    again_s: float | None
    """When the stream with the longest pause went on; None: no stream paused for a second."""
    full_s: float | None
    """When every gateway was ready with all its engines again."""
    streams: int
    resumed: int
    restarted: int
    tokens: int
    turns: int
    ledger: Balance
    losses: Losses
    notes: list[str]
    timeline: list[tuple[float, float]]
    """Tokens per second that clients received."""

    @property
    def passed(self) -> bool:
        return not self.losses

    def as_dict(self) -> dict[str, Any]:
        return {**asdict(self), "passed": self.passed, "lost": self.losses.counts()}


@dataclass(frozen=True, slots=True)
class Size:
    """Of the load."""

    streams: int = 6
    tokens: int = 300


async def hold(fault: Fault, fleet: Target, size: Size, tell: Callable[[str], None]) -> Result:
    """Breaks the fleet and heals it under load. What it returns says what was lost."""
    begun = time.monotonic()
    prefix = f"{fault.name}-{int(time.time() * 1000):x}"
    stage = Stage(begun, tell)
    load = Load(fleet.urls, fleet.keys, fleet.model_name, streams=size.streams, tokens=size.tokens, prefix=prefix)
    probe = Probe(fleet.urls, fleet.admin, fleet.engines_per_gateway)
    logs = Logs(fleet.logs)
    watchers = [asyncio.create_task(probe.run()), asyncio.create_task(logs.run())]
    try:
        tell("waiting for the whole fleet")
        if await probe.until(True, begun, _FULL_S) is None:
            raise DrillError(f"the fleet is not whole before anything is broken: {probe.looks[-1].problem}")
        tell("learning what the answers must be")
        if unsteady := await load.learn(twice=not fleet.deterministic):
            stage.notes.append(
                f"{unsteady} of {load.cases} answers change with what runs beside them (models[N].deterministic is "
                "off): only their length is compared"
            )
        load.start()
        await _loaded(load, load.done + size.streams)
        tell("breaking it")
        await fault.run(fleet, stage)
        if stage.broken_at is None or stage.healed_at is None:
            raise DrillError(f"the fault {fault.name} broke nothing")
        tell("waiting for full capacity")
        full = await probe.until(True, stage.healed_at, _FULL_S)
        if full is None:
            stage.wrong(f"not back to full capacity {_FULL_S:.0f} s after it was healed: {probe.looks[-1].problem}")
        await _loaded(load, load.done + 2 * size.streams)
        tell("letting the streams end")
        await load.stop()
        logs.look()
        tell("comparing with the ledger")
        return await _judge(fault, fleet, stage, load, probe, logs, None if full is None else full.at, prefix)
    finally:
        for task in watchers:
            task.cancel()
        await asyncio.gather(*watchers, return_exceptions=True)
        await load.close()


async def _loaded(load: Load, streams: int) -> None:
    """Until so many streams have ended and others are in their middle."""
    deadline = time.monotonic() + _WARM_S
    while load.done < streams or sum(len(stream.times) > 3 for stream in load.open.values()) < 2:
        load.check_alive()
        if time.monotonic() > deadline:
            return  # what does not end is found when the answers are compared
        await asyncio.sleep(0.02)


async def _judge(
    fault: Fault, fleet: Target, stage: Stage, load: Load, probe: Probe, logs: Logs, full: float | None, prefix: str
) -> Result:
    assert stage.broken_at is not None and stage.healed_at is not None
    broken, losses = stage.broken_at, stage.losses
    compare(load.answers(), losses)
    sums = await fleet.account(load.attempts(), prefix, losses)
    await load.check_turns(losses)
    await check_keys(fleet.urls, fleet.keys, fleet.revoked, losses)
    look = next((look for look in probe.looks if look.at > broken and not look.full), None)
    warning = logs.first_after(broken)
    noticed = min((found for found in (look and (look.at, look.problem), warning) if found), default=None)
    arrivals = load.arrivals()
    pause, again = longest_pause([stream.times for stream in load.told.streams], broken)
    streams = load.told.streams
    return Result(
        name=fault.name,
        title=fault.title,
        seconds=time.monotonic() - stage.begun,
        broken_s=broken - stage.begun,
        healed_s=stage.healed_at - stage.begun,
        detected_s=None if noticed is None else noticed[0] - broken,
        noticed="" if noticed is None else noticed[1],
        pause_s=pause,
        again_s=None if again is None else again - broken,
        full_s=None if full is None else full - broken,
        streams=len(streams),
        resumed=sum(stream.resumed for stream in streams),
        restarted=sum(stream.restarted for stream in streams),
        tokens=sum(attempt.usage.completion for attempt in load.attempts() if attempt.usage is not None),
        turns=len(load.told.turns),
        ledger=sums,
        losses=losses,
        notes=stage.notes,
        timeline=throughput(arrivals, stage.begun),
    )


async def check_keys(urls: Sequence[str], keys: Sequence[str], revoked: str, losses: Losses) -> None:
    """Keys work everywhere; a revoked one nowhere."""
    async with httpx.AsyncClient(timeout=30, verify=False) as http:
        for url in urls:
            for number, (key, status) in enumerate([*((key, 200) for key in keys), (revoked, 401)]):
                found = 0
                with suppress(httpx.HTTPError):
                    reply = await http.get(f"{url}/v1/models", headers={"authorization": f"Bearer {key}"})
                    found = reply.status_code
                if key and found != status:
                    losses.keys.append(f"key {number} is a {found} in place of a {status} at {url}")


def longest_pause(streams: Sequence[Sequence[float]], broken: float) -> tuple[float, float | None]:
    """The longest pause of a stream that was open at the fault or began later, and when it ended."""
    longest, ended = 0.0, None
    for times in streams:
        for before, after in itertools.pairwise(times):
            if after > broken and after - before > max(longest, _PAUSE_S):
                longest, ended = after - before, after
    return longest, ended


def throughput(arrivals: Sequence[float], begun: float) -> list[tuple[float, float]]:
    """Tokens per second, bin by bin."""
    if not arrivals:
        return []
    bins = [0] * (int((arrivals[-1] - begun) / BIN_S) + 1)
    for at in arrivals:
        bins[int((at - begun) / BIN_S)] += 1
    return [((index + 0.5) * BIN_S, count / BIN_S) for index, count in enumerate(bins)]
