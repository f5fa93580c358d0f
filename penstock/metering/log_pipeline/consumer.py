"""The consumer: takes messages from Kafka, plans batches, inserts them into ClickHouse, commits.

One thread does everything: partitions change hands only while it polls. After that, work on a batch goes on only if the
assignment is still the one it was planned under (`_generation`). While ClickHouse is away the consumer keeps polling
with its partitions paused, so that it stays in the group. Memory is bounded: `HELD_BATCHES` batches, and the fetch
queue of `FETCH_KB`.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from penstock.config.log_pipeline import LogPipelineConfig
from penstock.errors import ConfigError, PenstockError
from penstock.metering.clickhouse.client import ClickHouse, ClickHouseError
from penstock.metering.clickhouse.schema import Retention
from penstock.metering.kafka import KafkaAddress, Quiet, kafka_driver
from penstock.metering.log_entries import STREAMS, Stream
from penstock.metering.log_pipeline.batch import Batch, Message, Plan
from penstock.metering.log_pipeline.metrics import PipelineMetrics

log = logging.getLogger(__name__)

POLL_S = 0.2
RETRY_S = 1.0
MOST_RETRY_S = 15.0
LAG_EVERY_S = 2.0
HELD_BATCHES = 4
"""What is taken from all partitions together before everything is inserted."""
COMMIT_S = 30.0
"""How long a commit may take before it is tried again."""
FETCH_KB = 16_384
CLOSE_S = 20.0
"""How long a consumer that ends waits for its last batches."""


class PipelineError(PenstockError):
    """The consumer cannot go on."""


class Reassigned(Exception):
    """Partitions changed hands; whoever owns them now repeats what was under way."""


class Ending(Exception):
    """The consumer is to end and has waited long enough."""


@dataclass(slots=True)
class Part:
    """A partition of this consumer."""

    stream: Stream
    start: int
    """What is committed, or will be: everything before it is in ClickHouse."""
    plan: Plan | None = None
    """Of a batch that was begun and perhaps not finished."""
    messages: list[Message] = field(default_factory=list)
    since: float = 0.0
    """When its first message was taken."""
    stamp: float = 0.0
    """When that message was written to Kafka."""


Key = tuple[str, int]
"""Topic and partition."""


class Consumer:
    """See the module. `run` returns when `stop` was called, or when everything is consumed (`until_idle`)."""

    def __init__(
        self,
        kafka_url: str,
        clickhouse: ClickHouse,
        retention: Retention,
        settings: LogPipelineConfig,
        metrics: PipelineMetrics,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._kafka = kafka_driver("request_log.url")
        address = KafkaAddress.of(kafka_url)
        self._streams = {stream.topic(address.topic): stream for stream in STREAMS}
        self._clickhouse = clickhouse
        self._retention = retention
        self._settings = settings
        self._metrics = metrics
        self._clock = clock
        self._parts: dict[Key, Part] = {}
        self._held = 0
        """Messages of all partitions."""
        self._generation = 0
        self._commits: dict[frozenset[tuple[str, int, int]], Any] = {}
        """Answers to commits that are waited for."""
        self._stopped_at: float | None = None
        self._looked_at = float("-inf")
        self._kafka_up = True
        options = {
            "queued.max.messages.kbytes": FETCH_KB,
            "session.timeout.ms": 15_000,
            "topic.metadata.refresh.interval.ms": 10_000,
            "allow.auto.create.topics": True,
            **address.options,
            "bootstrap.servers": address.brokers,
            "group.id": settings.group,
            "enable.auto.commit": False,
            "enable.auto.offset.store": False,
            "auto.offset.reset": "earliest",
            "partition.assignment.strategy": "roundrobin",
            "on_commit": self._committed,
            "error_cb": self._trouble,
        }
        try:
            self._consumer = self._kafka.Consumer(options, logger=Quiet())
        except self._kafka.KafkaException as error:
            raise ConfigError(f"request_log.url: {error.args[0].str()}") from error

    def stop(self) -> None:
        """Finish what was taken, then end. May be called from a signal handler."""
        if self._stopped_at is None:
            self._stopped_at = self._clock()

    def problem(self) -> str:
        """Why nothing is consumed; empty: something is, or could be."""
        if not self._metrics.sink_up.value:
            return "ClickHouse is not available"
        return "" if self._kafka_up else "Kafka is not available"

    def run(self, *, until_idle: bool = False) -> None:
        self._consumer.subscribe(
            list(self._streams), on_assign=self._assigned, on_revoke=self._revoked, on_lost=self._revoked
        )
        try:
            self._patiently(self._prepare, owned=False)
            while self._stopped_at is None:
                if not self._metrics.sink_up.value:
                    # Partitions changed hands in the middle of an outage: they are still paused.
                    self._patiently(lambda: self._clickhouse.query("SELECT 1"), owned=False)
                self._poll(POLL_S)
                self._try_flush()
                idle = self._look()
                if until_idle and idle:
                    break
            for part in self._parts.values():
                part.since = float("-inf")
            self._try_flush()
        except Ending:
            log.warning("ended before the last batches were in ClickHouse; they are consumed again")
        finally:
            self._consumer.close()
            self._clickhouse.close()

    # Kafka

    def _poll(self, wait_s: float) -> None:
        """Takes what has arrived, until it would have to wait or a batch is full."""
        message = self._consumer.poll(wait_s)
        while message is not None:
            if message.error() is not None:
                self._problem_of(message.error())
            elif self._take(message):
                return
            message = self._consumer.poll(0)

    def _take(self, message: Any) -> bool:
        """Returns whether it is time to insert."""
        self._kafka_up = True
        part = self._parts.get((message.topic(), message.partition()))
        if part is None:
            return False
        if message.offset() < part.start:  # the topic was made anew, or lost its end
            log.warning("offsets went back", extra={"topic": message.topic(), "partition": message.partition(),
                                                    "from": part.start, "to": message.offset()})  # fmt: skip
            part.start, part.plan = message.offset(), None
        if not part.messages:
            part.since = self._clock()
            part.stamp = message.timestamp()[1] / 1000
        part.messages.append(Message(message.offset(), message.value()))
        self._held += 1
        return len(part.messages) >= self._settings.batch or self._full

    def _problem_of(self, error: Any) -> None:
        codes = self._kafka.KafkaError
        if error.fatal():
            raise PipelineError(f"Kafka: {error.str()}")
        if error.code() not in (codes._PARTITION_EOF, codes.UNKNOWN_TOPIC_OR_PART, codes._UNKNOWN_TOPIC):
            self._trouble(error)

    def _trouble(self, error: Any) -> None:
        if error.code() == self._kafka.KafkaError._ALL_BROKERS_DOWN:
            if self._kafka_up:
                log.warning("Kafka is not available; waiting", extra={"why": error.str()})
            self._kafka_up = False
        elif error.fatal():
            raise PipelineError(f"Kafka: {error.str()}")
        elif error.code() != self._kafka.KafkaError._TRANSPORT:  # every attempt to connect
            log.info("Kafka: %s", error.str())

    def _assigned(self, consumer: Any, partitions: Sequence[Any]) -> None:
        """Starts each partition where its last batch ended, or with the batch that was begun."""
        self._generation += 1
        placed = self._places(consumer, partitions)
        self._held = 0
        self._parts = {
            (place.topic, place.partition): Part(self._streams[place.topic], place.offset, Plan.decode(place.metadata))
            for place in placed
        }
        consumer.assign(
            [self._kafka.TopicPartition(topic, number, part.start) for (topic, number), part in self._parts.items()]
        )
        self._metrics.partitions.set(len(placed))
        begun = sum(part.plan is not None for part in self._parts.values())
        log.info("consuming", extra={"partitions": len(placed), "begun_batches": begun})

    def _places(self, consumer: Any, partitions: Sequence[Any]) -> list[Any]:
        """What is committed for the partitions; where nothing is, their first messages."""
        while True:
            try:
                found: list[Any] = consumer.committed(list(partitions), timeout=COMMIT_S)
                for place in found:
                    if place.offset < 0:
                        place.offset, _ = consumer.get_watermark_offsets(place, timeout=COMMIT_S)
            except self._kafka.KafkaException as error:
                if self._over():
                    raise Ending from error
                log.warning("offsets cannot be read; trying again", extra={"why": str(error.args[0])})
                time.sleep(RETRY_S)
                continue
            return found

    def _revoked(self, consumer: Any, partitions: Sequence[Any]) -> None:
        """What was taken and not planned is forgotten: whoever gets the partitions starts at what is committed."""
        self._generation += 1
        for topic, number in self._parts:
            self._metrics.lag(topic, number, 0)
        self._parts, self._held = {}, 0
        self._metrics.partitions.set(0)

    def _commit(self, places: Sequence[tuple[Key, int, str]]) -> None:
        """Commits offsets with metadata; returns when Kafka has them. Reassigned: the partitions are no longer ours."""
        generation, wanted = self._generation, frozenset((*key, offset) for key, offset, _ in places)
        offsets = [self._kafka.TopicPartition(*key, offset, metadata) for key, offset, metadata in places]
        codes = self._kafka.KafkaError
        while True:
            self._commits[wanted] = None
            try:
                self._consumer.commit(offsets=offsets, asynchronous=True)
                asked = self._clock()
                while self._commits[wanted] is None and self._clock() - asked < COMMIT_S:
                    self._wait(0.01, generation)
                answer = self._commits[wanted]
            except self._kafka.KafkaException as error:
                answer = error.args[0]
            finally:
                self._commits.pop(wanted, None)
            if answer is True:
                return
            if answer is not None and answer.code() in (
                codes.ILLEGAL_GENERATION, codes.UNKNOWN_MEMBER_ID, codes.REBALANCE_IN_PROGRESS,
                codes.FENCED_INSTANCE_ID, codes._STATE,
            ):  # fmt: skip
                self._wait(POLL_S, None)  # in which the new assignment arrives
                raise Reassigned
            if answer is not None and answer.code() == codes.OFFSET_METADATA_TOO_LARGE:
                raise PipelineError("Kafka: offset.metadata.max.bytes of the brokers must be at least 4096")
            log.warning("offsets cannot be committed; trying again", extra={"why": str(answer or "no answer")})
            self._wait(RETRY_S, generation)

    def _committed(self, error: Any, partitions: Sequence[Any]) -> None:
        wanted = frozenset((place.topic, place.partition, place.offset) for place in partitions)
        error = error or next((place.error for place in partitions if place.error is not None), None)
        if wanted in self._commits:
            self._commits[wanted] = True if error is None else error

    def _wait(self, seconds: float, generation: int | None) -> None:
        """Keeps the membership alive; Reassigned if the assignment changes, Ending after the last respite."""
        end = self._clock() + seconds
        while True:
            left = end - self._clock()
            message = self._consumer.poll(max(0.0, min(left, POLL_S)))
            if message is not None:
                if message.error() is not None:
                    self._problem_of(message.error())
                else:
                    self._take(message)
            if generation is not None and generation != self._generation:
                raise Reassigned
            if self._over():
                raise Ending
            if left <= 0:
                return

    def _over(self) -> bool:
        return self._stopped_at is not None and self._clock() - self._stopped_at > CLOSE_S

    # Batches

    def _try_flush(self) -> None:
        try:
            self._flush([key for key, part in self._parts.items() if part.messages and self._due(part)])
        except Reassigned:
            log.info("partitions changed hands; a batch under way is left to their new owners")

    @property
    def _full(self) -> bool:
        return self._held >= HELD_BATCHES * self._settings.batch

    def _due(self, part: Part) -> bool:
        if part.plan is not None:  # exactly that batch, so all of it must have arrived
            return part.messages[-1].offset + 1 >= part.plan.end
        enough = self._full or len(part.messages) >= self._settings.batch
        return enough or self._clock() - part.since >= self._settings.flush_s

    def _flush(self, keys: Sequence[Key]) -> None:
        if not keys:
            return
        begun = [(self._parts[key], batch, plan) for key in keys for batch, plan in [self._planned(key)]]
        fresh = [
            ((batch.topic, batch.partition), batch.start, plan.encode())
            for part, batch, plan in begun
            if part.plan is None
        ]
        if fresh:
            self._commit(fresh)
        for part, batch, plan in begun:
            repeated, part.plan = part.plan is not None, plan
            self._insert(batch, plan, repeated)
        self._commit([((batch.topic, batch.partition), plan.end, "") for _, batch, plan in begun])
        for part, batch, plan in begun:
            del part.messages[: len(batch.messages)]
            self._held -= len(batch.messages)
            part.start, part.plan, part.since = plan.end, None, self._clock()

    def _planned(self, key: Key) -> tuple[Batch, Plan]:
        part = self._parts[key]
        messages = part.messages[: self._settings.batch]
        if part.plan is not None:
            begun = [message for message in part.messages if message.offset < part.plan.end]
            if begun:
                messages = begun
            else:
                log.error("a batch was begun whose messages are gone: retention of the topic is too short",
                          extra={"topic": key[0], "partition": key[1], "end": part.plan.end})  # fmt: skip
                part.plan = None
        batch = Batch(part.stream, *key, part.start, messages)
        batch.read()
        if part.plan is not None:
            return batch, part.plan
        entries = [entry for entry in batch.entries if entry is not None]
        known = self._patiently(lambda: self._clickhouse.known(part.stream, entries))
        return batch, batch.plan(known)

    def _insert(self, batch: Batch, plan: Plan, repeated: bool) -> None:
        entries, token = batch.inserted(plan), batch.token(plan)
        begun = self._clock()
        if batch.letters:
            letters = [
                (batch.topic, batch.partition, letter.offset, letter.reason, letter.value) for letter in batch.letters
            ]
            self._patiently(lambda: self._clickhouse.insert_dead_letters(letters, f"{token}/dead"))
            log.warning(
                "messages cannot be read; they are among the dead letters",
                extra={"topic": batch.topic, "count": len(letters), "why": batch.letters[0].reason},
            )
        if entries:
            self._patiently(lambda: self._clickhouse.insert(batch.stream, entries, token))
        name, metrics = batch.stream.name, self._metrics
        metrics.inserted(name, self._clock() - begun, repeated=repeated)
        metrics.counted(name, "inserted", len(entries))
        metrics.counted(name, "dead", len(batch.letters))
        metrics.counted(name, "copy", len(batch.messages) - len(entries) - len(batch.letters))
        log.debug("inserted", extra={"batch": token, "entries": len(entries), "messages": len(batch.messages)})

    # ClickHouse

    def _prepare(self) -> None:
        self._clickhouse.migrate(self._retention)

    def _patiently(self, work: Callable[[], Any], *, owned: bool = True) -> Any:
        """Does it, again and again while ClickHouse is away. `owned`: as long as partitions do not change hands."""
        generation, wait_s = self._generation if owned else None, RETRY_S
        while True:
            try:
                result = work()
            except ClickHouseError as error:
                if wait_s == RETRY_S:
                    log.warning("ClickHouse is not available; waiting", extra={"why": str(error)})
                self._metrics.sink_up.set(0)
                self._pause()
                self._wait(wait_s, generation)
                wait_s = min(2 * wait_s, MOST_RETRY_S)
                self._look()
                continue
            if not self._metrics.sink_up.value:
                self._metrics.sink_up.set(1)
                self._resume()
                log.info("ClickHouse is available")
            return result

    def _pause(self) -> None:
        places = self._consumer.assignment()
        if places:
            self._consumer.pause(places)

    def _resume(self) -> None:
        places = self._consumer.assignment()
        if places:
            self._consumer.resume(places)

    # Lag

    def _look(self) -> bool:
        """Updates the lag from time to time; returns whether there is nothing left to consume."""
        now = self._clock()
        stamps = [part.stamp for part in self._parts.values() if part.messages]
        self._metrics.waiting_since(min(stamps, default=None))
        if now - self._looked_at < LAG_EVERY_S:
            return False
        self._looked_at = now
        behind = 0
        for (topic, number), part in list(self._parts.items()):
            place = self._kafka.TopicPartition(topic, number)
            try:
                _, end = self._consumer.get_watermark_offsets(place, timeout=1.0)
            except self._kafka.KafkaException:
                return False
            if not self._kafka_up:
                log.info("Kafka is available")
                self._kafka_up = True
            self._metrics.lag(topic, number, max(0, end - part.start))
            behind += max(0, end - part.start)
        return bool(self._parts) and not behind
