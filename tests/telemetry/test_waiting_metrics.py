"""What waits in the gateway counts in the metric that autoscalers read, whichever process a scrape reaches."""

from __future__ import annotations

from penstock.engine.request import EngineLoad, HandoverLoad
from penstock.telemetry.aggregation import merged
from penstock.telemetry.engine_metrics import EngineView
from penstock.telemetry.exposition import MetricRegistry, render
from penstock.telemetry.waiting_metrics import WaitingMetrics, divided


def engine(name: str, waiting: int, *, ready: bool = True, deferred: int = 0) -> EngineView:
    handover = HandoverLoad(waiting=deferred) if deferred else None
    return EngineView("m", name, ready, None, EngineLoad(waiting=waiting, handover=handover))


def process(queued: int, parked: int = 0, *views: EngineView, shared: bool = False) -> MetricRegistry:
    registry = MetricRegistry()
    waiting = WaitingMetrics(registry, lambda: views)
    waiting.add(lambda: [("m", queued)], "capacity", shared=shared)
    waiting.add(lambda: [("m", parked)], "deferred")
    return registry


def samples(text: bytes) -> dict[str, float]:
    rows = (line.rpartition(" ") for line in text.decode().splitlines() if not line.startswith("#"))
    return {name.removeprefix("vllm:num_requests_"): float(value) for name, _, value in rows}


def test_the_queue_is_divided_among_the_engines_that_are_up() -> None:
    views = engine("0", 2), engine("1", 0), engine("2", 0, ready=False)
    found = samples(process(33, 0, *views).render())
    assert found['waiting{model_name="m",engine="0"}'] == 2 + 17
    assert found['waiting{model_name="m",engine="1"}'] == 16
    assert found['waiting{model_name="m",engine="2"}'] == 0
    assert divided(7, 3) == [3, 2, 2]


def test_reasons_add_up() -> None:
    found = samples(process(4, 3, engine("0", 5, deferred=2)).render())
    capacity = found['waiting_by_reason{model_name="m",engine="0",reason="capacity"}']
    deferred = found['waiting_by_reason{model_name="m",engine="0",reason="deferred"}']
    assert (capacity, deferred) == (3 + 4, 2 + 3)
    assert found['waiting{model_name="m",engine="0"}'] == capacity + deferred


def test_a_model_without_engines_still_asks_for_one() -> None:
    assert samples(process(0, 6).render())['waiting{model_name="m",engine="gateway"}'] == 6


def test_several_gateway_processes_add_their_queues_and_see_the_same_engines() -> None:
    gateways = [process(queued, 0, engine("0", 2)) for queued in (10, 24)]
    both = samples(render(merged([gateway.readings() for gateway in gateways])))
    assert both['waiting{model_name="m",engine="0"}'] == 2 + 34
    one_queue = [process(34, 0, engine("0", 2), shared=True) for _ in range(2)]
    both = samples(render(merged([gateway.readings() for gateway in one_queue])))
    assert both['waiting{model_name="m",engine="0"}'] == 2 + 34
