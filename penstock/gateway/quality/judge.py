"""A sample of answers graded by a model, behind the clients' backs: do they answer the question, do the sources bear
them out?

Sampled answers wait in a bounded queue for one task, which asks the judge at the lowest priority, one at a time; what
does not fit the queue is not judged, and counted. Grades go to metrics only: no text is kept, logged or billed.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import random
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal

from penstock.config.context import JudgeConfig
from penstock.engine.request import Request, SamplingParams
from penstock.gateway.app.exchange import Exchange
from penstock.gateway.generation.base import Generation
from penstock.gateway.generation.schemas import ChoiceFormat
from penstock.protocol.errors import ApiError, ServerError
from penstock.routing.registry import ServedModel
from penstock.telemetry.context_metrics import ContextMetrics

if TYPE_CHECKING:
    from penstock.gateway.process.service import Service

log = logging.getLogger(__name__)

YES, NO = "yes", "no"
SAMPLES = 4
"""How often a question is put to the judge, at temperature 1: the mean of many grades is then the probability that it
says yes, which tells more of a small model than its likeliest word."""
MOST_CHARACTERS = 6000
"""Of a question, an answer, or all sources: what a judge gets to read."""
CHARACTERS_PER_TOKEN = 2.4
"""Texts are cut to so many characters of the judge's window: more than it needs in almost any language."""
PRIORITY = 3
"""After everything that anybody waits for, batches included."""
_LIMIT_S = 60.0
_TASK = "You check answers."
_RELEVANCE = "Question: {question}\nAnswer: {answer}\n\nDoes the answer address the question? Reply yes or no."
_GROUNDEDNESS = "Sources: {sources}\n\nAnswer: {answer}\n\nDo the sources support the answer? Reply yes or no."
_serial = itertools.count()


@dataclass(frozen=True, slots=True)
class Sample:
    """An answer to be judged."""

    question: str
    answer: str
    sources: tuple[str, ...]
    model: str
    route: str
    cache_salt: str


class Judge:
    """One per gateway process that judges."""

    def __init__(self, service: Service, config: JudgeConfig, *, draw: Callable[[], float] = random.random) -> None:
        self._service = service
        self._config = config
        self._metrics: ContextMetrics = service.metrics.context
        self._draw = draw
        self._queue: asyncio.Queue[Sample] = asyncio.Queue(config.queue)
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        self._task = asyncio.create_task(self._work(), name="judge of answers")

    async def close(self) -> None:
        if self._task is not None:
            self._task.cancel()
            with suppress(asyncio.CancelledError):
                await self._task

    def choose(self, generation: Generation, messages: Sequence[Mapping[str, Any]]) -> None:
        """Perhaps mark an answer that is about to be generated."""
        if self._draw() >= self._config.rate:
            return
        asked = next((message["content"] for message in reversed(messages) if message["role"] == "user"), "")
        if asked:
            generation.question = asked
            generation.keep_text()

    def add(self, exchange: Exchange, generation: Generation) -> None:
        """Take a marked answer that is complete; never waits."""
        texts = generation.texts(MOST_CHARACTERS)
        if generation.question is None or not texts or not texts[0][1].strip():
            return
        route = next((value.decode() for name, value in exchange.extra_headers if name == b"x-penstock-route"), "")
        sample = Sample(
            generation.question[:MOST_CHARACTERS],
            texts[0][1],
            _sources(generation, texts[0][1]),
            generation.model.name,
            route,
            self._service.cache_salt(exchange.caller),
        )
        try:
            self._queue.put_nowait(sample)
        except asyncio.QueueFull:
            self._metrics.judged(sample.model, sample.route, "dropped")

    async def _work(self) -> None:
        while True:
            sample = await self._queue.get()
            outcome: Literal["judged", "failed"] = "failed"
            try:
                await self._judge(sample)
                outcome = "judged"
            except ApiError as error:
                log.info("an answer could not be judged: %s", error.message)
            except Exception:
                log.exception("an answer could not be judged")
            self._metrics.judged(sample.model, sample.route, outcome)

    async def _judge(self, sample: Sample) -> None:
        grade = await self._grade(sample, _RELEVANCE, question=sample.question, answer=sample.answer)
        self._metrics.relevance(sample.model, sample.route, grade)
        if sample.sources:
            sources = "\n\n".join(sample.sources)
            grade = await self._grade(sample, _GROUNDEDNESS, sources=sources, answer=sample.answer)
            self._metrics.groundedness(sample.model, sample.route, grade)

    async def _grade(self, sample: Sample, form: str, **texts: str) -> float:
        """How often the judge says yes, from 0 to 1; it can say nothing but yes or no."""
        service = self._service
        model = service.registry.route(self._config.model or sample.model).model
        info = await model.backend.wait_ready(service.settings.engine_wait_s)
        most = min(MOST_CHARACTERS, int(info.max_model_len * CHARACTERS_PER_TOKEN / len(texts)))
        question = form.format(**{name: text[:most] for name, text in texts.items()})
        messages = [{"role": "system", "content": _TASK}, {"role": "user", "content": question}]
        tokens = await service.encode_chat(model, messages)
        grammar = await service.grammars.response_format(ChoiceFormat([YES, NO]))
        params = SamplingParams(max_tokens=4, stop_token_ids=model.text.eos_token_ids, grammar=grammar)
        requests = [
            Request(
                f"judge:{next(_serial)}",
                tokens[: info.max_model_len - params.max_tokens],
                replace(params, seed=random.getrandbits(63)),
                priority=PRIORITY,
                cache_salt=sample.cache_salt,
                timeout_s=_LIMIT_S,
                adapter=model.adapter,
            )
            for _ in range(SAMPLES)
        ]
        said = await asyncio.gather(*(_word(model, request) for request in requests))
        return said.count(YES) / SAMPLES


async def _word(model: ServedModel, request: Request) -> str:
    said: list[int] = []
    async for delta in model.backend.generate(request):
        said += delta.tokens
    word = model.text.decode(said).strip()
    if word not in (YES, NO):
        raise ServerError(f"The judge said {word[:16]!r}, which is neither yes nor no.")
    return word


def _sources(generation: Generation, answer: str) -> tuple[str, ...]:
    """What the answer cites; all it was given to draw from when it cites nothing."""
    if generation.retrieved is None:
        return ()
    given = {f"[{source.number}]": source.text for source in generation.retrieved.context.sources}
    cited = {number: text for number, text in given.items() if number in answer}
    return tuple(f"{number} {text}" for number, text in (cited or given).items())


def judge_answer(service: Service, exchange: Exchange, generation: Generation) -> None:
    """Hand a complete answer to the judge, if it was chosen."""
    if service.judge is not None and generation.question is not None and generation.done:
        service.judge.add(exchange, generation)
