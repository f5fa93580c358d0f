"""From a text completion request to its generation: content filter, prompts as tokens, sampling parameters."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from penstock.engine.request import EngineInfo
from penstock.gateway.accounting.admission import Admissions
from penstock.gateway.accounting.quotas import Quotas
from penstock.gateway.app.exchange import Exchange
from penstock.gateway.generation.attempt import Attempt
from penstock.gateway.generation.engine import EngineGeneration
from penstock.gateway.generation.model_access import ModelAccess
from penstock.gateway.generation.response_format import GrammarCache
from penstock.gateway.generation.sampling import (
    TokenLimit,
    check_token_ids,
    choice_params,
    fit,
    sampling_params,
    stop_strings,
)
from penstock.gateway.generation.schemas import CompletionRequest
from penstock.gateway.generation.settings import GenerationSettings
from penstock.gateway.generation.spec import TokenPrompt, request_spec
from penstock.gateway.generation.stages import ContentFilter
from penstock.gateway.generation.tokenization import Tokenization
from penstock.protocol.errors import InvalidRequest
from penstock.routing.registry import ServedModel
from penstock.telemetry.metrics import Metrics


class CompletionGenerations:
    """Makes generations for text completion requests."""

    def __init__(
        self,
        settings: GenerationSettings,
        models: ModelAccess,
        tokenization: Tokenization,
        grammars: GrammarCache,
        quotas: Quotas,
        admissions: Admissions,
        metrics: Metrics,
        *,
        content_filter: ContentFilter,
    ) -> None:
        self._settings = settings
        self._models = models
        self._tokenization = tokenization
        self._grammars = grammars
        self._quotas = quotas
        self._admissions = admissions
        self._metrics = metrics
        self._content_filter = content_filter

    async def make(
        self,
        attempt: Attempt,
        request: CompletionRequest,
        prompts: Sequence[str | list[int]],
        limit: TokenLimit,
        *,
        prompt_only: bool,
    ) -> EngineGeneration:
        """The generation that continues `prompts`. `prompt_only`: nothing is generated, only the prompt is shown."""
        exchange = attempt.exchange
        stops = stop_strings(request)
        priority = self._admissions.priority(exchange, request.service_tier)
        if attempt.is_fallback and not all(isinstance(prompt, str) for prompt in prompts):
            raise InvalidRequest("Token ids are those of the model that was asked for.", param="prompt")
        model, info = await self._models.open(attempt, attempt.model, limit)
        grammar = await self._grammars.response_format(request.response_format)
        params = sampling_params(
            request, info, model.text.eos_token_ids, limit, logprobs=request.logprobs, grammar=grammar
        )
        if request.echo and request.logprobs is not None:
            params = replace(params, prompt_logprobs=request.logprobs)
        quota = self._quotas.context_tokens(exchange.caller)
        tokenized = []
        for prompt in prompts:
            tokens = await self._tokens(exchange, model, info, prompt)
            fitted = fit(params, len(tokens), limit, info.max_model_len, "prompt", quota)
            tokenized.append(TokenPrompt(tokens, choice_params(fitted, request.n)))
        spec = request_spec(
            attempt,
            self._settings,
            request,
            model,
            tokenized,
            stops=stops,
            priority=priority,
            logprobs=request.logprobs is not None,
            prompt_only=prompt_only,
            continuation=True,
        )
        return EngineGeneration(spec, self._metrics)

    async def _tokens(
        self, exchange: Exchange, model: ServedModel, info: EngineInfo, prompt: str | list[int]
    ) -> list[int]:
        if isinstance(prompt, list):
            check_token_ids(prompt, info.vocab_size, "prompt")
            tokens = prompt
            if self._content_filter.checks_input:
                text = model.text.decode(tokens)
                filtered = await self._content_filter.prompt(exchange, text)
                if filtered != text:
                    tokens = await self._tokenization.encode(model, filtered)
        else:
            filtered = await self._content_filter.prompt(exchange, prompt)
            tokens = await self._tokenization.encode(model, filtered)
        if not tokens:
            raise InvalidRequest("`prompt` is empty; there is nothing to continue.", param="prompt")
        return tokens
