"""GET /metrics"""

from __future__ import annotations

from penstock.gateway.exchange import Exchange
from penstock.gateway.service import Service
from penstock.telemetry.exposition import CONTENT_TYPE


async def metrics(service: Service, exchange: Exchange) -> None:
    await exchange.reply(200, service.metrics.render(), CONTENT_TYPE.encode())
