"""R-GW-6: ten minutes without a sink lose nothing, within the default size of the spool."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path

import pytest

from penstock.config.schema import RequestLogConfig
from penstock.metering.log_entries import STREAMS, ChargeEntry, Entry, LogEntry
from penstock.metering.request_log import LogCounts, RequestLog, Sink, SinkError
from penstock.metering.spool import Spool
from penstock.telemetry.exposition import Value

RATE, SECONDS = 500, 600
"""Requests per second of a gateway on two cores, and ten minutes."""


class Away(Sink):
    """A sink that can be cut off; it counts what it gets and checks the order."""

    streams = frozenset(stream.name for stream in STREAMS)

    def __init__(self) -> None:
        self.away = True
        self.numbers: list[int] = []

    async def write(self, entries: Sequence[Entry]) -> None:
        if self.away:
            raise SinkError("away")
        self.numbers += [int(entry.request_id[-8:]) for entry in entries if isinstance(entry, LogEntry)]

    async def close(self) -> None:
        return


def entries(number: int) -> tuple[Entry, Entry]:
    """As long as those of a real model's requests."""
    id, at = f"req_{number:032d}", 1_790_000_000.123456 + number / RATE
    return (
        LogEntry(id, f"user-{number % 9999:06d}", "acme", "llama-3.1-70b", "legal-v2", 1834, 1024, 512, 213.412,
                 10432.771, "stop", "/v1/chat/completions", at),
        ChargeEntry(f"{number:032d}", id, "acme", f"user-{number % 9999:06d}", "search", "llama-3.1-70b", "legal-v2",
                    "enterprise", 1834, 1024, 512, 1834000, "stop", "end", at),
    )  # fmt: skip


@pytest.mark.slow
@pytest.mark.timeout(900)
async def test_ten_minutes_of_a_busy_gateway_fit_the_spool(tmp_path: Path) -> None:
    """Ten minutes pass as fast as the disk takes them."""
    config, sink = RequestLogConfig(), Away()
    counts = LogCounts(Value(), Value(), Value())
    spool = Spool(tmp_path, config.spool_limit)
    log = RequestLog(sink, spool, counts, batch=config.batch, flush_s=0.05, retry_s=0.05)
    log.start()
    for number in range(RATE * SECONDS):
        for entry in entries(number):
            log.put(entry)
        while len(log._queue) > 10_000:  # noqa: ASYNC110 - the virtual clock: as fast as it can be spooled
            await asyncio.sleep(0.01)
    assert counts.lost.value == 0
    assert spool.size < config.spool_limit
    sink.away = False
    while counts.written.value < 2 * RATE * SECONDS:  # noqa: ASYNC110 - the test's time limit holds
        await asyncio.sleep(0.1)
    await log.close()
    assert counts.lost.value == 0 and spool.empty
    assert sink.numbers == list(range(RATE * SECONDS))
