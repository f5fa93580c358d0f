"""What the request log is made of: four streams of entries, each with a Kafka topic and a ClickHouse table of its own.

`requests` is the request log itself, with exactly the fields of R-GW-6. Money, votes and grades are not among them and
are known at other moments, so they are streams beside it: `charges` (settled charges, as the ledger has them), `votes`
(feedback) and `grades` (answers that the judge graded). Entries never contain text of prompts or answers. Limits on
values are those of the tables' columns: an entry that decodes can be inserted.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal

import msgspec

Id = Annotated[str, msgspec.Meta(min_length=1, max_length=1024)]
Tokens = Annotated[int, msgspec.Meta(ge=0, lt=2**32)]
Nanos = Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)]
Milliseconds = Annotated[float, msgspec.Meta(ge=0)]
Share = Annotated[float, msgspec.Meta(ge=0, le=1)]
Moment = Annotated[float, msgspec.Meta(ge=0, lt=4_102_444_800)]
"""Seconds since 1970, before 2100."""

_LONGEST = 256
"""Maximum length of a field whose value the client chooses."""


class LogEntry(msgspec.Struct, frozen=True):
    """One request. A call of a server-side tool has the id of its request and a route of its own."""

    request_id: Id
    user_id: str | None
    tenant: str | None
    model_version: str | None
    adapter_id: str | None
    prompt_tokens: Tokens
    cached_tokens: Tokens
    completion_tokens: Tokens
    ttft_ms: Milliseconds | None
    total_latency_ms: Milliseconds
    finish_reason: str | None
    route: str
    timestamp: Moment


class ChargeEntry(msgspec.Struct, frozen=True):
    """A settled charge. A request has none, one, or several (a batch of prompts)."""

    charge_id: Id
    request_id: str
    tenant: str
    user_id: str
    feature: str
    model: str
    adapter: str
    tier: str
    prompt_tokens: Tokens
    cached_tokens: Tokens
    completion_tokens: Tokens
    cost_nanos: Nanos
    finish_reason: str
    settled_by: str
    timestamp: Moment
    reasoning_tokens: Tokens = 0
    """Part of the completion tokens. Entries of earlier versions do not have it."""


class VoteEntry(msgspec.Struct, frozen=True):
    """A vote on an answer, without its comment. A later vote on the same answer replaces it."""

    response_id: Id
    request_id: str
    tenant: str
    user_id: str
    model: str
    adapter: str
    route: str
    via: str
    arm: str
    rating: Literal["up", "down"]
    timestamp: Moment


class GradeEntry(msgspec.Struct, frozen=True):
    """The judge's grades of a sampled answer, from 0 to 1; groundedness only of answers with sources."""

    grade_id: Id
    request_id: str
    tenant: str
    model: str
    via: str
    relevance: Share
    groundedness: Share | None
    timestamp: Moment


Entry = LogEntry | ChargeEntry | VoteEntry | GradeEntry


@dataclass(frozen=True, slots=True)
class Stream:
    """A kind of entries."""

    name: str
    entry: type[Entry]
    key: str
    """The field that is the key of Kafka messages: entries with the same identity are in the same partition."""
    identity: tuple[str, ...]
    """Fields that two entries share only if one is a copy of the other."""
    table: str
    suffix: str
    """Of its topic."""

    @property
    def fields(self) -> tuple[str, ...]:
        return self.entry.__struct_fields__

    def topic(self, base: str) -> str:
        return f"{base}{self.suffix}"


TABLE = "request_log"
REQUESTS = Stream("requests", LogEntry, "request_id", ("request_id", "route", "timestamp"), TABLE, "")
CHARGES = Stream("charges", ChargeEntry, "charge_id", ("charge_id",), f"{TABLE}_charges", ".charges")
VOTES = Stream("votes", VoteEntry, "response_id", ("response_id", "timestamp"), f"{TABLE}_votes", ".votes")
GRADES = Stream("grades", GradeEntry, "grade_id", ("grade_id",), f"{TABLE}_grades", ".grades")
STREAMS = (REQUESTS, CHARGES, VOTES, GRADES)
_BY_TYPE: dict[type, Stream] = {stream.entry: stream for stream in STREAMS}
_BY_NAME = {stream.name.encode(): stream for stream in STREAMS}
FIELDS = REQUESTS.fields

_encoder = msgspec.json.Encoder()
_decoders: dict[str, msgspec.json.Decoder[Any]] = {
    stream.name: msgspec.json.Decoder(stream.entry) for stream in STREAMS
}


def stream_of(entry: Entry) -> Stream:
    return _BY_TYPE[type(entry)]


def by_stream(entries: Sequence[Entry]) -> dict[str, list[Entry]]:
    """Entries by the name of their stream, in order."""
    found: dict[str, list[Entry]] = {}
    for entry in entries:
        found.setdefault(stream_of(entry).name, []).append(entry)
    return found


def encode(entry: Entry) -> bytes:
    return _encoder.encode(entry)


def decode(stream: Stream, data: bytes) -> Entry:
    """Raises `msgspec.DecodeError` (or ValidationError, which is one) for anything that is not such an entry."""
    found: Entry = _decoders[stream.name].decode(data)
    return found


def to_line(entry: Entry) -> bytes:
    """An entry as a line of the spool: requests as they are, others after the name of their stream."""
    stream = stream_of(entry)
    return encode(entry) if stream is REQUESTS else b"%s %s" % (stream.name.encode(), encode(entry))


def from_line(line: bytes) -> Entry:
    name, space, rest = line.partition(b" ")
    if space and name in _BY_NAME:
        return decode(_BY_NAME[name], rest)
    return decode(REQUESTS, line)


def clean(name: str | None) -> str | None:
    """Removes characters that a sink cannot store: PostgreSQL rejects NUL in text."""
    return None if name is None else name.replace("\0", "")[:_LONGEST]
