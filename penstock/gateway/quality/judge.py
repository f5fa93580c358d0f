"""A sample of answers graded by a model after the clients have got them: do they address the question, and do the
sources support them?

Sampled answers wait in a bounded queue for one task, which asks the judge at the lowest priority, one at a time; what
does not fit the queue is counted and not graded. Grades go to metrics and to a request log for analysis: no text is
kept, logged or billed.
"""

from __future__ import annotations

import asyncio
import logging
import random
import uuid
from collections.abc import Callable, Mapping, Sequence
from contextlib import aclosing, suppress
from dataclasses import dataclass, replace
from time import monotonic, time
from typing import Any, Literal

from penstock.config.context import JudgeConfig
from penstock.engine.request import Request, SamplingParams
from penstock.gateway.accounting.attribution import route_name
from penstock.gateway.app.data_rules import withheld
from penstock.gateway.app.exchange import Exchange
from penstock.gateway.generation.attempt import Attempt
from penstock.gateway.generation.base import Generation
from penstock.gateway.generation.estimates import CHARACTERS_PER_TOKEN
from penstock.gateway.generation.permissions import Permissions
from penstock.gateway.generation.remote_request import internal_call
from penstock.gateway.generation.response_format import GrammarCache
from penstock.gateway.generation.schemas import ChoiceFormat
from penstock.gateway.generation.settings import GenerationSettings
from penstock.gateway.generation.spec import internal_spec
from penstock.gateway.generation.tokenization import Tokenization
from penstock.identity.labels import NO_DEMAND, Demand
from penstock.metering.log_entries import GradeEntry
from penstock.protocol.errors import ApiError, ServerError
from penstock.routing.registry import ModelRegistry, ServedModel
from penstock.routing.remotes import RemoteModel
from penstock.telemetry.context_metrics import ContextMetrics

log = logging.getLogger(__name__)

YES, NO = "yes", "no"
SAMPLES = 4
"""How often the judge is asked a question, at temperature 1: the mean of many grades is then the probability that it
says yes, which says more about a small model's opinion than its likeliest word."""
MOST_CHARACTERS = 6000
"""Of a question, an answer, or all sources: what the judge gets to read."""
WINDOW_SHARE = 0.6
"""Share of the judge's window that texts are estimated to fill; the rest is a margin for other languages."""
REMOTE_WINDOW = 8192
"""Of a remote judge, where the configuration names none."""
REMOTE_TOKENS = 8
"""What a remote judge may say: its tokens are its own, and a word may be several."""
PRIORITY = 3
"""After everything that a client waits for, batches included."""
_LIMIT_S = 60.0
_TASK = "You check answers."
_RELEVANCE = "Question: {question}\nAnswer: {answer}\n\nDoes the answer address the question? Reply yes or no."
_GROUNDEDNESS = "Sources: {sources}\n\nAnswer: {answer}\n\nDo the sources support the answer? Reply yes or no."


@dataclass(frozen=True, slots=True)
class SampledAnswer:
    """An answer to be graded."""

    question: str
    answer: str
    sources: tuple[str, ...]
    model: str
    route: str
    cache_salt: str
    tenant: str
    request_id: str
    tier: str = ""
    demand: Demand = NO_DEMAND
    arm: str = ""
    """The experiment and arm that it belongs to."""


class NoJudge:
    """A gateway that grades no answers."""

    def sample(self, attempt: Attempt, generation: Generation, messages: Sequence[Mapping[str, Any]]) -> None:
        return

    def submit(self, attempt: Attempt, generation: Generation) -> None:
        return


class Judge:
    """Grades answers of one gateway process."""

    def __init__(
        self,
        config: JudgeConfig,
        settings: GenerationSettings,
        registry: ModelRegistry,
        permissions: Permissions,
        tokenization: Tokenization,
        grammars: GrammarCache,
        metrics: ContextMetrics,
        *,
        draw: Callable[[], float] = random.random,
        announce: Callable[[GradeEntry], None] | None = None,
    ) -> None:
        """`announce` is told of every grade, for the request log."""
        self._announce = announce
        self.on_arm: Callable[[str, float], None] | None = None
        """Told of every grade of an answer of an experiment: its arm, and how relevant the answer is."""
        self._config = config
        self._settings = settings
        self._registry = registry
        self._permissions = permissions
        self._tokenization = tokenization
        self._grammars = grammars
        self._metrics = metrics
        self._draw = draw
        self._queue: asyncio.Queue[SampledAnswer] = asyncio.Queue(config.queue)
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        self._task = asyncio.create_task(self._work(), name="judge of answers")

    async def close(self) -> None:
        if self._task is not None:
            self._task.cancel()
            with suppress(asyncio.CancelledError):
                await self._task

    def sample(self, attempt: Attempt, generation: Generation, messages: Sequence[Mapping[str, Any]]) -> None:
        """Perhaps mark an answer that is about to be generated."""
        rate = self._config.rate if attempt.trial is None else max(self._config.rate, attempt.trial.graded)
        if self._draw() >= rate:
            return
        asked = next((message["content"] for message in reversed(messages) if message["role"] == "user"), "")
        if asked:
            generation.question = asked
            generation.keep_text()

    def submit(self, attempt: Attempt, generation: Generation) -> None:
        """Take an answer, if it was marked and is complete. Never waits."""
        if generation.question is None or not generation.done:
            return
        judge = self._config.model
        if judge and not self._permissions.allows(attempt.exchange, judge, for_all=self._config.for_all_callers):
            return
        texts = generation.texts(MOST_CHARACTERS)
        if not texts or not texts[0][1].strip() or not self._may_read(attempt.exchange, generation):
            return
        sample = SampledAnswer(
            generation.question[:MOST_CHARACTERS],
            texts[0][1],
            _sources(generation, texts[0][1]),
            generation.model.name,
            route_name(attempt.route),
            self._settings.cache_salt(attempt.exchange.caller),
            attempt.exchange.caller.tenant,
            attempt.exchange.request_id,
            attempt.exchange.caller.tier,
            attempt.exchange.demand,
            "" if attempt.trial is None else attempt.trial.label,
        )
        try:
            self._queue.put_nowait(sample)
        except asyncio.QueueFull:
            self._metrics.judged(sample.model, sample.route, "dropped")

    def _may_read(self, exchange: Exchange, generation: Generation) -> bool:
        """Whether the judge may see the request and its answer."""
        if not exchange.demand:
            return True
        name = self._config.model or generation.model.name
        found = self._registry.find(name)
        if found is None:
            return False
        judge = found if isinstance(found, RemoteModel) else found.model
        return not withheld(exchange, "judge", name, judge.unmet(exchange.demand))

    async def _work(self) -> None:
        while True:
            sample = await self._queue.get()
            outcome: Literal["judged", "failed"] = "failed"
            try:
                await self._judge(sample)
                outcome = "judged"
            except ApiError as error:
                log.info("an answer could not be graded: %s", error.message)
            except Exception:
                log.exception("an answer could not be graded")
            self._metrics.judged(sample.model, sample.route, outcome)

    async def _judge(self, sample: SampledAnswer) -> None:
        relevance = await self._grade(sample, _RELEVANCE, question=sample.question, answer=sample.answer)
        self._metrics.relevance(sample.model, sample.route, relevance)
        if sample.arm and self.on_arm is not None:
            self.on_arm(sample.arm, relevance)
        groundedness = None
        if sample.sources:
            sources = "\n\n".join(sample.sources)
            groundedness = await self._grade(sample, _GROUNDEDNESS, sources=sources, answer=sample.answer)
            self._metrics.groundedness(sample.model, sample.route, groundedness)
        if self._announce is not None:
            id, now = uuid.uuid4().hex, time()
            self._announce(
                GradeEntry(
                    id, sample.request_id, sample.tenant, sample.model, sample.route, relevance, groundedness, now
                )
            )

    async def _grade(self, sample: SampledAnswer, form: str, **texts: str) -> float:
        """How often the judge says yes, from 0 to 1; it can say nothing but yes or no."""
        remote = self._registry.remote(self._config.model or sample.model)
        if remote is not None:
            return await self._grade_remotely(remote, sample, form, texts)
        await self._registry.prepare(self._config.model or sample.model)
        model = self._registry.route(self._config.model or sample.model).model
        info = await model.backend.wait_ready(self._settings.engine_wait_s)
        most = min(MOST_CHARACTERS, int(info.max_model_len * WINDOW_SHARE * CHARACTERS_PER_TOKEN / len(texts)))
        question = form.format(**{name: text[:most] for name, text in texts.items()})
        messages = [{"role": "system", "content": _TASK}, {"role": "user", "content": question}]
        tokens = await self._tokenization.encode_chat(
            model, messages, tenant=sample.cache_salt, most=info.max_model_len
        )
        grammar = await self._grammars.response_format(ChoiceFormat([YES, NO]))
        params = SamplingParams(max_tokens=4, stop_token_ids=model.text.eos_token_ids, grammar=grammar)
        spec = internal_spec(
            "judge",
            model,
            tokens[: info.max_model_len - params.max_tokens],
            [replace(params, seed=random.getrandbits(63)) for _ in range(SAMPLES)],
            started_at=monotonic(),
            priority=PRIORITY,
            cache_salt=sample.cache_salt,
            time_limit_s=_LIMIT_S,
            caller=(sample.tenant, sample.tier),
            demand=sample.demand,
            counted=False,
        )
        said = await asyncio.gather(*(_word(model, request) for request in spec.requests()))
        return said.count(YES) / SAMPLES

    async def _grade_remotely(
        self, model: RemoteModel, sample: SampledAnswer, form: str, texts: Mapping[str, str]
    ) -> float:
        """The same by a model that another server runs. Nothing restricts it to the two words where the server knows no
        `choice`; an answer that begins with neither is left out, and no grade is given when none is left."""
        window = model.context_window or REMOTE_WINDOW
        most = min(MOST_CHARACTERS, int(window * WINDOW_SHARE * CHARACTERS_PER_TOKEN / len(texts)))
        question = form.format(**{name: text[:most] for name, text in texts.items()})
        spec = internal_call(
            "judge",
            model,
            [{"role": "system", "content": _TASK}, {"role": "user", "content": question}],
            {"temperature": 1},
            REMOTE_TOKENS,
            request_id=sample.request_id,
            started_at=monotonic(),
            prompt_tokens=0,
            time_limit_s=_LIMIT_S,
            demand=sample.demand,
            n=SAMPLES,
        )
        first = model.choose(spec.demand)
        said = [""] * SAMPLES
        for call in spec.calls:
            async with aclosing(model.answer(call.body, sample.request_id, first, spec.demand)) as chunks:
                async for chunk in chunks:
                    for choice in chunk.choices:
                        if 0 <= choice.index < call.choices:
                            said[call.first + choice.index] += choice.delta.content or ""
        words = [text.strip(" \n\t.*\"'").lower() for text in said]
        clear = [word for word in words if word.startswith((YES, NO))]
        if not clear:
            raise ServerError(f"The judge said {said[0][:16]!r}, which is neither yes nor no.")
        return sum(word.startswith(YES) for word in clear) / len(clear)


async def _word(model: ServedModel, request: Request) -> str:
    said: list[int] = []
    async for delta in model.backend.generate(request):
        said += delta.tokens
    word = model.text.decode(said).strip()
    if word not in (YES, NO):
        raise ServerError(f"The judge said {word[:16]!r}, which is neither yes nor no.")
    return word


def _sources(generation: Generation, answer: str) -> tuple[str, ...]:
    """The sources that the answer cites; all that it was given when it cites none."""
    if generation.sources is None:
        return ()
    given = {f"[{number}]": text for number, text in generation.sources.texts().items()}
    cited = {number: text for number, text in given.items() if number in answer}
    return tuple(f"{number} {text}" for number, text in (cited or given).items())
