"""From a text completion request to its generation: content filter, prompts as tokens, sampling parameters."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass, replace

from penstock.engine.request import EngineInfo
from penstock.gateway.accounting.targets import check_targets
from penstock.gateway.app.exchange import Exchange
from penstock.gateway.generation.attempt import Attempt
from penstock.gateway.generation.base import Generation
from penstock.gateway.generation.cost_limit import within_cost
from penstock.gateway.generation.engine import EngineGeneration
from penstock.gateway.generation.factory import GenerationFactory
from penstock.gateway.generation.gap import Gap
from penstock.gateway.generation.prompt_options import kept_tokens
from penstock.gateway.generation.remote_generations import RemoteGenerations
from penstock.gateway.generation.sampling import (
    TokenLimit,
    check_choices,
    check_foreign_tokens,
    check_prompt_scores,
    check_token_ids,
    choice_params,
    fit,
    forbidden_words,
    sampling_params,
    stop_strings,
)
from penstock.gateway.generation.schemas import CompletionRequest
from penstock.gateway.generation.spec import TokenPrompt, request_spec
from penstock.gateway.generation.structured_output import with_response_format
from penstock.gateway.generation.tokenization import check_size
from penstock.gateway.generation.tool_choice import check_constrained
from penstock.protocol.errors import InvalidRequest
from penstock.routing.placement import ANYWHERE
from penstock.routing.registry import ModelRegistry, ServedModel


@dataclass(frozen=True, slots=True, kw_only=True)
class CompletionGenerations(GenerationFactory):
    """Makes generations for text completion requests."""

    registry: ModelRegistry
    remotes: RemoteGenerations

    async def make(
        self,
        attempt: Attempt,
        request: CompletionRequest,
        prompts: Sequence[str | list[int]],
        limit: TokenLimit,
        *,
        prompt_only: bool,
        gap: Gap | None = None,
    ) -> Generation:
        """The generation that continues `prompts`. `prompt_only`: nothing is generated, only the prompt is shown.
        `gap`: what they are continued to, where that is not the request's `suffix`."""
        if attempt.trial is not None and attempt.trial.wants_again:
            asked = request
            attempt.trial.again = lambda other: self.make(
                other, asked, prompts, limit, prompt_only=prompt_only, gap=gap
            )
        request = with_response_format(request)
        check_targets(attempt.exchange)
        exchange, name = attempt.exchange, self.registry.base_name(attempt.model)
        made = max(request.best_of or 1, request.n or 1)
        check_choices(len(prompts), made, self.settings, self.cap(exchange, "choices", name))
        # Nobody asked for the default: a caller who may ask for less gets less.
        limit = limit.capped(self.cap(exchange, "output_tokens", name), asked=request.max_tokens is not None)
        remote = self.registry.remote(attempt.model)
        if remote is not None:
            if gap is not None:
                request = gap.for_remote(request, remote.name)
            return await self.remotes.completion(attempt, request, prompts, limit, remote, prompt_only=prompt_only)
        stops = stop_strings(request)
        priority = self.admissions.priority(exchange, request.service_tier, request.priority)
        if attempt.is_fallback:
            check_foreign_tokens(request)
        if attempt.is_fallback and not all(isinstance(prompt, str) for prompt in prompts):
            raise InvalidRequest("Token ids are those of the model that was asked for.", param="prompt")
        model, info = await self.models.open(attempt, attempt.model, limit)
        grammar = await self.grammars.response_format(request.response_format, exchange)
        check_constrained(model, grammar)
        # Where the best of several are wanted, what each of their tokens costs is needed to choose them.
        logprobs = request.logprobs if made == (request.n or 1) else request.logprobs or 0
        params = sampling_params(
            request,
            info,
            model.text.eos_token_ids,
            limit,
            defaults=model.sampling,
            logprobs=logprobs,
            bad_words=forbidden_words(request, model.text),
            grammar=grammar,
        )
        params = self.watermarks.marked(exchange, request.watermark, params)
        if gap is None and request.suffix:
            gap = Gap(request.suffix)
        infill = None if gap is None else gap.tokens(request, model)
        if infill is not None:
            params = replace(params, stop_token_ids=tuple(dict.fromkeys((*params.stop_token_ids, *infill.ends))))
        echoed = request.logprobs if request.echo else None
        if echoed is not None or request.prompt_logprobs is not None:
            params = replace(params, prompt_logprobs=max(echoed or 0, request.prompt_logprobs or 0))
        quota = self.cap(exchange, "context_tokens", model.base_name)
        window = info.max_model_len if quota is None else min(info.max_model_len, quota.most)

        last = kept_tokens(request.truncate_prompt_tokens, window, limit)
        tokenized = []
        total, longest, placement = 0, 0, ANYWHERE
        size = 0 if gap is None else gap.size
        async with self.quotas.text_work(exchange, model.base_name, sum(map(len, prompts)) + size):
            if gap is not None:
                check_size(model, len(gap.after), window, gap.param, quota)
                gap = await gap.filtered(lambda text: self.content_filter.prompt(exchange, text))
            for prompt in prompts:
                add_special = request.add_special_tokens is not False and infill is None
                if isinstance(prompt, str) and last is None:
                    check_size(model, len(prompt), window, "prompt", quota)
                tokens, shown = await self._tokens(exchange, model, info, prompt, window, last, add_special=add_special)
                if infill is not None and gap is not None:
                    tokens = await gap.prompt(self.tokenization, model, infill, tokens, window, limit, exchange)
                    shown = None
                if not tokens:
                    raise InvalidRequest("`prompt` is empty; there is nothing to continue.", param="prompt")
                longest = max(longest, len(tokens))
                placement = self.place(exchange, model, priority, longest, limit)
                context = placement.window or info.max_model_len
                total += len(tokens)
                within_cost(self.quotas, exchange, model, total, limit, made * len(prompts))
                fitted = fit(params, len(tokens), limit, context, "prompt", quota)
                choices = choice_params(fitted, made, score_once=echoed is None)
                tokenized.append(TokenPrompt(tokens, choices, shown))
            check_prompt_scores(request, sum(len(prompt.tokens) for prompt in tokenized), request.n or 1)
        spec = request_spec(
            attempt,
            self.settings,
            request,
            model,
            tokenized,
            stops=stops,
            priority=priority,
            length_limit=limit.clipped_by,
            logprobs=request.logprobs is not None,
            prompt_only=prompt_only,
            continuation=True,
            placement=placement,
        )
        return EngineGeneration(spec, self.metrics)

    async def _tokens(
        self,
        exchange: Exchange,
        model: ServedModel,
        info: EngineInfo,
        prompt: str | list[int],
        window: int,
        last: int | None,
        *,
        add_special: bool,
    ) -> tuple[list[int], str | None]:
        """The ids of a prompt, and their text where it is known exactly."""
        tenant = exchange.caller.tenant
        encode = functools.partial(self.tokenization.encode, model, tenant=tenant, most=window, last=last)
        if isinstance(prompt, list):
            tokens = prompt if last is None else prompt[-last:]
            if len(tokens) > window:
                return tokens, None  # far too long, perhaps: there is no need to look at it
            check_token_ids(tokens, info.vocab_size, "prompt")
            if self.content_filter.checks_input:
                text = await self.tokenization.decode(model, tokens, tenant=tenant)
                filtered = await self.content_filter.prompt(exchange, text)
                if filtered != text:
                    tokens = await encode(filtered, add_special_tokens=False)
            return tokens, None
        filtered = await self.content_filter.prompt(exchange, prompt)
        tokens = await encode(filtered, add_special_tokens=add_special)
        return tokens, None if last is not None and len(tokens) >= last else filtered
