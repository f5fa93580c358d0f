from __future__ import annotations

from penstock.config.autoscale import AutoscaleConfig
from penstock.planning.headroom import FleetSize, LoadPoint
from penstock.planning.scaling_preview import preview

NOW = 1_800_000_000.0
SIZE = FleetSize(replicas=1, slots=10)


def minutes(running: float, waiting: float = 0.0, replicas: float = 1.0) -> list[LoadPoint]:
    return [
        LoadPoint(NOW - 60 * (20 - i), 60.0, requests=1.0, running=running, waiting=waiting, replicas=replicas)
        for i in range(20)
    ]


def test_the_policy_is_asked_about_the_load_of_recent_minutes() -> None:
    config = AutoscaleConfig(min=1, max=4)
    calm = preview(minutes(running=3), SIZE, config, NOW)
    assert calm is not None and calm.desired == 1
    busy = preview(minutes(running=10, waiting=5), SIZE, config, NOW)
    assert busy is not None and busy.desired > 1 and busy.detail
    idle = preview(minutes(running=0, replicas=3), FleetSize(replicas=3, slots=10), config, NOW)
    assert idle is not None and idle.desired < 3
    assert preview([], SIZE, config, NOW) is None
    assert preview(minutes(running=10), SIZE, config, NOW + 7200) is None, "nothing recent"
