"""From a request to the generation of a remote model: the same steps as for an engine, on messages and text.

What depends on tokens (room in the window, the length of a prompt, ids as a prompt) uses the tokenizer that is
configured for the remote, or an estimate. Invariant: a request that a model of this gateway would answer is answered,
unless the server's API has nothing for it; then it is a 400 that says so.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from penstock.gateway.accounting.quotas import Quotas
from penstock.gateway.accounting.targets import check_targets
from penstock.gateway.generation.attempt import Attempt
from penstock.gateway.generation.chat_input import ChatInput, room_for_sources
from penstock.gateway.generation.cost_limit import within_cost
from penstock.gateway.generation.prompt import MessagePrompt
from penstock.gateway.generation.prompt_options import prompt_options
from penstock.gateway.generation.remote import RemoteGeneration, RemoteSpec
from penstock.gateway.generation.remote_request import (
    COMPLETION_OPTIONS,
    calls_of,
    chat_body,
    fitted,
    passed_on,
)
from penstock.gateway.generation.remote_streams import RemoteStreams
from penstock.gateway.generation.request_decoder import ignore_advice
from penstock.gateway.generation.sampling import (
    TokenLimit,
    check_foreign_tokens,
    check_stream_options,
    check_token_ids,
    stop_strings,
)
from penstock.gateway.generation.schemas import ChatRequest, CompletionRequest, Sampling, TextFormat
from penstock.gateway.generation.settings import GenerationSettings
from penstock.gateway.generation.sources import PendingSources, SourceSearch, source_check
from penstock.gateway.generation.stages import AnswerCache, AnswerGrader, ContentFilter
from penstock.gateway.generation.tokenization import Tokenization
from penstock.gateway.generation.tokenized_model import remote_text
from penstock.gateway.generation.turn import TurnInput
from penstock.gateway.generation.watermarks import Watermarks
from penstock.protocol.errors import ContextLengthExceeded, ContextQuotaExceeded, InvalidRequest
from penstock.routing.remotes import RemoteModel
from penstock.telemetry.metrics import Metrics

WINDOW = 8192
"""The assumed window of a remote model, where neither the configuration nor its tokenizer names one."""
UNLIMITED = 4096
"""Completion tokens that are reserved for an answer without a limit."""


@dataclass(frozen=True, slots=True)
class Room:
    """How long a prompt is and how long its answer may be."""

    prompt: int
    answer: int | None
    """None: the server decides."""
    limit: str = ""
    """The limit of this gateway that decided."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RemoteGenerations:
    """Makes generations of remote models."""

    settings: GenerationSettings
    tokenization: Tokenization
    quotas: Quotas
    watermarks: Watermarks
    metrics: Metrics
    content_filter: ContentFilter
    source_search: SourceSearch
    cache: AnswerCache
    grader: AnswerGrader
    streams: RemoteStreams

    async def chat(self, asked: ChatInput, model: RemoteModel) -> RemoteGeneration:
        """The generation that answers `asked`, whose texts have passed the content filter."""
        attempt, request = asked.attempt, asked.request
        attempt.note_model(attempt.model, model, "direct" if attempt.model == model.name else "alias")
        self._check(attempt, request, model)
        prompt_options(request, allow_template=self.settings.request_templates)
        async with (
            self.quotas.text_work(attempt.exchange, model.base_name, asked.size),
            asked.sources(self.source_search) as sources,
        ):
            return await self._chat(asked, model, sources)

    async def _chat(self, asked: ChatInput, model: RemoteModel, pending: PendingSources | None) -> RemoteGeneration:
        attempt, request, limit, turn = asked.attempt, asked.request, asked.limit, asked.turn
        messages, following = asked.messages, asked.following
        exchange, window = attempt.exchange, self._window(attempt, model)
        tools = request.tools if request.tools and request.tool_choice != "none" else ()
        prompt = MessagePrompt(self.tokenization, model, tools, exchange.caller.tenant, window)
        sources = None
        if pending is not None:
            bare = await prompt.measured(pending.instructed([*messages, *following]))
            room = room_for_sources(window, bare, limit)
            with exchange.timeline.phase("retrieve"):
                sources = found = await pending.result(
                    prompt.count,
                    turn.source_room(room, window),
                    source_check(self.content_filter.prompt, exchange),
                )
            await self.content_filter.mark(exchange, lambda: list(found.texts().values()))
        said = await turn.messages(attempt, prompt, TurnInput(messages, following, window, limit, sources))
        length = await prompt.measured(said)
        limit = within_cost(self.quotas, exchange, model, length, limit, request.n or 1)
        fits = self._room(attempt, model, length, limit, "messages", exact=prompt.exact)
        body = chat_body(exchange, request, said)
        if request.functions and not model.supports("parallel_tool_calls"):  # of several calls, the first is shown
            del body["parallel_tool_calls"]
        stops, here = self._stops(request)
        comparable = not (turn.stored or following or sources or request.return_token_ids or exchange.documents)
        spec = self._spec(
            attempt,
            request,
            model,
            "chat",
            [self._limited(model, body, stops, fits.answer)],
            fits,
            n=request.n or 1,
            stops=here,
            logprobs=bool(request.logprobs),
            question=self.cache.question(request, messages) if comparable else None,
        )
        generation = RemoteGeneration(spec, self.metrics)
        if sources is not None:
            # Nothing is added to text that has to be parsed, or whose tokens are shown one by one.
            plain = request.response_format is None or isinstance(request.response_format, TextFormat)
            generation.cite(sources, attribute=plain and not tools and not request.logprobs)
        self.grader.sample(attempt, generation, messages)
        return generation

    async def completion(
        self,
        attempt: Attempt,
        request: CompletionRequest,
        prompts: Sequence[str | list[int]],
        limit: TokenLimit,
        model: RemoteModel,
        *,
        prompt_only: bool,
    ) -> RemoteGeneration:
        """The generation that continues `prompts`. `prompt_only`: nothing is generated, only the prompt is shown."""
        exchange = attempt.exchange
        attempt.note_model(attempt.model, model, "direct" if attempt.model == model.name else "alias")
        self._check(attempt, request, model)
        if attempt.is_fallback and not all(isinstance(prompt, str) for prompt in prompts):
            raise InvalidRequest("Token ids are those of the model that was asked for.", param="prompt")
        scored = request.logprobs is not None and bool(request.echo)
        made = max(request.best_of or 1, request.n or 1)
        base = passed_on(request, COMPLETION_OPTIONS)
        if made > (request.n or 1):
            # Where the best of several are wanted, what each of their tokens costs is needed to choose them.
            base["logprobs"] = request.logprobs or 0
        if scored or prompt_only:
            base["echo"] = True
        stops, here = self._stops(request)
        counter = MessagePrompt(self.tokenization, model, tenant=exchange.caller.tenant)
        bodies: list[dict[str, Any]] = []
        shown: list[str] = []
        total, answer, reached = 0, 0, ""
        async with self.quotas.text_work(exchange, model.base_name, sum(map(len, prompts)) + len(request.suffix or "")):
            if request.suffix:
                base["suffix"] = await self.content_filter.prompt(exchange, request.suffix)
            for prompt in prompts:
                given, text, length = await self._given(attempt, model, counter, prompt)
                within_cost(self.quotas, exchange, model, total + length, limit, made * len(prompts))
                fits = self._room(attempt, model, length, limit, "prompt", exact=counter.exact)
                total += fits.prompt
                most = 0 if prompt_only else fits.answer
                answer += fits.answer or UNLIMITED
                reached = reached or fits.limit
                shown.append(text)
                bodies.append(self._limited(model, {**base, "prompt": given}, stops, most, field="max_tokens"))
        spec = self._spec(
            attempt,
            request,
            model,
            "completions",
            bodies,
            Room(total, answer, reached),
            n=made,
            stops=() if scored or prompt_only else here,
            logprobs=request.logprobs is not None or made > (request.n or 1),
            prompts=shown,
        )
        return RemoteGeneration(spec, self.metrics)

    async def _given(
        self, attempt: Attempt, model: RemoteModel, counter: MessagePrompt, prompt: str | list[int]
    ) -> tuple[str | list[int], str, int]:
        """A prompt as the server gets it, its text, and its length."""
        exchange, tenant = attempt.exchange, attempt.exchange.caller.tenant
        if isinstance(prompt, str):
            if not prompt:
                raise InvalidRequest("`prompt` is empty; there is nothing to continue.", param="prompt")
            text = await self.content_filter.prompt(exchange, prompt)
            length = counter.count(text) if model.text is None else await self._length(model, text, tenant)
            return text, text, length
        known = remote_text(model)
        if known is None:
            raise InvalidRequest(
                f"`prompt` is token ids, and `{model.name}` runs on another server whose tokenizer is not known here; "
                "send text (`remotes[].tokenizer` would allow ids).",
                param="prompt",
                code="remote_model",
            )
        check_token_ids(prompt, known.text.vocab_size, "prompt")
        if not prompt:
            raise InvalidRequest("`prompt` is empty; there is nothing to continue.", param="prompt")
        text = await self.tokenization.decode(known, prompt, tenant=tenant)
        filtered = await self.content_filter.prompt(exchange, text) if self.content_filter.checks_input else text
        if filtered != text:
            return filtered, filtered, await self._length(model, filtered, tenant)
        return (prompt if model.supports("token_prompt") else text), text, len(prompt)

    async def _length(self, model: RemoteModel, text: str, tenant: str) -> int:
        known = remote_text(model)
        assert known is not None
        most = known.context_window or WINDOW
        return len(await self.tokenization.encode(known, text, tenant=tenant, most=most))

    def _check(self, attempt: Attempt, request: ChatRequest | CompletionRequest, model: RemoteModel) -> None:
        check_stream_options(request)
        check_targets(attempt.exchange, followed=())
        self.watermarks.check_remote(attempt.exchange, request.watermark, model.name)
        if attempt.is_fallback:
            check_foreign_tokens(request)
        if model.text is not None:
            for name in ("stop_token_ids", "allowed_token_ids", "logit_bias"):
                check_token_ids(getattr(request, name) or (), model.text.vocab_size, name)
        if request.prompt_logprobs is not None:
            raise InvalidRequest(
                f"`prompt_logprobs` is for models that run here; another server runs `{model.name}`.",
                param="prompt_logprobs",
                code="remote_model",
            )
        if request.priority:
            ignore_advice(attempt.exchange, "priority")

    def _window(self, attempt: Attempt, model: RemoteModel) -> int:
        """As much of the model's window as the caller may use."""
        known = remote_text(model)
        window = model.context_window or (None if known is None else known.context_window) or WINDOW
        quota = self.quotas.requests.cap(attempt.exchange.caller, "context_tokens", model.name)
        return window if quota is None else min(window, quota.most)

    def _room(
        self, attempt: Attempt, model: RemoteModel, prompt: int, limit: TokenLimit, param: str, *, exact: bool
    ) -> Room:
        """What fits. The window counts where it and the length are known; otherwise the server knows better."""
        quota = self.quotas.requests.noted(attempt.exchange, "context_tokens", model.name)
        window = model.context_window if exact else None
        exceeded: Callable[..., ContextLengthExceeded] = ContextLengthExceeded
        most, name = window, "context_window"
        if quota is not None and (window is None or quota.most < window):
            exceeded = partial(ContextQuotaExceeded, whose=quota.whose, scope=quota.scope, estimated=not exact)
            most, name = quota.most, "context_tokens"
        asked = limit.max_tokens
        default = limit.default
        if most is None:
            return Room(prompt, *((default, limit.default_is) if asked is None else (asked, limit.clipped_by)))
        room = most - prompt
        if room < 1 or (asked is not None and asked > room and not limit.clip):
            raise exceeded(limit=most, prompt_tokens=prompt, max_tokens=asked if room >= 1 else None, param=param)
        if asked is not None:
            return Room(prompt, min(asked, room), limit.clipped_by if asked <= room else name)
        if default is not None and default <= room:
            return Room(prompt, default, limit.default_is)
        return Room(prompt, room, name) if quota is not None else Room(prompt, None)

    def _stops(self, request: Sampling) -> tuple[list[str], list[str]]:
        """Stop strings for the server, and those to look for here. One that is part of the text is found here alone; no
        stop string counts before `min_tokens`, and only the server counts tokens."""
        stops = stop_strings(request)
        if request.include_stop_str_in_output or request.no_stop_trim:
            return [], stops
        return stops, [] if request.min_tokens else stops

    def _limited(
        self, model: RemoteModel, body: dict[str, Any], stops: list[str], most: int | None, field: str = ""
    ) -> dict[str, Any]:
        body = {**body, "stop": stops} if stops else body
        return body if most is None else {**body, field or model.limit_field: most}

    def _spec(
        self,
        attempt: Attempt,
        request: ChatRequest | CompletionRequest,
        model: RemoteModel,
        kind: str,
        bodies: Sequence[dict[str, Any]],
        fits: Room,
        *,
        n: int,
        stops: Sequence[str],
        logprobs: bool,
        question: Any = None,
        prompts: Sequence[str] = (),
    ) -> RemoteSpec:
        exchange, settings = attempt.exchange, self.settings
        caller = exchange.caller
        operation = "chat" if kind == "chat" else "completions"
        fit = [fitted(exchange, model, body, operation) for body in bodies[:1]]  # type: ignore[arg-type]
        fit += [dict(model.fit(body, operation).body) for body in bodies[1:]]  # type: ignore[arg-type]
        resumption = attempt.resumption
        return RemoteSpec(
            id=attempt.ids.next() if resumption is None or not resumption.id else resumption.id,
            model=model,
            calls=calls_of(model, operation, fit, n),  # type: ignore[arg-type]
            request_id=exchange.request_id,
            started_at=exchange.started_at,
            prompt_tokens=max(fits.prompt, 1),
            most_tokens=n * (fits.answer or model.context_window or UNLIMITED),
            prompts=prompts,
            time_limit_s=settings.time_limit(exchange, model.name),
            length_limit=fits.limit,
            demand=exchange.demand,
            stops=stops,
            include_stop=bool(request.include_stop_str_in_output or request.no_stop_trim),
            logprobs=logprobs,
            token_ids=bool(request.return_token_ids),
            repeatable=request.seed is not None or request.temperature == 0,
            cache_salt=settings.cache_salt(caller, request.cache_salt),
            cache_question=question,
            resumption=resumption,
            streams=self.streams,
            missing=partial(ignore_advice, exchange),
        )
