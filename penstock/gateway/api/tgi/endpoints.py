"""Paths of text-generation-inference: / and /generate_stream, its part of /generate, and /info."""

from __future__ import annotations

import penstock
from penstock.gateway.accounting.attribution import identify
from penstock.gateway.api.tgi.completion_request import DEFAULT, NAMES, completion_request
from penstock.gateway.api.tgi.renderer import TgiRenderer
from penstock.gateway.api.tgi.schemas import TgiModelQuery, TgiRequest
from penstock.gateway.app.decoding import decode_query
from penstock.gateway.app.dialects import TGI, renamed
from penstock.gateway.app.exchange import Exchange
from penstock.gateway.generation.attempt import Attempt
from penstock.gateway.generation.pipeline import GenerationPipeline
from penstock.gateway.generation.question import prompt_question
from penstock.gateway.generation.request_decoder import RequestDecoder
from penstock.gateway.generation.sampling import check_choices, token_limit

API_VERSION = "3.3.6"
"""The version of text-generation-inference whose API this is."""
MOST_STOPS = 16
_request = RequestDecoder(TgiRequest)


class TgiEndpoints:
    """See above."""

    def __init__(self, pipeline: GenerationPipeline) -> None:
        self._pipeline = pipeline

    async def tgi_root(self, exchange: Exchange) -> None:
        """What clients send that are given the server's URL only: whole or streamed, the prompt before the text unless
        they decline it, and a list around a whole answer."""
        request = _request(exchange, await exchange.body(self._pipeline.settings.body_limit))
        asked = request.parameters or DEFAULT
        await self.answer(exchange, request, full_text=asked.return_full_text is not False, listed=True)

    async def tgi_generate_stream(self, exchange: Exchange) -> None:
        request = _request(exchange, await exchange.body(self._pipeline.settings.body_limit))
        request.stream = True
        await self.answer(exchange, request)

    async def answer(
        self, exchange: Exchange, request: TgiRequest, *, full_text: bool | None = None, listed: bool = False
    ) -> None:
        """Answer a request, whichever path it came by."""
        exchange.dialect = TGI
        pipeline = self._pipeline
        identify(exchange, None, None)
        asked = request.parameters or DEFAULT
        if full_text is None:
            full_text = bool(asked.return_full_text)
        name = asked.adapter_id or request.model or pipeline.permissions.usual(exchange)
        detailed = bool(asked.details or asked.decoder_input_details or asked.top_n_tokens)
        n = asked.best_of or 1
        shows = (
            "details" if asked.details else "decoder_input_details" if asked.decoder_input_details else "top_n_tokens"
        )
        names = ((r"(logprobs|return_token_ids)$", f"parameters.{shows}"), *NAMES)
        with renamed(names):
            check_choices(1, n, pipeline.settings)
            options = pipeline.settings
            limit = token_limit(asked.max_new_tokens, options, default=options.default_max_tokens, param="max_tokens")
            completion_request(request, name, tokens=False)  # what is wrong with it is said before a model is chosen

        async def answer(attempt: Attempt) -> None:
            shown = detailed or (bool(request.stream) and self._tells_tokens(attempt))
            completion = completion_request(request, name, tokens=shown)
            with renamed(names):
                generation = await pipeline.completion(attempt, completion, [request.inputs], limit, prompt_only=False)
                renderer = TgiRenderer(generation, asked, prompt=request.inputs if full_text else "", listed=listed)
                await pipeline.respond(attempt, generation, renderer, stream=bool(request.stream))

        local = bool(asked.decoder_input_details)
        await pipeline.answer(exchange, name, answer, lambda: prompt_question([request.inputs], limit, n, local=local))

    def _tells_tokens(self, attempt: Attempt) -> bool:
        """Whether a stream shows tokens that nobody asked for: where they are known and nothing is held back."""
        pipeline = self._pipeline
        return pipeline.registry.remote(attempt.model) is None and not pipeline.content_filter.guards(attempt.exchange)

    async def tgi_info(self, exchange: Exchange) -> None:
        asked = decode_query(TgiModelQuery, exchange.scope)
        pipeline = self._pipeline
        permissions = pipeline.permissions
        model = await permissions.find(exchange, asked.model or permissions.first(exchange).name)
        window = model.context_window or 0
        await exchange.reply_json(
            {
                "model_id": model.name,
                "model_sha": None,
                "model_pipeline_tag": "text-generation",
                "max_concurrent_requests": model.slots,
                "max_best_of": pipeline.settings.max_choices,
                "max_stop_sequences": MOST_STOPS,
                "max_input_tokens": max(window - 1, 0),
                "max_total_tokens": window,
                "validation_workers": 1,
                "max_client_batch_size": 1,
                "router": "penstock",
                "version": API_VERSION,
                "sha": None,
                "docker_label": None,
                "penstock": penstock.__version__,
            }
        )
