"""The interface of answer stores, and the LRU store in this process; `redis.py` is shared by several gateways.

Invariants: a key contains its tenant, so a tenant never finds another's answers; expired answers are not found. For
each partition a store also keeps the answered questions in order: a reader that has the first n asks for the rest,
until the epoch changes because some were dropped.
"""

from __future__ import annotations

import time
import uuid
from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field

Clock = Callable[[], float]
NOTES = "\0notes"
"""The model name of keys that hold metadata instead of an answer; they are not counted."""


@dataclass(frozen=True, slots=True)
class CacheKey:
    tenant: str
    model: str
    digest: str


@dataclass(frozen=True, slots=True)
class Size:
    answers: int
    bytes: int


class AnswerStore(ABC):
    @abstractmethod
    async def get(self, key: CacheKey) -> bytes | None: ...

    @abstractmethod
    async def put(self, key: CacheKey, answer: bytes) -> None: ...

    @abstractmethod
    async def drop(self, key: CacheKey) -> None: ...

    @abstractmethod
    async def evict(self, tenant: str | None = None, model: str | None = None) -> int:
        """Deletes the answers of a tenant and a model (None: of any); returns their number."""

    @abstractmethod
    async def note(self, partition: CacheKey, question: bytes) -> None:
        """Adds a question to a partition."""

    @abstractmethod
    async def questions(self, partition: CacheKey, epoch: str, seen: int) -> tuple[str, list[bytes]]:
        """The current epoch, and the questions after the first `seen`, or all of them if the epoch has changed."""

    @abstractmethod
    async def size(self, tenant: str | None = None) -> Size: ...

    async def close(self) -> None:
        """Closes connections; does nothing by default."""
        return


@dataclass(slots=True)
class _Answer:
    value: bytes
    until: float


@dataclass(slots=True)
class _Partition:
    until: float
    epoch: str = field(default_factory=lambda: uuid.uuid4().hex)
    questions: list[bytes] = field(default_factory=list)
    bytes: int = 0


class MemoryStore(AnswerStore):
    """See `AnswerStore`. `limit` bounds answers and questions together."""

    def __init__(self, limit: int, ttl_s: float, most_questions: int, clock: Clock = time.monotonic) -> None:
        self._limit = limit
        self._ttl_s = ttl_s
        self._most_questions = most_questions
        self._clock = clock
        self._answers: OrderedDict[CacheKey, _Answer] = OrderedDict()
        self._partitions: OrderedDict[CacheKey, _Partition] = OrderedDict()
        self.bytes = 0

    async def get(self, key: CacheKey) -> bytes | None:
        found = self._answers.get(key)
        if found is None:
            return None
        if found.until <= self._clock():
            await self.drop(key)
            return None
        self._answers.move_to_end(key)
        return found.value

    async def put(self, key: CacheKey, answer: bytes) -> None:
        await self.drop(key)
        if len(answer) > self._limit:
            return
        self._answers[key] = _Answer(answer, self._clock() + self._ttl_s)
        self.bytes += len(answer)
        self._shrink()

    async def drop(self, key: CacheKey) -> None:
        found = self._answers.pop(key, None)
        if found is not None:
            self.bytes -= len(found.value)

    async def evict(self, tenant: str | None = None, model: str | None = None) -> int:
        gone = [key for key in self._answers if _matches(key, tenant, model)]
        for key in gone:
            await self.drop(key)
        answers = sum(key.model != NOTES for key in gone)
        for key in [key for key in self._partitions if _matches(key, tenant, model)]:
            self._forget(key)
        return answers

    async def note(self, partition: CacheKey, question: bytes) -> None:
        now = self._clock()
        found = self._partitions.get(partition)
        if found is None or found.until <= now:
            self._forget(partition)
            found = self._partitions[partition] = _Partition(now)
        found.until = now + self._ttl_s
        if len(found.questions) >= self._most_questions:
            kept = found.questions[self._most_questions // 4 + 1 :]
            self._forget(partition)
            size = sum(map(len, kept))
            found = self._partitions[partition] = _Partition(now + self._ttl_s, questions=kept, bytes=size)
            self.bytes += size
        found.questions.append(question)
        found.bytes += len(question)
        self.bytes += len(question)
        self._partitions.move_to_end(partition)
        self._shrink()

    async def questions(self, partition: CacheKey, epoch: str, seen: int) -> tuple[str, list[bytes]]:
        found = self._partitions.get(partition)
        if found is None or found.until <= self._clock():
            return "", []
        return found.epoch, found.questions[seen if epoch == found.epoch else 0 :]

    async def size(self, tenant: str | None = None) -> Size:
        held = [found for key, found in self._answers.items() if key.model != NOTES and _matches(key, tenant, None)]
        return Size(len(held), self.bytes if tenant is None else sum(len(found.value) for found in held))

    def _forget(self, partition: CacheKey) -> None:
        found = self._partitions.pop(partition, None)
        if found is not None:
            self.bytes -= found.bytes

    def _shrink(self) -> None:
        """Evicts answers first; then partitions, because questions without answers are useless."""
        while self.bytes > self._limit and self._answers:
            _, gone = self._answers.popitem(last=False)
            self.bytes -= len(gone.value)
        while self.bytes > self._limit and self._partitions:
            self._forget(next(iter(self._partitions)))


def _matches(key: CacheKey, tenant: str | None, model: str | None) -> bool:
    return tenant in (None, key.tenant) and model in (None, key.model)
