"""How many replicas serve a workload, hour by hour: the peak with headroom, and what a fleet that follows the day runs.

Capacity is what one replica serves within the objectives. A fleet runs at a share of it, since arrivals are random, and
has spare replicas, so that losing one costs nothing.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from penstock.errors import ConfigError
from penstock.planning.workload import HOURS, Workload


@dataclass(frozen=True, slots=True)
class Headroom:
    utilisation: float = 0.8
    """Share of a replica's capacity that is planned for at the peak."""
    spare_replicas: int = 1
    """Replicas beyond those that the load needs, at every hour: N+1."""

    def __post_init__(self) -> None:
        if not 0 < self.utilisation <= 1:
            raise ConfigError(f"utilisation is a share above 0, at most 1, not {self.utilisation:g}")
        if self.spare_replicas < 0:
            raise ConfigError(f"spare replicas must be 0 or more, not {self.spare_replicas}")

    def replicas(self, requests_per_s: float, capacity: float) -> int:
        """For a load, when one replica serves `capacity` requests per second; at least one, and the spares."""
        return max(1, math.ceil(requests_per_s / (capacity * self.utilisation) - 1e-9)) + self.spare_replicas


@dataclass(frozen=True, slots=True)
class Fleet:
    """Replicas of one deployment for a workload."""

    replicas: int
    """At the peak, spares included: what static provisioning runs all day."""
    by_hour: tuple[int, ...]
    """What a fleet that follows the day runs."""
    devices_per_replica: int
    nodes: int
    """At the peak."""
    utilisation: float
    """The day's average load over the capacity of static provisioning."""
    autoscaled_utilisation: float

    @property
    def devices(self) -> int:
        return self.replicas * self.devices_per_replica

    @property
    def devices_by_hour(self) -> tuple[int, ...]:
        return tuple(replicas * self.devices_per_replica for replicas in self.by_hour)


def nodes_for(replicas: int, devices_per_replica: int, devices_per_node: int) -> int:
    """A replica is never split over more nodes than it must be."""
    if devices_per_replica >= devices_per_node:
        return replicas * math.ceil(devices_per_replica / devices_per_node)
    return math.ceil(replicas / (devices_per_node // devices_per_replica))


def provision(
    workload: Workload, capacity: float, headroom: Headroom, devices_per_replica: int, devices_per_node: int
) -> Fleet:
    """The fleet for a workload. One that follows the day starts replicas an hour before they are needed."""
    average, burst = workload.average.requests, workload.burst
    peak = headroom.replicas(average * workload.peak_factor, capacity)
    needed = [headroom.replicas(average * share * burst, capacity) for share in workload.curve.hours]
    by_hour = tuple(max(needed[hour], needed[(hour + 1) % HOURS]) for hour in range(HOURS))
    load = average / capacity
    return Fleet(
        replicas=peak,
        by_hour=by_hour,
        devices_per_replica=devices_per_replica,
        nodes=nodes_for(peak, devices_per_replica, devices_per_node),
        utilisation=load / peak,
        autoscaled_utilisation=load / (sum(by_hour) / HOURS),
    )
