"""Ten times the traffic for a while, at a real gateway over HTTP. The same in simulated time: `penstock simulate`."""

from __future__ import annotations

import asyncio

import pytest

from tests.gateway.process.spike_drill import Spike, drill, problems


@pytest.mark.slow
@pytest.mark.parametrize(
    "spike",
    [
        Spike(
            rate=4.0, before=1.0, burst=3.0, after=3.0, settle=2.0, slots=2, tokens=30, step=0.006, wait=1.5, limit=1.5
        ),
        Spike(),
    ],
    ids=["seconds", "a minute"],
)
def test_a_spike_is_survived(spike: Spike) -> None:
    records, engines = asyncio.run(drill(spike))
    assert not problems(spike, records, engines)
