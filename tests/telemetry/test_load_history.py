"""The load of recent hours, from metric readings."""

from __future__ import annotations

import pytest

from penstock.engine.request import EngineLoad
from penstock.telemetry.admission_metrics import AdmissionMetrics
from penstock.telemetry.aggregation import merged
from penstock.telemetry.load_history import HOURS, MINUTES, SAMPLE_S, LoadHistory
from penstock.telemetry.metrics import EngineView, Metrics

START = 1_800_000_000.0
NAME = 'a "strange" \\ name'


class Server:
    """Gateways with one engine, and the history of both."""

    def __init__(self, gateways: int = 1, admission: bool = True) -> None:
        self.load = EngineLoad(total_blocks=100)
        self.up = True
        self.queued = 0
        view = lambda: [EngineView(NAME, "0", self.up, None, self.load)]  # noqa: E731
        self.gateways = [Metrics(view) for _ in range(gateways)]
        self.admissions = []
        if admission:
            depths = lambda: [((NAME, "standard"), float(self.queued))]  # noqa: E731
            self.admissions = [AdmissionMetrics(one.registry, depths, list, list, "sum") for one in self.gateways]
            for one in self.admissions:
                one.waits(NAME, "standard")
        self.history = LoadHistory()
        self.now = START
        self.read()

    def read(self) -> None:
        self.history.record(self.now, merged(one.registry.readings() for one in self.gateways))

    def wait(self, seconds: float) -> None:
        end = self.now + seconds
        while self.now < end:
            self.now += SAMPLE_S
            self.read()

    def serve(self, gateway: int = 0, prompt: int = 30, output: int = 10, seconds: float = 2.0) -> None:
        if self.admissions:
            self.admissions[gateway].waits(NAME, "standard").observe(0.1)
        observed = self.gateways[gateway].request(NAME, "0")
        observed.prefill.observe(0.25 * seconds)
        observed.decode.observe(0.75 * seconds)
        observed.generation_tokens.observe(output)
        self.load.prompt_tokens += prompt
        self.load.generation_tokens += output

    @property
    def minutes(self) -> list:  # type: ignore[type-arg]
        return self.history.models()[NAME].minutes


def test_a_minute_adds_up_what_all_gateways_did() -> None:
    server = Server(gateways=2)
    server.load.running, server.load.waiting, server.load.used_blocks, server.queued = 3, 1, 25, 2
    for gateway in (0, 1, 1):
        server.serve(gateway)
    server.admissions[1].shed(NAME, "standard", "load_shed")
    server.wait(60)
    (minute,) = server.minutes
    assert minute.seconds == 60 and minute.at == START
    assert minute.requests == pytest.approx(4 / 60) and minute.refused == pytest.approx(1 / 60)
    assert minute.prompt_tokens == pytest.approx(90 / 60) and minute.output_tokens == pytest.approx(30 / 60)
    assert minute.token_time == pytest.approx(0.2)
    assert minute.running == 3 and minute.kv_use == 0.25 and minute.replicas == 1
    assert minute.waiting == 1 + 2 * 2, "each gateway has a queue of its own"


def test_the_present_minute_is_shown_as_far_as_it_has_come() -> None:
    server = Server()
    server.serve()
    server.wait(10)
    assert [point.seconds for point in server.minutes] == [10]
    assert server.minutes[0].requests == pytest.approx(0.1)


def test_an_engine_that_restarts_and_a_gateway_that_comes_later_cause_no_spike() -> None:
    server = Server()
    server.load.generation_tokens = 50
    server.wait(60)
    server.load.generation_tokens = 20  # restarted
    server.wait(60)
    assert [round(point.output_tokens * 60) for point in server.minutes] == [50, 20]
    server.up = False
    server.wait(60)
    server.up, server.load.generation_tokens = True, 1_000_000  # another gateway has used it meanwhile
    server.wait(60)
    assert [round(point.output_tokens * 60) for point in server.minutes] == [50, 20, 0, 0]


def test_readings_that_vanish_for_a_while_are_not_counted_twice() -> None:
    server = Server()
    server.load.generation_tokens = 50
    server.wait(60)
    gateways, server.gateways = server.gateways, []
    server.wait(30)
    server.gateways = gateways
    server.wait(30)
    assert sum(point.output_tokens * point.seconds for point in server.minutes) == pytest.approx(50)


@pytest.mark.slow
def test_minutes_become_hours_and_both_are_bounded() -> None:
    server = Server()
    for _ in range(60 * 3):
        server.serve()
        server.now += 60
        server.read()
    history = server.history.models()[NAME]
    assert len(history.hours) in (2, 3) and history.hours[-1].requests == pytest.approx(1 / 60)
    assert history.hours[-1].token_time == pytest.approx(0.2)
    for _ in range(HOURS * 60 // 30 + 2000):
        server.now += 1800
        server.read()
    history = server.history.models()[NAME]
    assert len(history.minutes) <= MINUTES + 1 and len(history.hours) == HOURS


def test_a_model_that_is_gone_is_forgotten_after_a_day() -> None:
    server = Server()
    server.gateways = []
    server.now += 3600
    server.read()
    assert NAME in server.history.models()
    server.now += 90_000
    server.read()
    assert not server.history.models()


def test_without_admission_the_finished_requests_are_counted() -> None:
    server = Server(admission=False)
    server.serve()
    server.wait(60)
    assert server.minutes[0].requests == pytest.approx(1 / 60)
