"""Several gateway processes have one load history, which is the coordinator's and outlives each of them."""

from __future__ import annotations

import tempfile
from pathlib import Path

import pytest

from penstock.engine.request import EngineLoad
from penstock.gateway.workers import client as client_module
from penstock.gateway.workers.client import CoordinatorClient
from penstock.gateway.workers.coordinator import WorkerCoordinator
from penstock.telemetry import load_history
from penstock.telemetry.admission_metrics import AdmissionMetrics
from penstock.telemetry.metrics import EngineView, Metrics
from tests.gateway.conftest import until


class Worker:
    def __init__(self, path: Path, number: int, load: EngineLoad) -> None:
        self.metrics = Metrics(lambda: [EngineView("tiny", "0", True, None, load)])
        self.admission = AdmissionMetrics(self.metrics.registry, list, list, list, "sum")
        self.waits = self.admission.waits("tiny", "standard")
        self.client = CoordinatorClient(
            path, number, readings=self.metrics.registry.readings, changed=lambda: None, traces=lambda query: []
        )

    async def requests(self) -> float:
        """Requests in the history of the whole server."""
        minutes = (await self.client.recall())["tiny"].minutes
        return sum(point.requests * point.seconds for point in minutes)

    async def tokens(self) -> float:
        minutes = (await self.client.recall())["tiny"].minutes
        return sum(point.output_tokens * point.seconds for point in minutes)


async def test_workers_share_a_history_that_survives_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(load_history, "SAMPLE_S", 0.02)
    monkeypatch.setattr(client_module, "REPORT_S", 0.02)
    load = EngineLoad()
    with tempfile.TemporaryDirectory(prefix="ps-") as folder:
        path = Path(folder) / "desk"
        async with WorkerCoordinator(path):
            first, second = Worker(path, 0, load), Worker(path, 1, load)
            await first.client.start()
            await second.client.start()
            await until(first.client.recall, lambda models: bool(models) and bool(models["tiny"].minutes))
            first.waits.observe(0.1)
            second.waits.observe(0.1, 2)
            load.generation_tokens = 50
            assert await until(first.requests, lambda count: count > 2.5) == pytest.approx(3)
            assert await until(second.tokens, lambda count: count > 49) == pytest.approx(50)
            await second.client.close()
            third = Worker(path, 2, load)
            await third.client.start()
            third.waits.observe(0.1)
            assert await until(third.requests, lambda count: count > 3.5) == pytest.approx(4)
            assert await third.tokens() == pytest.approx(50)
            await first.client.close()
            await third.client.close()
