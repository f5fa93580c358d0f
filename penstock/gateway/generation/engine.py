"""A generation that engines produce: submit requests, turn deltas into pieces of text, abort what is left.

Invariant: whatever happens (client gone, error, stop string, time limit, drain), `close` leaves no request of this
generation in the engine, and `next` never waits beyond the time limit. The tokens of a choice that ended are those the
client was told of; of one that was cut off, all that the engine had produced when it was told (after `settled`).
"""

from __future__ import annotations

import asyncio
import dataclasses
import time
from collections import deque
from collections.abc import Callable, Iterator

import msgspec

from penstock.backends.mailbox import Arrival, Mailbox
from penstock.engine.request import Delta
from penstock.gateway.accounting.admission import EngineDemand
from penstock.gateway.app.exchange import ClientDisconnected
from penstock.gateway.generation.base import Gate, Generation
from penstock.gateway.generation.call_guard import CallGuard
from penstock.gateway.generation.choice import CONTENT_FILTER, Choice, Piece, TextGuard
from penstock.gateway.generation.replay import AnswerRecord, replayed
from penstock.gateway.generation.resumption import claim, singly
from penstock.gateway.generation.sources import Sources
from penstock.gateway.generation.spec import CacheFacts, GenerationSpec
from penstock.metering.prices import Usage
from penstock.protocol.errors import (
    ApiError,
    EngineLost,
    InvalidRequest,
    Overloaded,
    RequestTimeout,
    ResumedElsewhere,
    ServerError,
)
from penstock.routing.place import NOWHERE
from penstock.routing.registry import ServedModel
from penstock.routing.replicas import ReplicaSet
from penstock.telemetry.metrics import Metrics
from penstock.telemetry.timeline import EngineRun

GRACE_S = 5.0
"""How much longer than the engine's own deadline the gateway waits before it gives up on the engine."""
LAST_REPORT_S = 10.0
"""How long an engine that is alive may take to report the last tokens of an aborted request."""


AT_ONCE = 16
"""Choices of one request that an engine has at a time; the next ones follow as these end, so that a request with many
prompts does not fill the engine."""
SINGLES_AT_ONCE = 256
"""Tokens of a resumed stream that are read before the event loop may run other work."""


_encode = msgspec.msgpack.Encoder().encode
_answer = msgspec.msgpack.Decoder(list[Delta])


class EngineGeneration(Generation):
    """Choices that are requests to an engine."""

    model: ServedModel
    choices: list[Choice]

    def __init__(self, spec: GenerationSpec, metrics: Metrics) -> None:
        model = spec.model
        super().__init__(spec.id, model, model.backend.name, metrics, spec.started_at)
        self.spec = spec
        self.length_limit = spec.length_limit
        self.text = model.text
        self._prompt_tokens = sum(len(prompt.tokens) for prompt in spec.prompts)
        self.mailbox = Mailbox()
        self._requests = spec.requests()
        self.choices = [
            Choice(
                index,
                model.text,
                stops=spec.stops,
                min_tokens=request.params.min_tokens,
                want_logprobs=spec.logprobs,
                want_ids=spec.token_ids,
                discard=spec.prompt_only,
                continuation=spec.continuation,
                continued=spec.continued,
                skip_special=spec.skip_special,
                include_stop=spec.include_stop,
                toolbox=spec.toolbox,
                splitter=None if spec.thoughts is None else spec.thoughts.splitter(),
                ends=None if spec.thoughts is None else spec.thoughts.ends,
                call_seed=spec.id if spec.resumption is not None else "",
            )
            for index, request in enumerate(self._requests)
        ]
        self._deadline: float | None = None
        self._submitted = 0
        """How many requests the engine has been given."""
        self._unfinished = len(self.choices)
        self._gate: Gate | None = None
        self._failure: Exception | None = None
        self._record: AnswerRecord | None = None
        self._replay: Iterator[tuple[int, Delta]] | None = None
        self._replayed_tokens = 0
        self._claimed: Delta | None = None
        """What was produced of a resumed stream before."""
        self._singles: deque[Arrival] = deque()
        self.resumable = spec.resumption is not None

    def guard(self, make: Callable[[], TextGuard]) -> None:
        if self.spec.logprobs or self.spec.token_ids:
            param = "logprobs" if self.spec.logprobs else "return_token_ids"
            raise InvalidRequest(
                f"`{param}` would show what the guardrails of this server hold back, so it is not allowed here.",
                param=param,
            )
        for choice in self.choices:
            choice.guard, choice.call_guard = make(), CallGuard(make)
            if self.spec.thoughts is not None:
                choice.thought_guard = make()

    def cut(self, index: int) -> None:
        choice = self.choices[index]
        ended, choice.finished, choice.outcome = choice.finished, True, CONTENT_FILTER
        if not ended:
            self._unfinished -= 1
            if not self.from_cache:
                self.model.backend.abort(self._requests[index].request_id)
                self._finished(choice, time.monotonic())
                self._submit_more(1)

    def texts(self, most: int) -> list[tuple[str, str]] | None:
        if self._texts is None:
            return None
        decode = self.model.text.decode
        return [
            (decode(request.prompt, skip_special=False)[:most], "".join(parts)[:most])
            for request, parts in zip(self._requests, self._texts, strict=True)
        ]

    def runs(self, purpose: str = "") -> list[EngineRun]:
        return [
            self._run(
                choice,
                purpose,
                len(self._requests[choice.index].prompt),
                self.mailbox.cached.get(choice.index, 0),
                self._tokens(choice),
                (choice.queue_s, choice.prefill_s, choice.decode_s),
            )
            for choice in self.choices
        ]

    def cite(self, sources: Sources, *, attribute: bool) -> None:
        self.sources = sources
        for choice in self.choices:
            choice.citer = sources.citer(attribute=attribute)

    def cache_facts(self) -> CacheFacts:
        spec, model = self.spec, self.model
        params = [params for prompt in spec.prompts for params in prompt.params]
        # A seed decides the answer only where the client chose it and noise is drawn.
        decisive = [each if spec.seeded and not each.greedy else dataclasses.replace(each, seed=0) for each in params]
        return CacheFacts(
            repeatable=spec.seeded or all(each.greedy for each in params),
            common=[
                model.name,
                model.fingerprint,
                model.sampling,
                spec.cache_salt,
                spec.stops,
                spec.form,
                any(each.watermark for each in params),
            ],
            asked=[*decisive, [prompt.tokens for prompt in spec.prompts]],
            question=spec.cache_question,
        )

    def record(self) -> None:
        self._record = AnswerRecord(len(self.choices))

    @property
    def recorded(self) -> bytes | None:
        whole = self._record is not None and all(choice.outcome in ("stop", "length") for choice in self.choices)
        return _encode(self._record.deltas) if self._record is not None and whole else None

    @property
    def from_cache(self) -> bool:
        return self._replay is not None

    def replay(self, recorded: bytes) -> None:
        deltas = _answer.decode(recorded)
        self._replay = replayed(deltas)
        self._replayed_tokens = sum(len(delta.tokens) for delta in deltas)
        for index, request in enumerate(self._requests):
            self.mailbox.cached[index] = len(request.prompt)

    def commit(self) -> None:
        self.mailbox.committed = True

    async def claim(self) -> None:
        """Take over the stream that the client resumes; `NotFound` if there is none."""
        resumption = self.spec.resumption
        if resumption is not None and resumption.id:
            request, produced = await claim(self.model, resumption, self._requests[0])
            self._requests = [request]
            self._claimed = produced
            self.before = Usage(self._prompt_tokens, produced.cached_tokens or 0, len(produced.tokens))

    def submit(self, gate: Gate | None = None) -> None:
        if self._replay is not None:
            return
        self._gate = gate
        if gate is not None:
            if self._failure is not None:
                gate.fail(self._failure)
            return
        self._submitted_at = time.monotonic()
        if self.spec.time_limit_s is not None:
            self._deadline = self._submitted_at + self.spec.time_limit_s + GRACE_S
        if self._claimed is not None:
            self.mailbox.put(0, self._claimed)
            if self._claimed.finish_reason is not None:
                self._began(self.replica)
                return
        try:
            self._submit_more(min(len(self._requests), AT_ONCE))
        except ApiError:
            self.close()
            raise

    def _submit_more(self, count: int) -> None:
        """Give the engine the next `count` requests."""
        first = self._submitted
        for index in range(first, min(first + count, len(self._requests))):
            request = self._requests[index]
            if first and self.spec.time_limit_s is not None and self._submitted_at is not None:
                left = self._submitted_at + self.spec.time_limit_s - time.monotonic()
                request = self._requests[index] = dataclasses.replace(request, timeout_s=max(left, 0.0))
            if self.spec.first_token_by is not None and not index:  # the others may begin later
                left = max(self.spec.first_token_by - time.monotonic(), 0.0)
                request = self._requests[index] = dataclasses.replace(request, patience_s=left)
            if self.pools is not None:
                request = self._requests[index] = dataclasses.replace(request, pools=tuple(self.pools()))
            self._submitted += 1
            replica = self.model.backend.submit(request, self.mailbox, index)
            if not index:
                self._began(replica or self.replica)

    @property
    def done(self) -> bool:
        return self._unfinished == 0

    async def next(self, within: float | None = None) -> list[Piece]:
        if self._replay is not None:
            return self._next_replayed(self._replay)
        if self._gate is not None:
            if not await self._gate.wait(within):
                return []
            self.submit()
        if self._deadline is not None:
            left = self._deadline - time.monotonic()
            within = left if within is None else min(within, left)
        arrivals = await (self._take_singly(within) if self.resumable else self.mailbox.take(within))
        if not arrivals and self._deadline is not None and time.monotonic() >= self._deadline:
            return self._expire()
        pieces: list[Piece] = []
        for arrival in arrivals:
            piece = self._receive(arrival.index, arrival.delta, arrival.at)
            if self.before is not None and self.choices[0].completion_tokens == self.before.completion:
                self.before = dataclasses.replace(self.before, reasoning=self.reasoning_tokens)
            if piece is not None:
                pieces.append(piece)
                if self._texts is not None:
                    self._texts[piece.index].append(piece.text)
        return pieces

    async def _take_singly(self, within: float | None) -> list[Arrival]:
        """What has arrived, token by token; much at once, as when a stream is resumed, is read in parts."""
        if self._singles:
            await asyncio.sleep(0)
        else:
            for arrival in await self.mailbox.take(within):
                self._singles.extend(singly(arrival))
        return [self._singles.popleft() for _ in range(min(len(self._singles), SINGLES_AT_ONCE))]

    def _next_replayed(self, parts: Iterator[tuple[int, Delta]]) -> list[Piece]:
        for index, delta in parts:
            choice = self.choices[index]
            piece = None if choice.finished else choice.feed(delta)
            if piece is not None:
                self._unfinished -= piece.finish_reason is not None
                if self._texts is not None:
                    self._texts[index].append(piece.text)
                return [piece]
        raise ServerError("A cached answer is incomplete.")

    def fail(self, error: Exception) -> None:
        self._failure = error
        self.mailbox.fail(error)
        self.close()
        if self._gate is not None:
            self._gate.fail(error)

    @property
    def left(self) -> bool:
        return self.resumable and isinstance(self.mailbox.error, ClientDisconnected | ResumedElsewhere)

    def close(self) -> None:
        left = self.left
        for request in self._requests:
            self.model.backend.abort(request.request_id, resumable=left)
        self.mailbox.close()

    async def settled(self) -> None:
        if isinstance(self.mailbox.error, Overloaded) and not self.mailbox.answered:
            # Refused, and free, whatever its other choices produce until they are stopped: an engine may be stuck.
            self.mailbox.close()
            return
        end = time.monotonic() + LAST_REPORT_S
        while any(map(self._awaited, self.choices)) and (left := end - time.monotonic()) > 0:
            await self.mailbox.stirred(left)
        self.mailbox.close()

    def _awaited(self, choice: Choice) -> bool:
        return not choice.finished and self.model.backend.holds(self._requests[choice.index].request_id)

    def demand(self) -> EngineDemand | None:
        if self._replay is not None:
            return None
        spec = self.spec
        return EngineDemand(
            id=self.id,
            model=self.model,
            priority=spec.priority,
            # Only so many run at once; what all of them took is known, and counted, when they have ended.
            prompts=[prompt.tokens for prompt in spec.prompts[:AT_ONCE]],
            sequences=min(len(self.choices), AT_ONCE),
            most_output=sum(request.params.max_tokens for request in self._requests[:AT_ONCE]),
            cache_key=f"{self.model.adapter}\0{spec.cache_salt}",
            placement=spec.placement,
        )

    def where(self) -> dict[str, str]:
        backend = self.model.backend
        place = backend.place_of(self.replica) if isinstance(backend, ReplicaSet) else NOWHERE
        found = {"pool": place.pool, "region": place.region, "why": self.spec.placement.why}
        return {name: text for name, text in found.items() if text}

    @property
    def prompt_tokens(self) -> int:
        return self._prompt_tokens

    @property
    def most_completion_tokens(self) -> int:
        if self._replay is not None:
            return self._replayed_tokens
        return sum(request.params.max_tokens for request in self._requests)

    @property
    def completion_tokens(self) -> int:
        return sum(map(self._tokens, self.choices))

    @property
    def reasoning_tokens(self) -> int:
        return sum(choice.reasoning_tokens for choice in self.choices)

    def _tokens(self, choice: Choice) -> int:
        """Of a choice that has not ended: what has arrived, whether it was read or not."""
        if choice.finished or choice.discard or self.from_cache:
            return choice.completion_tokens
        return self.mailbox.produced.get(choice.index, 0)

    @property
    def cached_tokens(self) -> int:
        """Per prompt, what its first choice found in the prefix cache; the others share with the first by design."""
        prompts = self.spec.prompts
        if len(prompts) == 1:
            return self.mailbox.cached.get(0, 0)
        total = first = 0
        for prompt in prompts:
            total += self.mailbox.cached.get(first, 0)
            first += len(prompt.params)
        return total

    def _receive(self, index: int, delta: Delta, at: float) -> Piece | None:
        choice = self.choices[index]
        if choice.finished:
            return None
        if delta.finish_reason == "abort":
            raise EngineLost("The engine gave up this request; try again.")
        if delta.finish_reason == "timeout" and not delta.tokens and not self.completion_tokens:
            raise RequestTimeout("The request did not produce a token in the time allowed.")
        if delta.tokens:
            self._observe_tokens(choice, len(delta.tokens), at)
        if delta.queue_s is not None:
            choice.queue_s = delta.queue_s
            self._observed.queue.observe(delta.queue_s)
        if delta.prefill_s is not None:
            choice.prefill_s = delta.prefill_s
            self._observed.prefill.observe(delta.prefill_s)
        if delta.decode_s is not None:
            choice.decode_s = delta.decode_s
        if self._record is not None:
            self._record.add(index, delta)
        piece = choice.feed(delta)
        if piece is not None and piece.finish_reason is not None:
            self._unfinished -= 1
            if delta.finish_reason is None:
                self.model.backend.abort(self._requests[index].request_id, resumable=self.resumable)
            self._finished(choice, at)
            self._submit_more(1)
        return piece

    def _expire(self) -> list[Piece]:
        """The engine did not keep its own deadline."""
        self.close()
        now = time.monotonic()
        pieces = (
            self._receive(choice.index, Delta("", finish_reason="timeout"), now)
            for choice in self.choices
            if not choice.finished
        )
        return [piece for piece in pieces if piece is not None]

    def _finished(self, choice: Choice, at: float) -> None:
        tokens = choice.completion_tokens
        self._observe_end(at, len(self._requests[choice.index].prompt), tokens)
        if choice.first_at is not None:
            decode_s = at - choice.first_at if choice.decode_s is None else choice.decode_s
            self._observed.decode.observe(decode_s)
            if choice.prefill_s is not None:
                self._observed.inference.observe(choice.prefill_s + decode_s)
            if tokens > 1:
                self._observed.per_token.observe(decode_s / (tokens - 1))
        self._count_outcome(choice)
        if not self._unfinished:
            self._observe_parameters()

    def _observe_parameters(self) -> None:
        """What was asked for, once for each prompt."""
        observed, first = self._observed, 0
        for prompt in self.spec.prompts:
            n = len(prompt.params)
            observed.n.observe(n)
            observed.max_tokens.observe(prompt.params[0].max_tokens)
            observed.computed_tokens.observe(max(len(prompt.tokens) - self.mailbox.cached.get(first, 0), 0))
            observed.most_generation_tokens.observe(
                max(choice.completion_tokens for choice in self.choices[first : first + n])
            )
            first += n
