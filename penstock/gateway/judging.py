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
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from penstock.config.context import JudgeConfig
from penstock.engine.request import Request, SamplingParams
from penstock.gateway.exchange import Exchange
from penstock.gateway.producing import Generation
from penstock.gateway.schemas import ChoiceFormat
from penstock.protocol.errors import ApiError
from penstock.telemetry.context_metrics import ContextMetrics

if TYPE_CHECKING:
    from penstock.gateway.service import Service

log = logging.getLogger(__name__)

GRADES = ("1", "2", "3", "4", "5")
MOST_CHARACTERS = 6000
"""Of a question, an answer, or all sources: what a judge gets to read."""
CHARACTERS_PER_TOKEN = 2.4
"""Texts are cut to so many characters of the judge's window: more than it needs in almost any language."""
PRIORITY = 3
"""After everything that anybody waits for, batches included."""
_LIMIT_S = 60.0
_TASK = "You grade answers strictly and reply with one number."
_RELEVANCE = (
    "Question:\n{question}\n\nAnswer:\n{answer}\n\nHow well does the answer address the question? "
    "Reply with a number from 1 (not at all) to 5 (completely)."
)
_GROUNDEDNESS = (
    "Sources:\n{sources}\n\nAnswer:\n{answer}\n\nHow much of what the answer says is supported by the sources? "
    "Reply with a number from 1 (nothing) to 5 (everything)."
)
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
        """From 0 to 1. The judge can reply with nothing but a grade."""
        service = self._service
        model = service.registry.route(self._config.model or sample.model).model
        info = await model.backend.wait_ready(service.settings.engine_wait_s)
        most = min(MOST_CHARACTERS, int(info.max_model_len * CHARACTERS_PER_TOKEN / len(texts)))
        question = form.format(**{name: text[:most] for name, text in texts.items()})
        messages = [{"role": "system", "content": _TASK}, {"role": "user", "content": question}]
        tokens = await service.encode_chat(model, messages)
        grammar = await service.grammars.response_format(ChoiceFormat(list(GRADES)))
        params = SamplingParams(max_tokens=4, temperature=0.0, stop_token_ids=model.text.eos_token_ids, grammar=grammar)
        request = Request(
            f"judge:{next(_serial)}",
            tokens[: info.max_model_len - params.max_tokens],
            params,
            priority=PRIORITY,
            cache_salt=sample.cache_salt,
            timeout_s=_LIMIT_S,
            adapter=model.adapter,
        )
        said: list[int] = []
        async for delta in model.backend.generate(request):
            said += delta.tokens
        grade = model.text.decode(said).strip()
        if grade not in GRADES:
            raise ApiError(f"the judge said {grade[:16]!r}, which is no grade")
        return GRADES.index(grade) / (len(GRADES) - 1)


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
