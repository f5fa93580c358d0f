"""Ollama's API: /api/chat, /api/generate, /api/embed and the lists of models, for tools that were made for it."""

from __future__ import annotations

from typing import Any

import msgspec

import penstock
from penstock.gateway.accounting.targets import time_left
from penstock.gateway.api.ollama.catalogue import Catalogue
from penstock.gateway.api.ollama.chat_request import (
    NAMES,
    asked_tokens,
    chat_request,
    completion_request,
    no_thoughts,
    note_advice,
    prompt_request,
    think,
)
from penstock.gateway.api.ollama.renderer import RecordRenderer, nanoseconds, now
from penstock.gateway.api.ollama.schemas import (
    Answered,
    OllamaChatRequest,
    OllamaEmbeddingsRequest,
    OllamaEmbedRequest,
    OllamaGenerateRequest,
    OllamaNamedRequest,
)
from penstock.gateway.api.openai.embeddings import EmbeddingEndpoints, Encoded
from penstock.gateway.app.dialects import renamed
from penstock.gateway.app.exchange import Exchange
from penstock.gateway.generation.attempt import Attempt
from penstock.gateway.generation.base import Generation
from penstock.gateway.generation.pipeline import GenerationPipeline
from penstock.gateway.generation.question import chat_question, prompt_question
from penstock.gateway.generation.request_decoder import RequestDecoder
from penstock.gateway.generation.sampling import TokenLimit, token_limit
from penstock.gateway.generation.schemas import ChatRequest, EmbeddingsRequest
from penstock.gateway.generation.thoughts import style_of
from penstock.protocol.errors import InvalidRequest
from penstock.routing.registry import ServedModel

API_VERSION = "0.32.0"
"""The version of Ollama whose API this is: clients look at it before they use newer parts."""
_chat = RequestDecoder(OllamaChatRequest)
_generate = RequestDecoder(OllamaGenerateRequest)
_embed = RequestDecoder(OllamaEmbedRequest)
_embeddings = RequestDecoder(OllamaEmbeddingsRequest)
_named = RequestDecoder(OllamaNamedRequest)


class OllamaEndpoints:
    """Generates, embeds, and says what is served."""

    def __init__(self, pipeline: GenerationPipeline, catalogue: Catalogue, embeddings: EmbeddingEndpoints) -> None:
        self._pipeline = pipeline
        self._catalogue = catalogue
        self._embeddings = embeddings

    async def ollama_chat(self, exchange: Exchange) -> None:
        request = _chat(exchange, await exchange.body(self._pipeline.settings.body_limit))
        name = self._catalogue.resolve(exchange.caller, request.model)
        if not request.messages:
            await self._load(exchange, request, name, chat=True)
            return
        await self._answer_chat(exchange, request, name, chat_request(exchange, request), chat=True)

    async def ollama_generate(self, exchange: Exchange) -> None:
        request = _generate(exchange, await exchange.body(self._pipeline.settings.body_limit))
        name = self._catalogue.resolve(exchange.caller, request.model)
        if not request.prompt and not request.images and not request.suffix:
            await self._load(exchange, request, name, chat=False)
            return
        model = await self._catalogue.model(exchange.caller, name)
        if request.raw or request.suffix or (model is not None and not model.text.has_chat_template):
            await self._continue(exchange, request, name, model)
        else:
            await self._answer_chat(exchange, request, name, prompt_request(exchange, request), chat=False)

    async def _answer_chat(
        self, exchange: Exchange, request: Answered, name: str, asked: ChatRequest, *, chat: bool
    ) -> None:
        pipeline = self._pipeline
        limit = self._limit(request)
        model = await self._catalogue.model(exchange.caller, name)
        if request.think not in (None, False) and model is not None and style_of(model) is None:
            raise no_thoughts(request)
        think(asked, request)

        async def answer(attempt: Attempt) -> None:
            ready = model is None or model.backend.ready
            with renamed(NAMES):
                generation = await pipeline.chat(attempt, msgspec.structs.replace(asked, model=attempt.model), limit)
            await self._respond(attempt, generation, request, chat=chat, ready=ready)

        await pipeline.answer(exchange, name, answer, lambda: chat_question(asked, limit))

    async def _continue(
        self, exchange: Exchange, request: OllamaGenerateRequest, name: str, model: ServedModel | None
    ) -> None:
        pipeline = self._pipeline
        limit = self._limit(request)
        if request.think not in (None, False):
            if model is not None and style_of(model) is not None:
                what = "`suffix`" if request.suffix else "`raw: true`"
                raise InvalidRequest(f"A prompt with {what} is continued as it is; leave `think` out.", param="think")
            raise no_thoughts(request)
        asked = completion_request(exchange, request)
        prompt = request.prompt or ""

        async def answer(attempt: Attempt) -> None:
            ready = model is None or model.backend.ready
            with renamed(NAMES):
                generation = await pipeline.completion(attempt, asked, [prompt], limit, prompt_only=False)
            await self._respond(attempt, generation, request, chat=False, ready=ready)

        await pipeline.answer(exchange, name, answer, lambda: prompt_question([prompt], limit))

    async def _respond(
        self, attempt: Attempt, generation: Generation, request: Answered, *, chat: bool, ready: bool
    ) -> None:
        exchange = attempt.exchange
        renderer = RecordRenderer(
            generation,
            request.model,
            exchange.started_at,
            chat=chat,
            load_s=0.0 if ready else exchange.elapsed_s,
            logprobs=bool(request.logprobs),
            top=request.top_logprobs or 0,
        )
        await self._pipeline.respond(attempt, generation, renderer, stream=request.stream is not False)

    def _limit(self, request: Answered) -> TokenLimit:
        settings = self._pipeline.settings
        asked = asked_tokens(request)
        return token_limit(asked, settings, default=settings.default_max_tokens, param="options.num_predict", clip=True)

    async def _load(self, exchange: Exchange, request: Answered, name: str, *, chat: bool) -> None:
        """A request without a prompt only has the model loaded."""
        note_advice(exchange, request)
        model = await self._catalogue.model(exchange.caller, name)
        if model is not None:
            await model.backend.wait_ready(self._pipeline.settings.engine_wait_s, at_most=time_left(exchange))
        said: dict[str, Any] = {"message": {"role": "assistant", "content": ""}} if chat else {"response": ""}
        record = {"model": request.model, "created_at": now(), **said, "done": True, "done_reason": "load"}
        await exchange.reply_json(record)

    async def ollama_embed(self, exchange: Exchange) -> None:
        request = _embed(exchange, await exchange.body(self._pipeline.settings.body_limit))
        note_advice(exchange, request)
        texts = [request.input] if isinstance(request.input, str) else request.input
        found = Encoded(request.model, [], 0)
        if any(texts):
            found = await self._encoded(exchange, request.model, texts, request.truncate, request.dimensions)
        await exchange.reply_json(
            {
                "model": request.model,
                "embeddings": found.vectors,
                "total_duration": nanoseconds(exchange.elapsed_s),
                "load_duration": 0,
                "prompt_eval_count": found.tokens,
            }
        )

    async def ollama_embeddings(self, exchange: Exchange) -> None:
        request = _embeddings(exchange, await exchange.body(self._pipeline.settings.body_limit))
        note_advice(exchange, request)
        vectors: list[Any] = [[]]
        if request.prompt:
            with renamed(((r"input.*", "prompt"),)):
                vectors = (await self._encoded(exchange, request.model, [request.prompt], True, None)).vectors
        await exchange.reply_json({"embedding": vectors[0]})

    async def _encoded(
        self, exchange: Exchange, model: str, texts: list[str], truncate: bool | None, dimensions: int | None
    ) -> Encoded:
        asked = EmbeddingsRequest(
            model=self._catalogue.resolve(exchange.caller, model),
            input=list(texts),
            truncate_prompt_tokens=None if truncate is False else -1,
            dimensions=dimensions or None,
        )
        return await self._embeddings.encode(exchange, asked)

    async def ollama_tags(self, exchange: Exchange) -> None:
        await exchange.reply_json({"models": await self._catalogue.tags(exchange.caller)})

    async def ollama_ps(self, exchange: Exchange) -> None:
        await exchange.reply_json({"models": await self._catalogue.running(exchange.caller)})

    async def ollama_show(self, exchange: Exchange) -> None:
        request = _named(exchange, await exchange.body(self._pipeline.settings.body_limit))
        name = request.model or request.name
        if not name:
            raise InvalidRequest("Missing required parameter: `model`.", param="model", code="missing_parameter")
        await exchange.reply_json(await self._catalogue.show(exchange.caller, name))

    async def ollama_version(self, exchange: Exchange) -> None:
        await exchange.reply_json({"version": API_VERSION, "penstock": penstock.__version__})
