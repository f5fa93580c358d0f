"""A simulation from beginning to end: requests of a source meet gateways and a fleet on one virtual clock.

Requests arrive until `seconds`; after that those under way may finish, for at most `drain_s`. The result depends only
on the arguments: the same seed gives the same record.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from penstock.engine.request import FinishReason
from penstock.errors import ConfigError
from penstock.routing.admission.queue import CLASSES
from penstock.routing.placement import PlacementFacts
from penstock.simulation.arrival import Arrival, Segment, Source
from penstock.simulation.block_names import segment_names
from penstock.simulation.events import Events
from penstock.simulation.fleet import Fault, FleetGateway, FleetSpec, SimulatedFleet, State
from penstock.simulation.gateway import Gateway, GatewaySpec
from penstock.simulation.job import Job
from penstock.simulation.record import Record, Sample, Status
from penstock.simulation.replica import Replica

PROGRESS_EVENTS = 20_000
"""How many events pass between two reports of progress."""


def simulate(
    source: Source,
    fleet: FleetSpec | Mapping[str, FleetSpec],
    gateway: GatewaySpec | None = None,
    *,
    seconds: float,
    drain_s: float = 600.0,
    faults: Sequence[Fault] = (),
    seed: int = 1,
    sample_s: float = 1.0,
    fast_forward: bool = True,
    progress: Callable[[float], None] | None = None,
) -> Record:
    """Runs a simulation. `fleet`: the replicas, or those of each pool. `progress` hears the simulated time."""
    if seconds <= 0 or sample_s <= 0:
        raise ConfigError("a simulation and its samples need a time above 0 s")
    run = Simulation(source, fleet, gateway or GatewaySpec(), seconds, faults, seed, sample_s, fast_forward)
    return run.run(drain_s, progress)


@dataclass(slots=True)
class _Seen:
    """Totals at the last sample."""

    arrived: int = 0
    served: int = 0
    refused: int = 0
    lost: int = 0
    tokens: int = 0


class Pool(FleetGateway):
    """The replicas of one pool, or all, and the queues for them. It stands between the gateways and the fleet and tells
    each what concerns it."""

    def __init__(self, fleet: SimulatedFleet, gateways: Sequence[Gateway]) -> None:
        self.fleet = fleet
        self.gateways = gateways
        fleet.gateway = self

    def started(self, replica: Replica, job: Job, cached_tokens: int) -> None:
        job.gateway.started(job, cached_tokens)

    def ended(self, replica: Replica, job: Job, reason: FinishReason) -> None:
        job.gateway.ended(job, reason == "timeout")

    def stepped(self, replica: Replica) -> None:
        for gateway in self.gateways:
            gateway.stepped(replica)
        self.fleet.stepped(replica)

    def joined(self, replica: Replica) -> None:
        for gateway in self.gateways:
            gateway.joined(replica)

    def leaving(self, replica: Replica) -> None:
        for gateway in self.gateways:
            gateway.leaving(replica)

    def gone(self, replica: Replica) -> None:
        for gateway in self.gateways:
            gateway.gone(replica)

    def lost(self, job: Job) -> None:
        job.gateway.lost(job)

    @property
    def queued(self) -> int:
        return sum(gateway.queued for gateway in self.gateways)

    @property
    def predicted_wait_s(self) -> float:
        return max(gateway.predicted_wait_s for gateway in self.gateways)


class Simulation:
    """One run."""

    def __init__(
        self,
        source: Source,
        fleet: FleetSpec | Mapping[str, FleetSpec],
        gateway: GatewaySpec,
        seconds: float,
        faults: Sequence[Fault] = (),
        seed: int = 1,
        sample_s: float = 1.0,
        fast_forward: bool = True,
    ) -> None:
        """`fleet`: the replicas, or those of each pool."""
        rng = random.Random(seed)
        fleets = fleet if isinstance(fleet, Mapping) else {"": fleet}
        first = next(iter(fleets.values()))
        self.record = Record()
        self.events = Events()
        self._source = source
        self._arrivals = source.arrivals()
        self._seconds = seconds
        self._sample_s = sample_s
        self._block_size = first.replica.block_size
        self._window = max(spec.replica.window for spec in fleets.values())
        self._salted = not gateway.share_prefixes
        self._salts: dict[str, int] = {}
        self._jobs = 0
        self._live: dict[str, Job] = {}
        self._served = self._refused = 0
        self._seen = _Seen()
        self._placer, self._tiers = gateway.placer, gateway.tiers
        self._gateways = max(gateway.gateways, 1)
        self.pools: dict[str, Pool] = {}
        for name, spec in fleets.items():
            replicas = SimulatedFleet(spec, self.events, self.record, rng, faults, fast_forward)
            self.pools[name] = Pool(
                replicas,
                [
                    Gateway(f"g{number}", gateway, replicas, self.events, self.record, rng, self._over)
                    for number in range(self._gateways)
                ],
            )
            replicas.arrived = lambda: self._jobs
            replicas.served = lambda: self._served
            replicas.refused = lambda: self._refused

    def run(self, drain_s: float = 600.0, progress: Callable[[float], None] | None = None) -> Record:
        began, count = time.process_time(), 0
        events = self.events
        for pool in self.pools.values():
            pool.fleet.open()
        self._next_arrival()
        events.at(self._sample_s, self._sample)
        while (due := events.next) is not None and due <= self._seconds + drain_s:
            if due > self._seconds and not self._live:
                break
            events.step()
            count += 1
            if progress is not None and count % PROGRESS_EVENTS == 0:
                progress(events.now)
        self._close()
        self.record.totals.cpu_s = time.process_time() - began
        return self.record

    def _close(self) -> None:
        events, totals = self.events, self.record.totals
        if not self._live:
            events.now = max(events.now, self._seconds)
        fleets = [pool.fleet for pool in self.pools.values()]
        for fleet in fleets:
            for unit in fleet.units:
                fleet.tally(unit.replica)
                unit.replica.evict()
        for job in list(self._live.values()):
            self._finish(job, "unfinished", "", None)
        totals.seconds = events.now
        totals.arrived = self._jobs
        totals.gpu_seconds, totals.spot_gpu_seconds = self._device_seconds()
        totals.cost = sum(fleet.cost() for fleet in fleets)

    def _device_seconds(self) -> tuple[float, float]:
        paid = [pool.fleet.device_seconds() for pool in self.pools.values()]
        return sum(on_demand for on_demand, _ in paid), sum(spot for _, spot in paid)

    def _next_arrival(self) -> None:
        arrival = next(self._arrivals, None)
        if arrival is not None and arrival.at <= self._seconds:
            self.events.at(arrival.at, self._arrived, arrival)

    def _arrived(self, arrival: Arrival) -> None:
        self._next_arrival()
        self._arrive(arrival)

    def _arrive(self, arrival: Arrival) -> None:
        number = self._jobs
        self._jobs += 1
        answer = Segment(arrival.answer or -number - 1, arrival.output_tokens)
        root = self._salts.setdefault(arrival.tenant, len(self._salts) + 1) if self._salted else 0
        names = segment_names((*arrival.prompt, answer), self._block_size, root)
        job = Job(str(number), arrival, names, self.record.gaps_of(arrival.tenant), self.events.now)
        gateway = job.gateway = self._gateway(job, number % self._gateways)
        self._live[job.id] = job
        if not 0 < job.prompt_tokens < self._window or arrival.output_tokens < 1:
            self._over(job, "refused", "too_long" if job.prompt_tokens else "empty", None)
            return
        gateway.arrive(job)

    def _gateway(self, job: Job, number: int) -> Gateway:
        """The queue that a job goes to: of the first of its pools that has room, or of its first one. It does not move
        while it waits."""
        if len(self.pools) == 1:
            return next(iter(self.pools.values())).gateways[number]
        arrival = job.arrival
        facts = PlacementFacts(
            arrival.tenant, self._tiers.get(arrival.tenant, ""), CLASSES[arrival.rank], job.prompt_tokens
        )
        queues = [self.pools[pool].gateways[number] for pool in self._placer.place(facts).pools]
        return next((queue for queue in queues if queue.has_room(job)), queues[0])

    def _over(self, job: Job, status: Status, reason: str, retry_after_s: float | None) -> None:
        """A job is over: records it and asks the source what follows."""
        self._finish(job, status, reason, retry_after_s)
        now = self.events.now
        if status == "served":
            following = self._source.after(job.arrival, now)
        else:
            following = self._source.refused(job.arrival, now, retry_after_s)
        if following is not None and following.at <= self._seconds:
            self.events.at(max(following.at, now), self._arrive, following)

    def _finish(self, job: Job, status: Status, reason: str, retry_after_s: float | None) -> None:
        del self._live[job.id]
        self._served += status == "served"
        self._refused += status == "refused"
        self.record.ended(job, status, self.events.now, reason, retry_after_s)

    @property
    def fleet(self) -> SimulatedFleet:
        """All replicas, where there are no pools."""
        (pool,) = self.pools.values()
        return pool.fleet

    @property
    def queued(self) -> int:
        return sum(pool.queued for pool in self.pools.values())

    def _sample(self) -> None:
        totals, seen = self.record.totals, self._seen
        fleets = [pool.fleet for pool in self.pools.values()]
        running = waiting = used = 0
        most = tokens = 0
        for unit in (unit for fleet in fleets for unit in fleet.units):
            replica = unit.replica
            replica.progress()
            running += replica.load.running
            waiting += replica.load.waiting
            used += replica.load.used_blocks
            most = max(most, replica.load.used_blocks)
            tokens += replica.tokens
        blocks = fleets[0].spec.replica.num_blocks

        def count(state: State) -> int:
            return sum(fleet.count(state) for fleet in fleets)

        up = count("ready") + count("draining")
        tokens += sum(fleet.tokens_gone for fleet in fleets)
        on_demand, spot = self._device_seconds()
        self.record.samples.append(
            Sample(
                at=self.events.now,
                arrived=self._jobs - seen.arrived,
                served=totals.served - seen.served,
                refused=totals.refused - seen.refused,
                lost=totals.lost - seen.lost,
                tokens=tokens - seen.tokens,
                queued=self.queued,
                running=running,
                waiting=waiting,
                kv_use=used / (blocks * up) if up else 0.0,
                kv_use_most=most / blocks,
                ready=sum(len(fleet.ready) for fleet in fleets),
                starting=count("starting"),
                draining=count("draining"),
                desired=sum(fleet.desired for fleet in fleets),
                spot=sum(fleet.spot_ready for fleet in fleets),
                gpu_seconds=on_demand,
                spot_gpu_seconds=spot,
            )
        )
        self._seen = _Seen(self._jobs, totals.served, totals.refused, totals.lost, tokens)
        self.events.after(self._sample_s, self._sample)
