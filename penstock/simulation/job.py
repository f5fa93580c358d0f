"""A request on its way through the simulated fleet: what was delivered so far, and when.

Invariant: `delivered` counts each token once, whichever replica made it; a job that loses its replica continues behind
them on the next.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import lru_cache
from typing import TYPE_CHECKING, cast

from penstock.engine.request import Request, SamplingParams
from penstock.simulation.arrival import Arrival
from penstock.simulation.gaps import GapCounts

if TYPE_CHECKING:
    from penstock.routing.meter import ReplicaMeter
    from penstock.simulation.decode_run import DecodeRun
    from penstock.simulation.gateway import Gateway
    from penstock.simulation.replica import Replica


class Job:
    """One request and its progress."""

    __slots__ = (
        "arrival",
        "arrived",
        "cached_tokens",
        "delivered",
        "first_token",
        "gaps",
        "gateway",
        "granted",
        "id",
        "last_token",
        "longest_gap",
        "losses",
        "meter",
        "moves",
        "names",
        "output",
        "parked",
        "preemptions",
        "prompt_tokens",
        "replica",
    )

    gateway: Gateway
    """Where it arrived."""
    meter: ReplicaMeter
    """Of its gateway, for the replica that it is on."""

    def __init__(self, id: str, arrival: Arrival, names: list[bytes], gaps: GapCounts, arrived: float) -> None:
        self.id = id
        self.arrival = arrival
        self.names = names
        """Of every full block of prompt and answer."""
        self.gaps = gaps
        """Of its tenant."""
        self.arrived = arrived
        self.prompt_tokens = arrival.prompt_tokens
        self.output = arrival.output_tokens
        self.delivered = 0
        self.granted: float | None = None
        """When admission let it pass."""
        self.first_token: float | None = None
        self.last_token = arrived
        self.longest_gap = 0.0
        self.cached_tokens = 0
        self.replica: Replica | None = None
        self.losses = 0
        """Replicas that died under it."""
        self.moves = 0
        """How often another replica continued it."""
        self.preemptions = 0
        self.parked = 0
        """Grows when it begins or ends to wait for a replica, so that an old time limit does not count."""

    def request(self, now: float) -> Request:
        """For the next replica: what is left to generate. Only the number of tokens counts in a simulation, and bytes
        are the smallest thing that has one."""
        arrival = self.arrival
        timeout_s = arrival.timeout_s
        if timeout_s is not None and self.moves:
            timeout_s = max(timeout_s - (now - self.arrived), 0.001)
        return Request(
            self.id,
            cast("list[int]", bytearray(self.prompt_tokens)),
            _params(arrival.limit),
            # An interrupted stream goes before requests that have not started.
            priority=arrival.priority - (self.delivered > 0),
            timeout_s=timeout_s,
            produced=cast("list[int]", bytearray(self.delivered)),
        )

    def token(self, now: float) -> None:
        """One token has come."""
        if self.first_token is None:
            self.first_token = now
        else:
            gap = now - self.last_token
            self.gaps.add(gap)
            if gap > self.longest_gap:
                self.longest_gap = gap
        self.delivered += 1
        self.last_token = now
        self.meter.generated(self.id, 1)

    def advance(self, tokens: int, run: DecodeRun, gaps: Iterable[tuple[int, int]], longest: float, end: float) -> None:
        """The first `tokens` steps of a run brought a token each, with these gaps; never the first token of the job."""
        self.gaps.add_counts(gaps)
        if self.last_token != run.began:  # it was not in the step before the run
            waited = run.end(1) - self.last_token
            self.gaps.replace(run.first, waited)
            longest = max(longest, waited)
        if longest > self.longest_gap:
            self.longest_gap = longest
        self.delivered += tokens
        self.last_token = end
        self.meter.generated(self.id, tokens)


@lru_cache(maxsize=4096)
def _params(max_tokens: int) -> SamplingParams:
    return SamplingParams(max_tokens=max_tokens)
