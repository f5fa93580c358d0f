"""Replicas for a workload: the peak with headroom, the hours of the day, nodes."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.errors import ConfigError
from penstock.planning.provision import Headroom, nodes_for, provision
from penstock.planning.workload import CURVES, Workload, curve

TEXTBOOK = Workload(users=100_000, requests_per_user=10, input_tokens=2_000, output_tokens=500)


def test_the_textbook_fleet() -> None:
    # 34.72 requests/s at peak; 5 per replica, of which 4 are planned for: 8.68, so 9, and a spare; 2 GPUs each
    fleet = provision(TEXTBOOK, 5.0, Headroom(), devices_per_replica=2, devices_per_node=8)
    assert fleet.replicas == 10
    assert fleet.devices == 20
    assert fleet.nodes == 3
    assert max(fleet.by_hour) == 10
    # 11.574 / (10 x 5)
    assert fleet.utilisation == pytest.approx(0.23148, rel=1e-4)
    # 3 o'clock has 2/8.625 of the average, so a peak of 4.34/s: two replicas with the spare 3; 4 o'clock is the same
    assert fleet.by_hour[3] == 3
    assert fleet.devices_by_hour[3] == 6
    assert fleet.utilisation < fleet.autoscaled_utilisation < 1


def test_a_fleet_that_follows_the_day_is_ready_before_the_load() -> None:
    day = curve(",".join(["1"] * 12 + ["5"] + ["1"] * 11))
    work = Workload(1_000, 86.4, 100, 100, peak_factor=day.peak, curve=day)
    fleet = provision(work, 1.0, Headroom(1, 0), 1, 8)
    assert fleet.by_hour[11] == fleet.by_hour[12] == fleet.replicas
    assert fleet.by_hour[10] == fleet.by_hour[13] < fleet.replicas


def test_a_load_that_fits_exactly_needs_no_more() -> None:
    headroom = Headroom(utilisation=0.5, spare_replicas=0)
    assert headroom.replicas(10, 4) == 5
    assert headroom.replicas(10.001, 4) == 6
    assert headroom.replicas(0, 4) == 1


@pytest.mark.parametrize(
    ("replicas", "devices", "per_node", "nodes"),
    [(1, 1, 8, 1), (8, 1, 8, 1), (9, 1, 8, 2), (3, 4, 8, 2), (3, 3, 8, 2), (2, 8, 8, 2), (2, 16, 8, 4), (3, 1, 1, 3)],
)
def test_nodes(replicas: int, devices: int, per_node: int, nodes: int) -> None:
    assert nodes_for(replicas, devices, per_node) == nodes


@given(st.sampled_from(sorted(CURVES)), st.floats(10, 1e7), st.floats(0.01, 1_000), st.integers(0, 3))
def test_every_hour_has_capacity_for_its_peak(name: str, users: float, capacity: float, spares: int) -> None:
    work = Workload(users, 10, 2_000, 500, curve=CURVES[name])
    headroom = Headroom(0.8, spares)
    fleet = provision(work, capacity, headroom, 1, 8)
    for hour, running in enumerate(fleet.by_hour):
        assert (running - spares) * capacity * 0.8 >= work.hour_peak(hour).requests * (1 - 1e-6)
        assert running <= fleet.replicas


@pytest.mark.parametrize(("utilisation", "spares"), [(0, 1), (1.2, 1), (-1, 1), (0.8, -1)])
def test_bad_headroom_is_a_sentence(utilisation: float, spares: int) -> None:
    with pytest.raises(ConfigError, match=r"utilisation is a share above 0|spare replicas must be 0"):
        Headroom(utilisation, spares)
