"""Ten times the traffic for a while, at a real gateway."""

from __future__ import annotations

import asyncio

import pytest

from penstock.bench.gateway.spike import Spike, drill, problems


def test_a_short_spike_is_survived() -> None:
    spike = Spike(
        rate=4.0, before=1.0, burst=3.0, after=3.0, settle=2.0, slots=2, tokens=30, step=0.006, wait=1.5, limit=1.5
    )
    records, engines = asyncio.run(drill(spike))
    assert not problems(spike, records, engines)


@pytest.mark.slow
def test_ten_times_the_traffic_for_a_minute() -> None:
    spike = Spike()
    records, engines = asyncio.run(drill(spike))
    assert not problems(spike, records, engines)
