"""A soak of the whole server: two machines under everything at once, for an hour; nothing may leak or be lost."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from typing import Any

import httpx

from penstock.fleet.drills.accounting import Balance, Losses, compare
from penstock.fleet.drills.ledger import settled_tokens
from penstock.fleet.drills.load import Load
from penstock.fleet.drills.mixture import EMBED, Mixture
from penstock.fleet.drills.program import DrillError
from penstock.fleet.drills.resources import Followed, Processes, Verdict, judge
from penstock.fleet.drills.run import check_keys
from penstock.fleet.drills.throwaway import ThrowAway

ENCODER = "minilm"
SAMPLE_S = 5.0
_PAUSE_S = 0.2
_ENCODER_S = 180.0
_STALL_S = 120.0


@dataclass
class Soak:
    """What a soak found."""

    minutes: float
    counts: dict[str, int]
    streams: int
    tokens: int
    turns: int
    ledger: Balance
    losses: Losses
    verdicts: list[Verdict]
    processes: list[Followed] = field(repr=False)
    timeline: list[tuple[float, float]] = field(default_factory=list)
    """Tokens per second in streams whose text is known, minute by minute."""

    @property
    def leaks(self) -> list[str]:
        return [f"{verdict.name}: {problem}" for verdict in self.verdicts for problem in verdict.problems]

    @property
    def passed(self) -> bool:
        return not self.losses and not self.leaks

    def as_dict(self) -> dict[str, Any]:
        found = asdict(self)
        found.pop("processes")
        return {**found, "leaks": self.leaks, "passed": self.passed, "lost": self.losses.counts()}


async def soak(fleet: ThrowAway, minutes: float, streams: int, tell: Callable[[str], None]) -> Soak:
    """`fleet`: two machines (layout `machines`)."""
    begun = time.monotonic()
    prefix = f"soak-{int(time.time() * 1000):x}"
    encoder = ENCODER if fleet.settings.get("encoders") != [] else ""
    if encoder:
        await _wake_encoders(fleet, tell)
    load = Load(fleet.urls, fleet.keys, fleet.model_name, streams=streams, tokens=150, prefix=prefix, pause_s=_PAUSE_S)
    mixture = Mixture(fleet.urls, fleet.keys[0], fleet.batch_key, fleet.model_name, encoder, prefix)
    processes = Processes()
    stall = Stall()
    try:
        await load.learn()
        load.start()
        mixture.start()
        while (elapsed := time.monotonic() - begun) < 60 * minutes:
            processes.sample(elapsed, [(machine.name, machine.pid) for machine in fleet.machines])
            load.check_alive()
            mixture.check_alive()
            if stall.lasts(load.done, elapsed):
                raise DrillError(_why(fleet, load, elapsed))
            tell(
                f"{elapsed / 60:.1f} of {minutes:g} min, {load.done:,} streams, {sum(mixture.counts.values()):,} others"
            )
            await asyncio.sleep(SAMPLE_S)
        tell("letting everything end")
        await asyncio.gather(load.stop(), mixture.stop())
        tell("comparing with the ledger")
        return await _judge(fleet, load, mixture, processes, begun, minutes, prefix)
    finally:
        await asyncio.gather(load.close(), mixture.close())


class Stall:
    """Notices that no stream comes to its end any more."""

    def __init__(self) -> None:
        self._done, self._since = -1, 0.0

    def lasts(self, done: int, elapsed: float) -> bool:
        if done != self._done:
            self._done, self._since = done, elapsed
        return elapsed - self._since > _STALL_S


def _why(fleet: ThrowAway, load: Load, elapsed: float) -> str:
    """What the clients that wait were told, and the last words of every process."""
    said = [f"no stream has ended for {_STALL_S:.0f} s, {elapsed / 60:.1f} minutes into the soak"]
    said += [f"{stream.name}: {stream.problem or 'it waits'}" for stream in load.open.values()]
    services = [service for service in (fleet.redis, fleet.postgres) if service is not None]
    for program in [*services, *fleet.programs()]:
        said += [f"--- {program.name}, {'running' if program.running else 'ended'}", *program.tail().splitlines()[-8:]]
    return "\n".join(said)


async def _wake_encoders(fleet: ThrowAway, tell: Callable[[str], None]) -> None:
    """They start with their first request."""
    tell("starting the encoders")
    async with httpx.AsyncClient(timeout=60) as http:
        for url in fleet.urls:
            deadline = time.monotonic() + _ENCODER_S
            headers = {"authorization": f"Bearer {fleet.keys[0]}"}
            while True:
                reply = await http.post(
                    f"{url}/v1/embeddings", json={"model": ENCODER, "input": EMBED}, headers=headers
                )
                if reply.status_code == 200:
                    break
                if time.monotonic() > deadline:
                    raise DrillError(
                        f"no embeddings: {reply.status_code} {reply.text[:300]}; --set encoders=[] leaves them out"
                    )
                await asyncio.sleep(1)


async def _judge(
    fleet: ThrowAway, load: Load, mixture: Mixture, processes: Processes, begun: float, minutes: float, prefix: str
) -> Soak:
    losses = mixture.losses
    compare(load.answers(), losses)
    attempts = [*load.attempts(), *mixture.attempts]
    sums = await fleet.account(attempts, prefix, losses)
    told = sum(usage.completion for usage in mixture.batch_usage)
    charged = await settled_tokens(fleet.store, fleet.batch_key)
    if told != charged:
        losses.charges.append(f"batches: {told} completion tokens told, {charged} charged")
    await load.check_turns(losses)
    await check_keys(fleet.urls, fleet.keys, fleet.revoked, losses)
    seconds = 60 * minutes
    followed = [process for process in processes.followed.values() if len(process.samples) > 3]
    verdicts = [verdict for process in followed if (verdict := judge(process, seconds)) is not None]
    return Soak(
        minutes=(time.monotonic() - begun) / 60,
        counts=dict(mixture.counts),
        streams=len(load.told.streams),
        tokens=sum(attempt.usage.completion for attempt in attempts if attempt.usage is not None) + told,
        turns=len(load.told.turns),
        ledger=sums,
        losses=losses,
        verdicts=verdicts,
        processes=followed,
        timeline=_per_minute(load.arrivals(), begun),
    )


def _per_minute(arrivals: list[float], begun: float) -> list[tuple[float, float]]:
    bins: dict[int, int] = {}
    for at in arrivals:
        bins[int((at - begun) / 60)] = bins.get(int((at - begun) / 60), 0) + 1
    return [(minute + 0.5, count / 60) for minute, count in sorted(bins.items())]
