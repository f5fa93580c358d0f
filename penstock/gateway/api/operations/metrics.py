"""GET /metrics: as text, or as OpenMetrics with exemplars if the scraper accepts it (Prometheus does)."""

from __future__ import annotations

from penstock.gateway.app.exchange import Exchange
from penstock.gateway.workers.group import WorkerGroup
from penstock.telemetry.exposition import CONTENT_TYPE, OPENMETRICS


class MetricsEndpoints:
    """Metrics of all gateway processes on this port."""

    def __init__(self, workers: WorkerGroup) -> None:
        self._workers = workers

    async def metrics(self, exchange: Exchange) -> None:
        openmetrics = b"application/openmetrics-text" in (exchange.header(b"accept") or b"")
        body = await self._workers.metrics_text(openmetrics)
        await exchange.reply(200, body, (OPENMETRICS if openmetrics else CONTENT_TYPE).encode())
