"""The base of dialects: how one API writes requests, answers, errors and its own load.

A dialect does no input or output. It turns the neutral request (the fields of OpenAI's API) into a `Call`, and the
bytes of the reply into neutral chunks. Invariant: what it cannot express is in neither `features` nor `parameters`, so
that a gateway knows before it sends anything.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import msgspec

from penstock.backends.remote.chunk import Chunk, EmbeddingBatch, RerankScores, TokenCount
from penstock.backends.remote.credentials import Key
from penstock.backends.remote.failure import error_details, failed_stream, garbage, refusal
from penstock.backends.remote.features import Feature, Fit, Operation, fit
from penstock.backends.remote.frames import Event, Frames, SseFrames
from penstock.backends.remote.load import ServerLoad
from penstock.backends.remote.upstream import Upstream
from penstock.protocol.errors import ApiError, EngineUnavailable, InvalidRequest

encode = msgspec.json.Encoder().encode
decode = msgspec.json.Decoder().decode


@dataclass(frozen=True, slots=True)
class Call:
    """One HTTP request to a server; a POST if it has a body."""

    url: str
    content: bytes | None = None
    headers: dict[str, str] = field(default_factory=dict)


class Reader(ABC):
    """Reads the bytes of one answer into chunks."""

    def __init__(self, frames: Frames | None = None) -> None:
        self.frames: Frames = frames or SseFrames()
        self.done = False
        """The server has said that its answer is over."""

    def push(self, part: bytes) -> Iterator[Chunk]:
        for event in self.frames.push(part):
            if self.done:
                return
            yield from self.read(event)

    def end(self) -> Iterator[Chunk]:
        """What is left when the server has closed its answer."""
        for event in self.frames.end():
            if self.done:
                return
            yield from self.read(event)

    @abstractmethod
    def read(self, event: Event) -> Iterator[Chunk]:
        """The chunks of one event; raises the `ApiError` of one that is an error."""


class Dialect(ABC):
    """One server's API."""

    name: ClassVar[str]
    features: ClassVar[frozenset[Feature]]
    parameters: ClassVar[frozenset[str] | None] = None
    """Fields of a request that it can express; None: all are passed on and the server itself refuses what it does not
    know."""

    def __init__(self, upstream: Upstream) -> None:
        self.upstream = upstream
        self.key = Key(upstream.key_env, upstream.key_file, upstream.url)

    def check(self) -> None:
        """Raises `ConfigError` if its credentials are missing."""
        self.key.check()

    def supports(self, feature: Feature) -> bool:
        return feature in self.features

    def fit(self, body: Mapping[str, Any], operation: Operation = "chat") -> Fit:
        """How much of a request it can express."""
        return fit(body, self.parameters)

    def sign(self, call: Call) -> dict[str, str]:
        """The headers of a call, with its credentials."""
        key = self.key.value()
        headers = {"content-type": "application/json", **call.headers}
        if key:
            headers["authorization"] = f"Bearer {key}"
        return headers

    @abstractmethod
    def call(self, operation: Operation, body: Mapping[str, Any]) -> Call:
        """The request for an answer, streamed."""

    @abstractmethod
    def reader(self, operation: Operation, body: Mapping[str, Any]) -> Reader:
        """Reads the answer to `call`."""

    def whole(self, operation: Operation, body: Mapping[str, Any], data: bytes) -> Iterator[Chunk]:
        """Reads an answer that should have been streamed and is one JSON object: an error, as a rule."""
        said, kind = error_details(data)
        raise failed_stream(kind or "", said or "") if said else garbage()

    def refusal(self, status: int, headers: Mapping[str, str], body: bytes) -> ApiError:
        """The error for a reply other than 200."""
        return refusal(status, headers, body)

    def embed_call(self, texts: Sequence[str], dimensions: int | None = None) -> Call:
        raise self._missing("embeddings")

    def embeddings(self, data: bytes) -> EmbeddingBatch:
        raise self._missing("embeddings")

    def rerank_call(self, query: str, documents: Sequence[str]) -> Call:
        raise self._missing("rerank")

    def scores(self, data: bytes, documents: int) -> RerankScores:
        """What the answer to `rerank_call` says about so many documents."""
        raise self._missing("rerank")

    def count_call(self, body: Mapping[str, Any]) -> Call:
        """The request that counts the tokens of `prompt` or `messages`."""
        raise self._missing("tokenize")

    def count(self, data: bytes) -> TokenCount:
        raise self._missing("tokenize")

    @abstractmethod
    def health_call(self) -> Call:
        """The request whose answer shows that the server works."""

    def healthy(self, status: int, data: bytes) -> bool:
        return status < 500

    def load_call(self) -> Call | None:
        """The request for its load; None: it does not tell."""
        return None

    def load(self, data: bytes) -> ServerLoad | None:
        """What the answer to `load_call` says; None: nothing."""
        return None

    def _missing(self, feature: Feature) -> InvalidRequest:
        return InvalidRequest(
            f"The server of this model (dialect `{self.name}`) has no {feature}.", code="unsupported_feature"
        )


def json_object(data: bytes) -> dict[str, Any]:
    """A JSON object sent by a server."""
    try:
        found = decode(data)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise garbage() from error
    if not isinstance(found, dict):
        raise garbage()
    return found


def vectors(found: Any) -> list[list[float]]:
    """Vectors sent by a server, which must all be of one length."""
    try:
        rows = msgspec.convert(found, list[list[float]], strict=False)
    except msgspec.ValidationError as error:
        raise EngineUnavailable("The remote server of this model sent invalid vectors; try again.") from error
    if not rows or any(len(row) != len(rows[0]) for row in rows):
        raise EngineUnavailable("The remote server of this model sent invalid vectors; try again.")
    return rows
