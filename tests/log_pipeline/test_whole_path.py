"""R-GW-6 at scale: gateway, Kafka, consumers, ClickHouse as real processes, under load, while each of them goes away.

Whatever happens, every request is once in the request log, and the money in every summary is the ledger's, to the nano.
"""

from __future__ import annotations

import json
import signal
import sqlite3
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from penstock.metering.clickhouse.client import ClickHouse
from tests.e2e.drill import Drill, drill
from tests.log_pipeline.broker import Broker
from tests.log_pipeline.clickhouse_server import ClickHouseServer
from tests.log_pipeline.conftest import cleared, expected, sums, until
from tests.parts import ROOT

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1200)]
TOPIC = "requests"
VOTES = 40
CUT_S = 20.0
"""How long a broker or ClickHouse is away; longer than every timeout in these settings."""


class Consumers:
    """Processes of `penstock log-pipeline consume`."""

    def __init__(self, config: Path) -> None:
        self._config = config
        self.running: list[subprocess.Popen[bytes]] = []

    def start(self) -> subprocess.Popen[bytes]:
        process = subprocess.Popen([*self.command("consume"), "-s", "log_pipeline.port=0"], cwd=ROOT)
        self.running.append(process)
        return process

    def command(self, *words: str) -> list[str]:
        return [sys.executable, "-m", "penstock", "log-pipeline", *words, "-c", str(self._config)]

    def run(self, *words: str) -> str:
        return subprocess.run(self.command(*words), cwd=ROOT, check=True, capture_output=True, text=True).stdout

    def lag(self) -> int:
        return sum(row["lag"] for row in json.loads(self.run("status", "-o", "json")))

    def end(self) -> None:
        for process in self.running:
            process.kill()
            process.wait()


class Load:
    """Clients that ask without a pause."""

    def __init__(self, url: str, clients: int = 4) -> None:
        self._url = url
        self.sent: list[str] = []
        self.answers: list[str] = []
        self.failures: list[str] = []
        self._end = threading.Event()
        self._threads = [threading.Thread(target=self._ask, args=(number,)) for number in range(clients)]
        for thread in self._threads:
            thread.start()

    def _ask(self, number: int) -> None:
        with httpx.Client(base_url=self._url, timeout=60) as client:
            while not self._end.is_set():
                body = {"model": "tiny", "user": f"user {number}", "max_tokens": 8,
                        "messages": [{"role": "user", "content": f"Count to {len(self.sent)}."}]}  # fmt: skip
                if number == 0:
                    body["model"] = "nobody"  # refused: a record without a charge
                try:
                    reply = client.post("/v1/chat/completions", json=body)
                except httpx.HTTPError as error:
                    self.failures.append(repr(error))
                    continue
                self.sent.append(reply.headers["x-request-id"])
                if reply.status_code == 200:
                    self.answers.append(reply.json()["id"])
                self._end.wait(0.1)

    def until(self, requests: int) -> None:
        goal = len(self.sent) + requests
        until(lambda: len(self.sent) >= goal, 300, "the gateway does not answer")

    def end(self) -> None:
        self._end.set()
        for thread in self._threads:
            thread.join()


@contextmanager
def pipeline(folder: Path, kafka: Broker, server: ClickHouseServer) -> Iterator[tuple[Drill, Consumers]]:
    url = kafka.url(TOPIC, message_timeout_ms=3000, session_timeout_ms=6000, topic_metadata_refresh_interval_ms=1000)
    settings = (
        f"request_log: {{url: '{url}', flush_s: 0.2, spool: '{folder / 'spool'}'}}\n"
        f"log_pipeline: {{clickhouse: '{server.url}', batch: 200, flush_s: 0.5}}\n"
    )
    with drill(folder, settings) as running:
        consumers = Consumers(folder / "penstock.yaml")
        try:
            yield running, consumers
        finally:
            consumers.end()


def metric(url: str, name: str) -> float:
    text = httpx.get(f"{url}/metrics", timeout=30).text
    return float(next(line.split()[-1] for line in text.splitlines() if line.startswith(f"{name} ")))


def ledger(running: Drill) -> tuple[int, int]:
    """Charges settled, and their cost."""
    with closing(sqlite3.connect(running.folder / "ledger.db", timeout=30)) as database:
        found: tuple[int, int] = database.execute("SELECT COUNT(*), SUM(cost_nanos) FROM charges_settled").fetchone()
        return found


def produce_again(kafka: Broker, topic: str, most: int) -> int:
    """Sends copies of what is in a topic, as a gateway does that lost an acknowledgement; and something unreadable."""
    import confluent_kafka

    options = {"bootstrap.servers": kafka.address, "group.id": "copies", "auto.offset.reset": "earliest"}
    consumer, producer = confluent_kafka.Consumer(options), confluent_kafka.Producer(options)
    numbers = consumer.list_topics(topic, timeout=30).topics[topic].partitions
    consumer.assign([confluent_kafka.TopicPartition(topic, number, 0) for number in numbers])
    copied = 0
    while copied < most and (message := consumer.poll(10)) is not None:
        if message.error() is None:
            producer.produce(topic, message.value(), key=message.key())
            copied += 1
    producer.produce(topic, b"not an entry", key="poison")
    assert producer.flush(30) == 0
    consumer.close()
    return copied


def test_every_request_counts_once_whatever_goes_away(tmp_path: Path, kafka: Broker, server: ClickHouseServer) -> None:
    clickhouse = cleared(server)
    with pipeline(tmp_path, kafka, server) as (running, consumers):
        first, second = consumers.start(), consumers.start()
        load = Load(running.url)
        try:
            load.until(60)
            first.kill()  # in the middle of whatever it does
            load.until(40)
            consumers.start()
            load.until(40)

            kafka.down()
            cut = time.monotonic()
            load.until(20)
            until(lambda: metric(running.url, "penstock_request_log_spooled_total") > 0)
            time.sleep(max(0.0, CUT_S - (time.monotonic() - cut)))
            kafka.up()
            load.until(40)

            server.kill()
            time.sleep(CUT_S)
            load.until(20)
            server.start()
            load.until(20)

            second.send_signal(signal.SIGSTOP)  # it loses its partitions, and does not know
            load.until(60)
            time.sleep(10)
            second.send_signal(signal.SIGCONT)
            load.until(20)
            running.kill_engine()
            load.until(20)
        finally:
            load.end()
        for number, answer in enumerate(load.answers[:VOTES]):
            vote = {"response_id": answer, "rating": "up" if number % 4 else "down"}
            assert httpx.post(f"{running.url}/v1/feedback", json=vote, timeout=60).status_code == 200
        for topic in (TOPIC, f"{TOPIC}.charges"):
            assert produce_again(kafka, topic, 100) == 100
        assert "charges sent" in consumers.run("backfill", "--since", "1h")
        assert metric(running.url, "penstock_request_log_lost_total") == 0
        until(lambda: arrived(running, clickhouse, load) and consumers.lag() == 0, 600, "not everything arrives")
        check(running, clickhouse, load)
        last = consumers.running[-1]
        last.send_signal(signal.SIGTERM)
        assert last.wait(60) == 0


def arrived(running: Drill, clickhouse: ClickHouse, load: Load) -> bool:
    [(requests,)] = clickhouse.query("SELECT uniqExact(request_id) FROM request_log WHERE route LIKE '/v1/chat%'")
    [(charges,)] = clickhouse.query("SELECT uniqExact(charge_id) FROM request_log_charges")
    [(votes,)] = clickhouse.query("SELECT uniqExact(response_id) FROM request_log_votes")
    wanted = (len(load.sent), ledger(running)[0], VOTES)
    print(f"in ClickHouse: {requests} requests, {charges} charges, {votes} votes; to come: {wanted}")
    return (requests, charges, votes) == wanted


def check(running: Drill, clickhouse: ClickHouse, load: Load) -> None:
    assert not load.failures
    requests = [row[0] for row in clickhouse.query("SELECT request_id FROM request_log WHERE route LIKE '/v1/chat%'")]
    assert Counter(requests) == Counter(load.sent), "each exactly once"
    charges, cost = ledger(running)
    assert charges >= len(load.answers) and cost > 0
    found: dict[str, Any] = sums(clickhouse)
    [(timed,)] = clickhouse.query("SELECT count() FROM request_log WHERE ttft_ms IS NOT NULL")
    assert found == expected(found["requests"], cost, charges, timed)
    assert found["requests"] > len(load.sent)
    [(up, down)] = clickhouse.query("SELECT sum(up), sum(down) FROM request_log_votes_by_hour")
    assert (up, down) == (VOTES * 3 // 4, VOTES // 4)
    letters = clickhouse.query("SELECT reason, value FROM request_log_dead_letters FINAL")
    assert [value for _, value in letters] == ["not an entry"] * 2
    [(errors,)] = clickhouse.query(
        "SELECT sum(requests) FROM request_log_outcomes_by_hour WHERE finish_reason = 'error'"
    )
    assert errors >= len(load.sent) - len(load.answers)
