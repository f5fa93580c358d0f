"""Opens the request log that the configuration asks for: its sink, and the spool for entries while that is away."""

from __future__ import annotations

from pathlib import Path

from penstock.errors import ConfigError
from penstock.gateway.process.settings import GatewaySettings
from penstock.metering.clickhouse.schema import Retention
from penstock.metering.ledger import Settlement
from penstock.metering.log_entries import ChargeEntry, Entry, Stream
from penstock.metering.request_log import LogCounts, RequestLog, Sink
from penstock.metering.request_sinks import open_sink
from penstock.metering.request_store import RequestStore
from penstock.metering.spool import Spool
from penstock.storage import Database
from penstock.storage.database import default_url, state_folder
from penstock.telemetry.logging import RequestRecord
from penstock.telemetry.metrics import Metrics

OFF = "off"


class RequestLogOff:
    """Keeps nothing."""

    sink: Sink | None = None

    def start(self) -> None:
        return

    def add(self, record: RequestRecord) -> None:
        return

    def put(self, entry: Entry) -> None:
        return

    def takes(self, stream: Stream) -> bool:
        return False

    async def close(self) -> None:
        return


def open_request_log(
    settings: GatewaySettings, database: Database | None, metrics: Metrics
) -> RequestLog | RequestLogOff:
    """Off when the configuration says so, or when there is no database that could hold it."""
    config = settings.request_log
    if config.url == OFF or (not config.url and database is None):
        return RequestLogOff()
    retention = Retention.days(config.retention_days, config.summary_days)
    sink: Sink
    if config.url:
        sink = open_sink(config.url, retention=retention)
    else:
        sink = _in_store(database, retention.raw_s)
    folder = Path(config.spool).expanduser() if config.spool else _spool_folder(settings)
    try:
        spool = Spool(folder, config.spool_limit)
    except OSError as error:
        raise ConfigError(f"request_log.spool: {folder} cannot be used: {error}") from error
    counts = LogCounts(metrics.request_log_written, metrics.request_log_spooled, metrics.request_log_lost)
    return RequestLog(sink, spool, counts, batch=config.batch, flush_s=config.flush_s)


def charge_entry(settlement: Settlement) -> ChargeEntry:
    charge = settlement.charge
    return ChargeEntry(
        charge.id,
        charge.request_id,
        charge.tenant,
        charge.user,
        charge.feature,
        charge.model,
        charge.adapter,
        charge.tier,
        charge.prompt_tokens,
        settlement.cached_tokens,
        settlement.completion_tokens,
        settlement.cost_nanos,
        settlement.finish_reason,
        settlement.settled_by,
        settlement.settled_at,
        settlement.reasoning_tokens,
    )


def _in_store(database: Database | None, retention_s: float | None) -> RequestStore:
    assert database is not None

    async def already_open() -> Database:
        return database

    return RequestStore(already_open, retention_s=retention_s, owned=False)


def _spool_folder(settings: GatewaySettings) -> Path:
    for url in (settings.request_log.url, settings.store_url or default_url()):
        if url.startswith("sqlite:///"):
            return Path(url.removeprefix("sqlite:///")).parent / "request_log_spool"
    return state_folder() / "request_log_spool"
