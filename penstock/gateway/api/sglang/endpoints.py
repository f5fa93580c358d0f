"""SGLang's /generate, whose path text-generation-inference has too, and /model_info."""

from __future__ import annotations

import dataclasses

import msgspec

from penstock.gateway.accounting.attribution import identify
from penstock.gateway.api.sglang.completion_request import completion_request
from penstock.gateway.api.sglang.renderer import SglangRenderer
from penstock.gateway.api.sglang.schemas import GenerateRequest, SglangModelQuery
from penstock.gateway.api.tgi.endpoints import TgiEndpoints
from penstock.gateway.api.tgi.schemas import TgiRequest
from penstock.gateway.app.decoding import decode_query
from penstock.gateway.app.dialects import TGI, renamed
from penstock.gateway.app.exchange import Exchange
from penstock.gateway.generation.attempt import Attempt
from penstock.gateway.generation.pipeline import GenerationPipeline
from penstock.gateway.generation.question import prompt_question
from penstock.gateway.generation.request_decoder import RequestDecoder
from penstock.gateway.generation.sampling import check_choices, token_limit
from penstock.gateway.generation.schemas import CompletionRequest
from penstock.protocol.errors import InvalidRequest

DEFAULT_MAX_TOKENS = 128
_request = RequestDecoder(GenerateRequest)
_OF_TGI = ("model", "inputs", "parameters", "stream")


class SglangEndpoints:
    """See above."""

    def __init__(self, pipeline: GenerationPipeline, tgi: TgiEndpoints) -> None:
        self._pipeline = pipeline
        self._tgi = tgi

    async def generate(self, exchange: Exchange) -> None:
        body = await exchange.body(self._pipeline.settings.body_limit)
        try:
            request = _request(exchange, body)
        except InvalidRequest:
            if _of_tgi(body):  # whose clients read errors in their own form
                exchange.dialect = TGI
            raise
        if request.inputs is None and request.parameters is None:
            await self._generate(exchange, request)
            return
        exchange.dialect = TGI
        if request.inputs is None:
            raise InvalidRequest("Missing required parameter: `inputs`.", param="inputs", code="missing_parameter")
        for name in ("text", "input_ids"):
            if getattr(request, name) is not None:
                raise InvalidRequest(f"Send either `inputs` or `{name}`.", param=name)
        for name in GenerateRequest.__struct_fields__:
            if name not in _OF_TGI and getattr(request, name) not in (None, msgspec.UNSET):
                raise InvalidRequest(f"`{name}` goes with `text` or `input_ids`, not with `inputs`.", param=name)
        asked = TgiRequest(
            model=request.model, inputs=request.inputs, parameters=request.parameters, stream=request.stream
        )
        await self._tgi.answer(exchange, asked)

    async def _generate(self, exchange: Exchange, request: GenerateRequest) -> None:
        pipeline = self._pipeline
        identify(exchange, None, None)
        asked = completion_request(exchange, request)
        name = asked.model or pipeline.permissions.usual(exchange)
        names = asked.names
        n = asked.completion.n or 1
        wanted = None if asked.max_tokens is None else max(asked.max_tokens, 1)
        with renamed(names):
            check_choices(len(asked.prompts), n, pipeline.settings)
            limit = token_limit(wanted, pipeline.settings, default=DEFAULT_MAX_TOKENS, param="max_tokens")

        async def answer(attempt: Attempt) -> None:
            completion = self._for_model(attempt, asked.completion, wanted=bool(request.return_prompt_token_ids))
            with renamed(names):
                generation = await pipeline.completion(
                    attempt, completion, asked.prompts, limit, prompt_only=asked.max_tokens == 0
                )
                renderer = SglangRenderer(
                    generation,
                    dataclasses.replace(asked, completion=completion),
                    texts=bool(request.return_text_in_logprobs),
                    prompt_ids=bool(request.return_prompt_token_ids),
                    elapsed=lambda: exchange.elapsed_s,
                )
                await pipeline.respond(attempt, generation, renderer, stream=bool(request.stream))

        local = asked.from_token is not None
        prompts = list(asked.prompts)
        await pipeline.answer(exchange, name, answer, lambda: prompt_question(prompts, limit, n, local=local))

    def _for_model(self, attempt: Attempt, completion: CompletionRequest, *, wanted: bool) -> CompletionRequest:
        """Answers have token ids where they are known and nothing is held back. `wanted`: the request asks for some."""
        pipeline = self._pipeline
        ids = pipeline.registry.remote(attempt.model) is None and not pipeline.content_filter.guards(attempt.exchange)
        return msgspec.structs.replace(
            completion, model=attempt.model, return_token_ids=True if ids or wanted else None
        )

    async def sglang_model_info(self, exchange: Exchange) -> None:
        asked = decode_query(SglangModelQuery, exchange.scope)
        permissions = self._pipeline.permissions
        model = await permissions.find(exchange, asked.model or permissions.first(exchange).name)
        await exchange.reply_json(
            {
                "model_path": model.name,
                "served_model_name": model.name,
                "tokenizer_path": model.name,
                "is_generation": True,
                "preferred_sampling_params": None,
                "weight_version": model.fingerprint,
                "has_image_understanding": False,
                "has_audio_understanding": False,
                "model_type": None,
                "architectures": None,
            }
        )


class _Names(msgspec.Struct):
    """What tells the two APIs apart."""

    inputs: msgspec.Raw | msgspec.UnsetType = msgspec.UNSET


def _of_tgi(body: bytes) -> bool:
    try:
        return msgspec.json.decode(body, type=_Names).inputs is not msgspec.UNSET
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return False
