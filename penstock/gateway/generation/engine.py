"""A generation that engines produce: submit requests, turn deltas into pieces of text, abort what is left.

Invariant: whatever happens (client gone, error, stop string, time limit, drain), `close` leaves no request of
ours in the engine, and `next` never waits beyond the time limit. The tokens of a choice that ended are those the client
was told of; of one that was cut off, all that the engine had produced when it heard of it (after `quiet`).
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from penstock.backends.mailbox import Mailbox
from penstock.engine.request import Delta, Request, SamplingParams
from penstock.gateway.generation.base import Gate, Generation
from penstock.gateway.generation.choice import CONTENT_FILTER, Choice, Piece
from penstock.gateway.moderation.guardrails import OutputGuard
from penstock.gateway.rag.retrieval import Retrieved
from penstock.gateway.response_cache.replay import Memory, Question, replayed
from penstock.metering.engine_counts import engine_id
from penstock.protocol.errors import ApiError, EngineLost, InvalidRequest, RequestTimeout, ServerError
from penstock.routing.registry import ServedModel
from penstock.telemetry.context import sampled_trace
from penstock.telemetry.metrics import Metrics, RequestMetrics
from penstock.telemetry.timeline import Run
from penstock.tools.toolbox import Toolbox

GRACE_S = 5.0
"""How much longer than the engine's own deadline the gateway waits before it stops believing in it."""
LAST_WORDS_S = 10.0
"""How long an engine that is alive may take to say how far an aborted request was."""


@dataclass(slots=True)
class Prompt:
    """One prompt and the parameters of its choices, one entry per choice."""

    tokens: list[int]
    params: list[SamplingParams]


class EngineGeneration(Generation):
    """Choices that are requests to an engine."""

    model: ServedModel
    choices: list[Choice]

    def __init__(
        self,
        model: ServedModel,
        prompts: Sequence[Prompt],
        *,
        id: str | None = None,
        metrics: Metrics,
        started_at: float,
        stops: list[str],
        priority: int = 0,
        cache_salt: str = "",
        affinity: str = "",
        patient: bool = True,
        speculation: bool = True,
        time_limit_s: float | None = None,
        want_logprobs: bool = False,
        discard: bool = False,
        continuation: bool = False,
        toolbox: Toolbox | None = None,
        seeded: bool = False,
        comparable: Question | None = None,
    ) -> None:
        """`id`: names it in the ledger, in the engine and to the client; never used before. `seeded`: the client chose
        the seed, so the answer is the same every time. `comparable`: what the semantic cache may compare."""
        self.id = id or uuid.uuid4().hex
        self.model = model
        self.text = model.text
        self.prompts = prompts
        self._prompt_tokens = sum(len(prompt.tokens) for prompt in prompts)
        self.mailbox = Mailbox()
        self.choices = []
        self._requests: list[Request] = []
        self._metrics = metrics
        self.replica = model.backend.name
        self._observed: RequestMetrics
        """Of the replica: there from the moment it has the request, which is before its first delta."""
        self._started_at = started_at
        self._submitted_at: float | None = None
        self._trace = sampled_trace()
        self._texts: list[list[str]] | None = None
        self._time_limit_s = time_limit_s
        self._deadline: float | None = None
        self._unfinished = sum(len(prompt.params) for prompt in prompts)
        self._gate: Gate | None = None
        self._failure: Exception | None = None
        self.on_submit: Callable[[str], None] | None = None
        """Told which replica has it, if anybody wants to know."""
        self.priority = priority
        self.stops = stops
        self.seeded = seeded
        self.comparable = comparable
        self.form = (want_logprobs, discard, continuation, toolbox is not None)
        """What besides parameters and prompt decides how tokens become an answer."""
        self._memory: Memory | None = None
        self._recalled: Iterator[tuple[int, Delta]] | None = None
        self._recalled_tokens = 0
        for place, prompt in enumerate(prompts):
            for number, params in enumerate(prompt.params):
                request = Request(
                    engine_id(self.id, place, number, counted=not discard),
                    prompt.tokens,
                    params,
                    priority=priority,
                    cache_salt=cache_salt,
                    affinity=affinity,
                    patient=patient,
                    timeout_s=time_limit_s,
                    speculation=speculation,
                    adapter=model.adapter,
                )
                self._requests.append(request)
                self.choices.append(
                    Choice(
                        len(self.choices),
                        model.text,
                        stops=stops,
                        min_tokens=params.min_tokens,
                        want_logprobs=want_logprobs,
                        discard=discard,
                        continuation=continuation,
                        toolbox=toolbox,
                    )
                )

    def guard(self, make: Callable[[], OutputGuard]) -> None:
        if self.choices[0].want_logprobs:
            raise InvalidRequest(
                "`logprobs` would show what the guardrails of this server keep back, so it cannot be asked for here.",
                param="logprobs",
            )
        for choice in self.choices:
            choice.guard = make()

    def cut(self, index: int) -> None:
        choice = self.choices[index]
        ended, choice.finished, choice.outcome = choice.finished, True, CONTENT_FILTER
        if not ended:
            self._unfinished -= 1
            if not self.recalled:
                self.model.backend.abort(self._requests[index].request_id)
                self._finished(choice, time.monotonic())

    def keep_text(self) -> None:
        self._texts = [[] for _ in self.choices]

    def texts(self, most: int) -> list[tuple[str, str]] | None:
        if self._texts is None:
            return None
        prompts = [prompt.tokens for prompt in self.prompts for _ in prompt.params]
        decode = self.model.text.decode
        return [
            (decode(tokens, skip_special=False)[:most], "".join(parts)[:most])
            for tokens, parts in zip(prompts, self._texts, strict=True)
        ]

    def runs(self, purpose: str = "") -> list[Run]:
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

    def cite(self, retrieved: Retrieved, *, attribute: bool) -> None:
        """Resolve the citations of every choice. `attribute`: see `Retrieved.citer`."""
        self.retrieved = retrieved
        for choice in self.choices:
            choice.citer = retrieved.citer(attribute=attribute)

    def remember(self) -> None:
        """Keep what the engine says; for `memory`."""
        self._memory = Memory(len(self.choices))

    @property
    def memory(self) -> list[Delta] | None:
        """All that was said, a delta per choice, if it was kept and everything ended by itself."""
        whole = self._memory is not None and all(choice.outcome in ("stop", "length") for choice in self.choices)
        return self._memory.deltas if self._memory is not None and whole else None

    @property
    def recalled(self) -> bool:
        """Whether the answer comes from a cache."""
        return self._recalled is not None

    def recall(self, deltas: Sequence[Delta]) -> None:
        """Say this instead of asking the engine."""
        self._recalled = replayed(deltas)
        self._recalled_tokens = sum(len(delta.tokens) for delta in deltas)
        for index, request in enumerate(self._requests):
            self.mailbox.cached[index] = len(request.prompt)

    def submit(self, gate: Gate | None = None) -> None:
        if self._recalled is not None:
            return
        self._gate = gate
        if gate is not None:
            if self._failure is not None:
                gate.fail(self._failure)
            return
        self._submitted_at = time.monotonic()
        if self._time_limit_s is not None:
            self._deadline = self._submitted_at + self._time_limit_s + GRACE_S
        try:
            for index, request in enumerate(self._requests):
                replica = self.model.backend.submit(request, self.mailbox, index)
                if not index:
                    self.replica = replica or self.replica
                    self._observed = self._metrics.request(self.model.base_name, self.replica)
                    if self.on_submit is not None:
                        self.on_submit(self.replica)
        except ApiError:
            self.close()
            raise

    @property
    def done(self) -> bool:
        return self._unfinished == 0

    async def next(self, within: float | None = None) -> list[Piece]:
        if self._recalled is not None:
            return self._next_recalled(self._recalled)
        if self._gate is not None:
            if not await self._gate.wait(within):
                return []
            self.submit()
        if self._deadline is not None:
            left = self._deadline - time.monotonic()
            within = left if within is None else min(within, left)
        arrivals = await self.mailbox.take(within)
        if not arrivals and self._deadline is not None and time.monotonic() >= self._deadline:
            return self._expire()
        pieces: list[Piece] = []
        for arrival in arrivals:
            piece = self._receive(arrival.index, arrival.delta, arrival.at)
            if piece is not None:
                pieces.append(piece)
                if self._texts is not None:
                    self._texts[piece.index].append(piece.text)
        return pieces

    def _next_recalled(self, parts: Iterator[tuple[int, Delta]]) -> list[Piece]:
        for index, delta in parts:
            choice = self.choices[index]
            piece = None if choice.finished else choice.feed(delta)
            if piece is not None:
                self._unfinished -= piece.finish_reason is not None
                if self._texts is not None:
                    self._texts[index].append(piece.text)
                return [piece]
        raise ServerError("A kept answer ended before its end.")

    def fail(self, error: Exception) -> None:
        self.close()
        self._failure = error
        self.mailbox.fail(error)
        if self._gate is not None:
            self._gate.fail(error)

    def close(self) -> None:
        for request in self._requests:
            self.model.backend.abort(request.request_id)
        self.mailbox.close()

    async def quiet(self) -> None:
        end = time.monotonic() + LAST_WORDS_S
        while any(map(self._awaited, self.choices)) and (left := end - time.monotonic()) > 0:
            await self.mailbox.stirred(left)
        self.mailbox.close()

    def _awaited(self, choice: Choice) -> bool:
        return not choice.finished and self.model.backend.holds(self._requests[choice.index].request_id)

    @property
    def cache_key(self) -> str:
        """Prompts share cached prefixes only under the same one."""
        first = self._requests[0]
        return f"{first.adapter}\0{first.cache_salt}"

    @property
    def prompt_tokens(self) -> int:
        return self._prompt_tokens

    @property
    def most_completion_tokens(self) -> int:
        if self._recalled is not None:
            return self._recalled_tokens
        return sum(request.params.max_tokens for request in self._requests)

    @property
    def completion_tokens(self) -> int:
        return sum(map(self._tokens, self.choices))

    def _tokens(self, choice: Choice) -> int:
        """Of a choice that has not ended: what has arrived, whether it was read or not."""
        if choice.finished or choice.discard or self.recalled:
            return choice.completion_tokens
        return self.mailbox.produced.get(choice.index, 0)

    @property
    def cached_tokens(self) -> int:
        """Per prompt, what its first choice found in the cache; the others share with the first by design."""
        total = first = 0
        for prompt in self.prompts:
            total += self.mailbox.cached.get(first, 0)
            first += len(prompt.params)
        return total

    def _receive(self, index: int, delta: Delta, at: float) -> Piece | None:
        choice = self.choices[index]
        if choice.finished:
            return None
        if delta.finish_reason == "abort":
            raise EngineLost("The engine gave up this request; try again.")
        if delta.finish_reason == "timeout" and not delta.tokens and not choice.completion_tokens:
            raise RequestTimeout("The request did not produce a token in the time allowed.")
        self._observe(choice, delta, at)
        if self._memory is not None:
            self._memory.add(index, delta)
        piece = choice.feed(delta)
        if piece is not None and piece.finish_reason is not None:
            self._unfinished -= 1
            if delta.finish_reason is None:
                self.model.backend.abort(self._requests[index].request_id)
            self._finished(choice, at)
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

    def _observe(self, choice: Choice, delta: Delta, at: float) -> None:
        count = len(delta.tokens)
        if count:
            if choice.last_at is None:
                if self.first_token_at is None:
                    self.first_token_at = at
                self._observed.ttft.observe(at - self._started_at, trace=self._trace)
                choice.first_at = at
            else:
                self._observed.itl.observe((at - choice.last_at) / count, count)
            choice.last_at = at
        if delta.queue_s is not None:
            choice.queue_s = delta.queue_s
            self._observed.queue.observe(delta.queue_s)
        if delta.prefill_s is not None:
            choice.prefill_s = delta.prefill_s
            self._observed.prefill.observe(delta.prefill_s)
        if delta.decode_s is not None:
            choice.decode_s = delta.decode_s

    def _finished(self, choice: Choice, at: float) -> None:
        observed, tokens = self._observed, choice.completion_tokens
        observed.e2e.observe(at - self._started_at, trace=self._trace)
        observed.generation_tokens.observe(tokens)
        observed.prompt_tokens.observe(len(self._requests[choice.index].prompt))
        if choice.first_at is not None:
            decode_s = at - choice.first_at if choice.decode_s is None else choice.decode_s
            observed.decode.observe(decode_s)
            if tokens > 1:
                observed.per_token.observe(decode_s / (tokens - 1))
        self._metrics.finished(self.model.base_name, self.replica, choice.outcome or "unknown")
