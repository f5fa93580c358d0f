"""Batches of messages of one partition, and the plan that makes inserting them repeatable.

Exactly once, step by step:

1. A batch is the messages [start, end) of one partition. Messages that cannot be read, and entries that the table
   already has, are skipped.
2. The plan (where the batch ends, what it skips) is committed to Kafka as metadata of the offset `start`. Kafka accepts
   it only from the partition's owner.
3. The batch is inserted under a token made of topic, partition, start, end and a digest of what is inserted (offsets
   alone would be the same again in a topic that was made anew).
4. `end` is committed, without a plan.

Whoever finds a plan beside the committed offset (after a crash, or after the partition changed hands) repeats steps 3
and 4 with the very same batch: the same messages, the same skips, the same token. ClickHouse recognises the token in
every table and view. Without the plan, a repeated batch would end somewhere else and count twice.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import zlib
from collections.abc import Sequence
from dataclasses import dataclass, field

import msgspec

from penstock.metering.clickhouse.client import identity
from penstock.metering.log_entries import Entry, Stream, decode

MOST_ROWS = 20_000
"""One bit per row: a plan always fits into the 4096 bytes that Kafka keeps beside an offset."""
MOST_LETTER = 16_384
"""Characters of an unreadable message that are kept."""
_VERSION = "1"


@dataclass(frozen=True, slots=True)
class Plan:
    """What a batch consists of: where it ends, and the positions in it that are not inserted."""

    end: int
    skips: frozenset[int] = frozenset()

    def encode(self) -> str:
        bits = bytearray(max(self.skips, default=-1) // 8 + 1)
        for position in self.skips:
            bits[position // 8] |= 1 << position % 8
        skipped = base64.b64encode(zlib.compress(bytes(bits), 9)).decode() if bits else ""
        return f"{_VERSION}:{self.end}:{skipped}"

    @classmethod
    def decode(cls, text: str | None) -> Plan | None:
        """None for the metadata of somebody else, or none."""
        version, _, rest = (text or "").partition(":")
        end, _, skipped = rest.partition(":")
        if version != _VERSION or not end.isdecimal():
            return None
        try:
            bits = zlib.decompress(base64.b64decode(skipped)) if skipped else b""
        except (binascii.Error, zlib.error):
            return None
        skips = (8 * number + bit for number, byte in enumerate(bits) for bit in range(8) if byte >> bit & 1)
        return cls(int(end), frozenset(skips))


@dataclass(frozen=True, slots=True)
class Message:
    """A message of a partition."""

    offset: int
    value: bytes | None


@dataclass(frozen=True, slots=True)
class Letter:
    """A message that cannot be read."""

    offset: int
    reason: str
    value: str


@dataclass(slots=True)
class Batch:
    """Messages of one partition, read."""

    stream: Stream
    topic: str
    partition: int
    start: int
    """The offset that is committed: the first message may lie behind it, where the topic has gaps."""
    messages: Sequence[Message]
    entries: list[Entry | None] = field(default_factory=list)
    """By position; None: unreadable, or a copy of an earlier one in this batch."""
    letters: list[Letter] = field(default_factory=list)
    copies: int = 0

    def read(self) -> None:
        seen = set()
        for message in self.messages:
            entry: Entry | None = None
            try:
                if message.value is None:
                    raise msgspec.DecodeError("the message has no value")
                entry = decode(self.stream, message.value)
            except (msgspec.DecodeError, UnicodeDecodeError) as error:
                text = (message.value or b"").decode("utf-8", "backslashreplace")[:MOST_LETTER]
                self.letters.append(Letter(message.offset, str(error), text))
            if entry is not None:
                name = identity(self.stream, entry)
                if name in seen:
                    entry = None
                    self.copies += 1
                else:
                    seen.add(name)
            self.entries.append(entry)

    def plan(self, known: set[tuple[str | int, ...]]) -> Plan:
        """`known`: identities that the table has, from earlier batches."""
        skips = set()
        for position, entry in enumerate(self.entries):
            if entry is None:
                skips.add(position)
            elif known and identity(self.stream, entry) in known:
                skips.add(position)
                self.copies += 1
        return Plan(self.messages[-1].offset + 1, frozenset(skips))

    def inserted(self, plan: Plan) -> list[Entry]:
        return [entry for i, entry in enumerate(self.entries) if entry is not None and i not in plan.skips]

    def token(self, plan: Plan) -> str:
        """What the insert is recognised by when it is repeated."""
        digest = hashlib.sha256()
        for position, message in enumerate(self.messages):
            if position not in plan.skips:
                digest.update(message.value or b"")
        return f"{self.topic}/{self.partition}/{self.start}-{plan.end}/{digest.hexdigest()[:16]}"
