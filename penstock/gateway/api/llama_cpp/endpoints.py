"""llama.cpp's own paths: /completion, /infill, /embedding, and what clients ask about the server."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import msgspec

import penstock
from penstock.engine.request import SamplingParams
from penstock.gateway.accounting.attribution import identify
from penstock.gateway.accounting.targets import time_left
from penstock.gateway.api.llama_cpp.completion_request import (
    NAMES,
    Asked,
    asked_tokens,
    completion_request,
    resolved_biases,
    resolved_prompts,
)
from penstock.gateway.api.llama_cpp.renderer import LlamaCppRenderer, settings
from penstock.gateway.api.llama_cpp.schemas import (
    InfillRequest,
    LlamaCppCompletionRequest,
    LlamaCppEmbeddingRequest,
    LlamaCppModelQuery,
    LlamaCppOptions,
    SlotsQuery,
)
from penstock.gateway.api.openai.embeddings import EmbeddingEndpoints
from penstock.gateway.app.decoding import decode_query, not_supported
from penstock.gateway.app.dialects import Renaming, renamed
from penstock.gateway.app.exchange import Exchange
from penstock.gateway.generation.attempt import Attempt
from penstock.gateway.generation.gap import Gap, SourceFile
from penstock.gateway.generation.pipeline import GenerationPipeline
from penstock.gateway.generation.question import prompt_question
from penstock.gateway.generation.request_decoder import RequestDecoder
from penstock.gateway.generation.sampling import TokenLimit, check_choices, token_limit
from penstock.gateway.generation.schemas import CompletionRequest, EmbeddingsRequest
from penstock.protocol.errors import InvalidRequest, Overloaded
from penstock.routing.registry import ServedModel

_SAMPLED = (
    *("temperature", "top_k", "top_p", "min_p", "typical_p", "presence_penalty", "frequency_penalty"),
    "repetition_penalty",
)
EUCLIDEAN = 2
"""`embd_normalize` of vectors whose length is 1."""
_completion = RequestDecoder(LlamaCppCompletionRequest)
_infill = RequestDecoder(InfillRequest)
_embedding = RequestDecoder(LlamaCppEmbeddingRequest)
_INFILL_NAMES = ((r"suffix$", "input_suffix"), (r"prompt$", "input_prefix"))


class LlamaCppEndpoints:
    """See above."""

    def __init__(self, pipeline: GenerationPipeline, embeddings: EmbeddingEndpoints) -> None:
        self._pipeline = pipeline
        self._embeddings = embeddings

    async def llama_cpp_completion(self, exchange: Exchange) -> None:
        request = _completion(exchange, await exchange.body(self._pipeline.settings.body_limit))
        await self._answer(exchange, request, None)

    async def llama_cpp_infill(self, exchange: Exchange) -> None:
        request = _infill(exchange, await exchange.body(self._pipeline.settings.body_limit))
        files = [SourceFile(each.filename, each.text) for each in request.input_extra or ()]
        await self._answer(exchange, request, Gap(request.input_suffix, files, "input_suffix"))

    async def _answer(self, exchange: Exchange, request: LlamaCppOptions, gap: Gap | None) -> None:
        pipeline = self._pipeline
        identify(exchange, None, None)
        name = request.model or pipeline.permissions.usual(exchange)
        asked = completion_request(exchange, request, name)
        if isinstance(request, InfillRequest):
            asked = dataclasses.replace(asked, prompts=[request.input_prefix + (request.prompt or "")])
        wanted = asked_tokens(request)
        limit = self._limit(wanted)
        n = asked.completion.n or 1
        names: Renaming = (*NAMES, (r"response_format.*", "grammar" if request.grammar else "json_schema"))
        if gap is not None:
            names = (*names, *_INFILL_NAMES)
        with renamed(names):
            check_choices(len(asked.prompts), n, pipeline.settings)

        async def answer(attempt: Attempt) -> None:
            with renamed(names):
                completion, prompts = await self._resolved(attempt, asked)
                generation = await pipeline.completion(
                    attempt, completion, prompts, limit, prompt_only=wanted == 0, gap=gap
                )
                renderer = LlamaCppRenderer(
                    generation, request, completion, n_predict=wanted, several=asked.several, prompts=prompts
                )
                await pipeline.respond(attempt, generation, renderer, stream=bool(request.stream))

        texts = [*asked.texts, *(() if gap is None else (gap.after, *(file.text for file in gap.files)))]
        await pipeline.answer(exchange, name, answer, lambda: prompt_question(texts, limit, n))

    async def _resolved(self, attempt: Attempt, asked: Asked) -> tuple[CompletionRequest, Sequence[str | list[int]]]:
        """The request and its prompts for the model of an attempt."""
        asked = self._with_ids(attempt, asked)
        if asked.plain:
            return asked.completion, asked.texts
        pipeline, exchange = self._pipeline, attempt.exchange
        model = await pipeline.tokenized(attempt.model)
        if attempt.is_fallback:
            raise InvalidRequest("Token ids are those of the model that was asked for.", param="prompt")
        window = model.context_window or 0
        if isinstance(model, ServedModel):
            await model.backend.wait_ready(pipeline.settings.engine_wait_s, at_most=time_left(exchange))
            window = model.context_window or window
        size = sum(len(part) for part in asked.texts)
        async with pipeline.quotas.text_work(exchange, model.name, size):
            prompts = await resolved_prompts(asked, model, pipeline.tokenization, exchange.caller.tenant, window)
        completion = asked.completion
        if asked.biases:
            completion = msgspec.structs.replace(completion, logit_bias=resolved_biases(asked, model))
        return completion, prompts

    def _with_ids(self, attempt: Attempt, asked: Asked) -> Asked:
        """Streams have token ids without being asked for them, where they are known and nothing is held back."""
        pipeline, completion = self._pipeline, asked.completion
        if not completion.stream or completion.return_token_ids is not None:
            return asked
        if pipeline.registry.remote(attempt.model) is not None or pipeline.content_filter.guards(attempt.exchange):
            return asked
        completion = msgspec.structs.replace(completion, return_token_ids=True)
        return dataclasses.replace(asked, completion=completion)

    def _limit(self, wanted: int | None) -> TokenLimit:
        """More than fits ends with the window, as it does there."""
        options = self._pipeline.settings
        asked = None if wanted is None else max(wanted, 1)
        return token_limit(asked, options, default=options.default_max_tokens, param="n_predict", clip=True)

    async def llama_cpp_embedding(self, exchange: Exchange) -> None:
        request = _embedding(exchange, await exchange.body(self._pipeline.settings.body_limit))
        if request.embd_normalize not in (None, EUCLIDEAN):
            raise not_supported("embd_normalize", "vectors have the length 1 (2, the Euclidean norm)")
        given, name = request.content, "content"
        if given is None:
            given, name = request.input, "input"
        elif request.input is not None:
            raise InvalidRequest("Send either `content` or `input`.", param="input")
        if given is None:
            raise InvalidRequest("Missing required parameter: `content`.", param="content", code="missing_parameter")
        asked = EmbeddingsRequest(model=request.model or "", input=given, encoding_format=request.encoding_format)
        with renamed(((r"input", name),)):
            found = await self._embeddings.encode(exchange, asked)
        body = [{"index": index, "embedding": [vector]} for index, vector in enumerate(found.vectors)]
        await exchange.reply_json(body)

    async def llama_cpp_props(self, exchange: Exchange) -> None:
        asked = decode_query(LlamaCppModelQuery, exchange.scope)
        model = await self._model(exchange, asked.model)
        sampling = model.sampling
        given = {name: value for name in _SAMPLED if (value := getattr(sampling, name)) is not None}
        params = SamplingParams(**given)
        special = model.text.special_tokens
        await exchange.reply_json(
            {
                "default_generation_settings": {
                    "n_ctx": model.context_window,
                    "params": {**settings(params), "seed": -1},
                },
                "total_slots": model.slots,
                "model_alias": model.name,
                "model_path": model.name,
                "modalities": {"vision": False, "audio": False},
                "chat_template": model.text.template_source,
                "bos_token": special["bos_token"] or "",
                "eos_token": special["eos_token"] or "",
                "build_info": f"penstock-{penstock.__version__}",
                "is_sleeping": model.state == "asleep",
            }
        )

    async def llama_cpp_slots(self, exchange: Exchange) -> None:
        """As many slots as requests run together in the engine; which request has which is not a thing here."""
        asked = decode_query(SlotsQuery, exchange.scope)
        model = await self._model(exchange, asked.model)
        total, load = model.slots, model.backend.load
        if asked.fail_on_no_slot and load.running >= total:
            raise Overloaded("Every slot is taken.", retry_after=1.0)
        await exchange.reply_json(
            [{"id": slot, "n_ctx": model.context_window, "is_processing": slot < load.running} for slot in range(total)]
        )

    async def llama_cpp_lora_adapters(self, exchange: Exchange) -> None:
        """The adapters of a model. None is applied unless a request names it as its model."""
        asked = decode_query(LlamaCppModelQuery, exchange.scope)
        model = await self._model(exchange, asked.model)
        names = sorted(each.name for each in model.adapted(exchange.caller.access))
        body: list[dict[str, Any]] = [
            {"id": id, "path": name, "scale": 0.0, "task_name": "", "prompt_prefix": ""}
            for id, name in enumerate(names)
        ]
        await exchange.reply_json(body)

    async def llama_cpp_set_lora_adapters(self, exchange: Exchange) -> None:
        raise not_supported("scale", "an adapter is not switched on for everybody; a request names it as its `model`")

    async def llama_cpp_set_props(self, exchange: Exchange) -> None:
        raise not_supported("props", "settings are those of the configuration; a request may give its own")

    async def _model(self, exchange: Exchange, name: str | None) -> ServedModel:
        permissions = self._pipeline.permissions
        return await permissions.find(exchange, name or permissions.first(exchange).name)
