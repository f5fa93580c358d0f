"""GET /metrics: as text, or as OpenMetrics where the scraper asks for it (Prometheus does), with exemplars."""

from __future__ import annotations

from penstock.gateway.app.exchange import Exchange
from penstock.gateway.process.service import Service
from penstock.telemetry.exposition import CONTENT_TYPE, OPENMETRICS


async def metrics(service: Service, exchange: Exchange) -> None:
    openmetrics = b"application/openmetrics-text" in (exchange.header(b"accept") or b"")
    body = await service.metrics_text(openmetrics)
    await exchange.reply(200, body, (OPENMETRICS if openmetrics else CONTENT_TYPE).encode())
