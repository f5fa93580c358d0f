"""A generation that another server produces, whose text is passed on.

Everything around an answer works as with an engine: stop strings, guards, citations, the response cache, resumption.
Invariants: the end of an answer is passed on together with its usage, once the server has reported that; closing the
generation closes the connections to its servers; what the server counted is what is charged.
"""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, Callable, Sequence
from typing import Any

import msgspec
from msgspec import Struct

from penstock.backends.remote.chunk import Chunk, ChunkUsage
from penstock.gateway.app.exchange import ClientDisconnected
from penstock.gateway.generation.base import Gate, Generation
from penstock.gateway.generation.call_guard import CallGuard
from penstock.gateway.generation.choice import CONTENT_FILTER, TIME_LIMIT, Piece, TextGuard
from penstock.gateway.generation.remote_answer import RecordedAnswer, record_choice, replayed_chunks
from penstock.gateway.generation.remote_choice import RemoteChoice, tokens_in
from penstock.gateway.generation.remote_source import Arrived, ChunkSource, RemoteCall
from penstock.gateway.generation.remote_streams import RemoteStreams
from penstock.gateway.generation.resumption import Resumption
from penstock.gateway.generation.sources import Sources
from penstock.gateway.generation.spec import CacheFacts, CacheQuestion
from penstock.identity.labels import Demand
from penstock.metering.prices import Usage
from penstock.protocol.errors import EngineLost, InvalidRequest, RequestTimeout, ResumedElsewhere
from penstock.routing.remotes import RemoteMember, RemoteModel
from penstock.telemetry.metrics import Metrics
from penstock.telemetry.timeline import EngineRun

LONGEST_COUNTED = 64 * 1024
"""Characters of an answer that was cut off whose tokens are counted on the event loop."""
_DELIVERY = ("stream", "stream_options")
"""Fields that do not decide what an answer says."""


class RemoteSpec(Struct, frozen=True, kw_only=True):
    """What another server is asked to generate."""

    id: str
    """Names the generation in the ledger and to the client; never used before."""
    model: RemoteModel
    calls: Sequence[RemoteCall]
    request_id: str
    started_at: float
    prompt_tokens: int
    """By the model's tokenizer, or an estimate, until the server reports its usage."""
    most_tokens: int
    """Completion tokens that are reserved."""
    prompts: Sequence[str] = ()
    """Of a text completion, where they are text."""
    time_limit_s: float | None = None
    length_limit: str = ""
    """See `Generation`."""
    demand: Demand
    """The labels that its server must have."""
    stops: Sequence[str] = ()
    """Stop strings that are looked for here."""
    include_stop: bool = False
    logprobs: bool = False
    """Whether the client is shown log-probabilities."""
    token_ids: bool = False
    """Whether the client is shown token ids."""
    repeatable: bool = False
    """The answer is the same every time, as far as the server keeps its promises."""
    cache_salt: str = ""
    cache_question: CacheQuestion | None = None
    resumption: Resumption | None = None
    """Set where the client may resume the stream, or does."""
    streams: RemoteStreams | None = None
    """Keeps streams that can be resumed."""
    missing: Callable[[str], None] | None = None
    """Told of a parameter that the server accepted and did not follow."""

    @property
    def choices(self) -> int:
        return sum(call.choices for call in self.calls)


class RemoteGeneration(Generation):
    """An answer that another server writes."""

    model: RemoteModel
    choices: list[RemoteChoice]

    def __init__(self, spec: RemoteSpec, metrics: Metrics) -> None:
        super().__init__(spec.id, spec.model, spec.model.members[0].server.name, metrics, spec.started_at)
        self.spec = spec
        self.length_limit = spec.length_limit
        self.choices = [
            RemoteChoice(
                index,
                stops=spec.stops,
                include_stop=spec.include_stop,
                logprobs=spec.logprobs,
                token_ids=spec.token_ids,
            )
            for index in range(spec.choices)
        ]
        about = {"id": spec.id, "request_id": spec.request_id, "model": spec.model.name}
        self.resumable = spec.resumption is not None and spec.streams is not None
        self._source = ChunkSource(spec.calls, about, keep=self.resumable)
        self._as_reader = self._source.reader = object()
        """Not `self`: the two would keep each other alive until a garbage collection."""
        self._claimed = False
        self._deadline: float | None = None
        self._ends: list[Piece] = []
        """The last pieces of choices, held back until the servers' streams are over."""
        self._error: Exception | None = None
        self._over = False
        self._counted: int | None = None
        """Completion tokens of an answer that was cut off, by the model's tokenizer."""
        self._record: list[list[Any]] | None = None
        self._answer: RecordedAnswer | None = None
        """From the response cache."""

    def submit(self, gate: Gate | None = None) -> None:
        assert gate is None, "a remote server has a queue of its own"
        if self._answer is not None:
            return
        spec, model = self.spec, self.model
        self._submitted_at = time.monotonic()
        if spec.time_limit_s is not None:
            self._deadline = self._submitted_at + spec.time_limit_s
        if self.resumable:
            assert spec.streams is not None and spec.resumption is not None
            spec.streams.begin(spec.resumption, self, self._source)
        if self._claimed:
            self._began(self.replica)
            return
        member = model.choose(spec.demand, tokens=spec.prompt_tokens)
        self._began(member.server.name)
        self._source.start(lambda number: self._chunks(number, member))

    async def claim(self) -> None:
        """Take over the stream that the client resumes; `NotFound` if there is none."""
        spec = self.spec
        if spec.resumption is None or not spec.resumption.id:
            return
        assert spec.streams is not None
        self._source = spec.streams.claim(spec.resumption, self._source)
        self._source.reader = self._as_reader
        self._claimed = True
        usage = self._usage()
        produced = sum(tokens_in(sent) for _, sent in self._source.all())
        self.before = Usage(
            self.prompt_tokens,
            self.cached_tokens,
            produced if usage is None else usage.completion_tokens or produced,
            self.reasoning_tokens,
        )
        self._source.rewind()

    def _chunks(self, number: int, member: RemoteMember) -> AsyncGenerator[Chunk, None]:
        call, spec = self.spec.calls[number], self.spec
        first = member if not number else self.model.choose(spec.demand, tokens=spec.prompt_tokens)
        return self.model.answer(call.body, spec.request_id, first, spec.demand, call.kind)

    async def next(self, within: float | None = None) -> list[Piece]:
        if self._answer is not None:
            return self._next_replayed()
        if self._deadline is not None:
            left = max(self._deadline - time.monotonic(), 0.0)
            within = left if within is None else min(within, left)
        pieces: list[Piece] = []
        for arrived in await self._source.take(self._as_reader, within):
            pieces += self._take(arrived)
        if self.complete and not self._source.over and self._cut_here:
            self._source.end()
        if self._deadline is not None and time.monotonic() >= self._deadline and not self._source.over:
            self._expire()
        if self._source.exhausted and not self._over:
            pieces += self._finish()
        if self._error is not None and (not pieces or self.left):
            raise self._error
        return pieces

    def _next_replayed(self) -> list[Piece]:
        assert self._answer is not None
        pieces: list[Piece] = []
        for index, chunk in replayed_chunks(self._answer):
            choice = self.choices[index]
            if not choice.finished:
                pieces.append(self._kept(choice.read(chunk)))
        self._over = True
        return pieces

    def fail(self, error: Exception) -> None:
        self._error = self._error or error
        if self.left:
            self._source.stir()  # what reads it ends; it goes on by itself
        else:
            self._source.end(error)

    @property
    def left(self) -> bool:
        return self.resumable and self._source.kept and isinstance(self._error, ClientDisconnected | ResumedElsewhere)

    def close(self) -> None:
        streams = self.spec.streams if self.resumable else None
        if streams is None:
            self._source.close()
        elif self.left or (self._over and self._error is None):
            streams.rest(self)
        else:
            streams.forget(self)
            self._source.close()

    def caught_up(self) -> None:
        """Nobody came back: what arrived since is counted."""
        for arrived in self._source.drained():
            self._take(arrived)
        self._count()

    async def settled(self) -> None:
        """A server reports nothing about an answer that was cut off."""
        self._count()

    def guard(self, make: Callable[[], TextGuard]) -> None:
        if self.spec.logprobs or self.spec.token_ids:
            param = "logprobs" if self.spec.logprobs else "return_token_ids"
            raise InvalidRequest(
                f"`{param}` would show what the guardrails of this server hold back, so it is not allowed here.",
                param=param,
            )
        for choice in self.choices:
            choice.guard, choice.thought_guard, choice.call_guard = make(), make(), CallGuard(make)

    def cite(self, sources: Sources, *, attribute: bool) -> None:
        self.sources = sources
        for choice in self.choices:
            choice.citer = sources.citer(attribute=attribute)

    def cut(self, index: int) -> None:
        self.choices[index].finished, self.choices[index].outcome = True, CONTENT_FILTER
        self._ends = [end for end in self._ends if end.index != index]
        if self.complete:
            self._source.end()

    # --- the response cache

    def cache_facts(self) -> CacheFacts:
        spec, model = self.spec, self.model
        bodies = [{name: value for name, value in call.body.items() if name not in _DELIVERY} for call in spec.calls]
        if all(body.get("temperature") == 0 for body in bodies):
            bodies = [{**body, "seed": None} for body in bodies]
        form = (spec.logprobs, spec.include_stop, spec.token_ids, [(call.kind, call.choices) for call in spec.calls])
        return CacheFacts(
            repeatable=spec.repeatable,
            common=[model.name, model.fingerprint, spec.cache_salt, spec.stops, form],
            asked=[msgspec.json.encode(bodies, order="sorted")],
            question=spec.cache_question,
        )

    def record(self) -> None:
        self._record = [[] for _ in self.choices]

    @property
    def recorded(self) -> bytes | None:
        ends = ("stop", "length", "tool_calls")
        if self._record is None or any(choice.outcome not in ends for choice in self.choices):
            return None
        answer = RecordedAnswer(
            [record_choice(chunks) for chunks in self._record], self.prompt_tokens, self.completion_tokens
        )
        return msgspec.msgpack.encode(answer)

    def replay(self, recorded: bytes) -> None:
        answer = msgspec.msgpack.decode(recorded, type=RecordedAnswer)
        if len(answer.choices) != len(self.choices):
            raise msgspec.ValidationError("another number of choices")
        self._answer = answer

    @property
    def from_cache(self) -> bool:
        return self._answer is not None

    # --- what it was

    def texts(self, most: int) -> list[tuple[str, str]] | None:
        if self._texts is None:
            return None
        first = self.spec.calls[0].body
        prompt = msgspec.json.encode(first.get("messages", first.get("prompt"))).decode()[:most]
        return [(prompt, "".join(parts)[:most]) for parts in self._texts]

    def runs(self, purpose: str = "") -> list[EngineRun]:
        return [
            self._run(choice, purpose, self.prompt_tokens, self.cached_tokens, choice.completion_tokens)
            for choice in self.choices
        ]

    @property
    def done(self) -> bool:
        return self._over and self._error is None

    @property
    def prompt_tokens(self) -> int:
        if self._answer is not None:
            return self._answer.prompt_tokens
        usage = self._usage()
        return self.spec.prompt_tokens if usage is None else usage.prompt_tokens or self.spec.prompt_tokens

    @property
    def cached_tokens(self) -> int:
        if self._answer is not None:
            return self._answer.prompt_tokens
        details = [used.prompt_tokens_details for used in self._source.usage if used is not None]
        return sum(each.cached_tokens or 0 for each in details if each is not None)

    @property
    def completion_tokens(self) -> int:
        if self._answer is not None:
            return self._answer.completion_tokens
        usage = self._usage()
        # A server that says it wrote nothing, of an answer that has come, has not counted.
        if usage is not None and usage.completion_tokens:
            return usage.completion_tokens
        if self._counted is not None:
            return self._counted
        unread = 0
        if self._source.reader is self._as_reader:
            unread = sum(tokens_in(sent) for index, sent in self._source.unread() if not self._finished(index))
        return sum(choice.completion_tokens for choice in self.choices) + unread

    @property
    def most_completion_tokens(self) -> int:
        return self.spec.most_tokens if self._answer is None else self._answer.completion_tokens

    @property
    def reasoning_tokens(self) -> int:
        details = [used.completion_tokens_details for used in self._source.usage if used is not None]
        return sum(each.reasoning_tokens or 0 for each in details if each is not None)

    @property
    def prompt_token_ids(self) -> list[int] | None:
        """As the server tells them, if it does."""
        return self._source.prompt_token_ids

    def where(self) -> dict[str, str]:
        region = next((each.region for each in self.model.members if each.server.name == self.replica), "")
        return {"region": region} if region else {}

    # --- how it proceeds

    def _usage(self) -> ChunkUsage | None:
        """What the servers counted; None until all of them have told."""
        told = [used for used in self._source.usage if used is not None]
        if len(told) < len(self.spec.calls):
            return None
        if len(told) == 1:
            return told[0]
        return ChunkUsage(sum(used.prompt_tokens for used in told), sum(used.completion_tokens for used in told))

    def _finished(self, index: int) -> bool:
        return not 0 <= index < len(self.choices) or self.choices[index].finished

    def _take(self, arrived: Arrived) -> list[Piece]:
        pieces: list[Piece] = []
        call = self.spec.calls[arrived.call]
        for sent in arrived.chunk.choices:
            index = call.first + sent.index
            if not 0 <= sent.index < call.choices or self.choices[index].finished:
                continue
            choice = self.choices[index]
            tokens = tokens_in(sent)
            piece = self._kept(choice.read(sent))
            if tokens:
                self._observe_tokens(choice, tokens, arrived.at)
            if sent.delta.content:
                self._check_followed(sent.logprobs is None)
            if self._record is not None:
                self._record[index].append(sent)
            if piece.finish_reason is not None:
                self._ends.append(piece)
            elif piece.text or piece.calls or piece.reasoning or piece.tokens or piece.citations:
                pieces.append(piece)
        return pieces

    def _kept(self, piece: Piece) -> Piece:
        if self._texts is not None:
            self._texts[piece.index].append(piece.text)
        return piece

    def _check_followed(self, without_logprobs: bool) -> None:
        """At the first text of an answer, as thoughts and calls have none: a server that ignores `logprobs` has done
        so by now."""
        if self.spec.logprobs and without_logprobs and self.spec.missing is not None and not self._told:
            self._told = True
            self.spec.missing("logprobs")

    _told = False

    @property
    def _cut_here(self) -> bool:
        """Whether a guard or a stop string ended it here, so that the server need not go on."""
        return any(choice.cut_here for choice in self.choices)

    def _finish(self) -> list[Piece]:
        """All that will come has come."""
        self._over = True
        error = self._source.error
        if not self.complete:
            self._error = self._error or error or EngineLost("The server behind this model ended its answer early.")
        if self._error is not None:
            return []
        self._count()
        if self._submitted_at is not None:
            self._observe_end(time.monotonic(), self.prompt_tokens, self.completion_tokens)
            for choice in self.choices:
                self._count_outcome(choice)
        ends, self._ends = self._ends, []
        return ends

    def _count(self) -> None:
        """Count the tokens of an answer whose server has not told its usage, where the tokenizer is known. An answer
        is short; a long one is counted by its chunks."""
        usage = self._usage()
        told = usage is not None and usage.completion_tokens > 0
        if told or self.model.text is None or self._answer is not None:
            return
        texts = ["".join(choice.said) for choice in self.choices]
        if sum(map(len, texts)) <= LONGEST_COUNTED:
            encode = self.model.text.encode
            self._counted = sum(len(encode(text, special=False)) for text in texts if text)

    def _expire(self) -> None:
        """The server took longer than a request may."""
        if not self.completion_tokens:
            self._error = RequestTimeout("The request did not produce a token in the time allowed.")
        for choice in self.choices:
            if not choice.finished:
                choice.finished, choice.outcome = True, "timeout"
                end = Piece(choice.index, text=choice.end(), finish_reason="length", stop_reason=TIME_LIMIT)
                self._ends.append(self._kept(end))
        self._source.end()
