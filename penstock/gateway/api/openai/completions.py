"""POST /v1/completions: text or token ids, several prompts at once, echo, and the older logprobs format."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import Any

import msgspec

from penstock.engine.request import EngineInfo, TokenLogprob
from penstock.gateway.accounting.attribution import identify
from penstock.gateway.app.decoding import decode, given, not_supported
from penstock.gateway.app.exchange import Exchange, encode_json
from penstock.gateway.generation.attempt import Attempt
from penstock.gateway.generation.choice import Choice, Piece
from penstock.gateway.generation.engine import EngineGeneration, Prompt
from penstock.gateway.generation.fallback import answered
from penstock.gateway.generation.logprobs import finite
from penstock.gateway.generation.prepare import open_route, time_limit
from penstock.gateway.generation.respond import DONE, Renderer, answer
from penstock.gateway.generation.sampling import (
    check_choices,
    check_token_ids,
    fit,
    limits,
    sampling_params,
    stop_strings,
    with_seed,
)
from penstock.gateway.generation.schemas import CompletionRequest
from penstock.gateway.process.service import Service
from penstock.protocol.errors import InvalidRequest
from penstock.routing.registry import ServedModel

DEFAULT_MAX_TOKENS = 16
_decoder = msgspec.json.Decoder(CompletionRequest)


async def completions(service: Service, exchange: Exchange) -> None:
    request = decode(_decoder, await exchange.body(service.settings.body_limit))
    identify(exchange, request.user or request.safety_identifier, request.metadata)
    n = request.n or 1
    _check(request, n)
    given_prompts = _prompts(request)
    check_choices(len(given_prompts), n, service.settings)
    asked = DEFAULT_MAX_TOKENS if request.max_tokens is None else request.max_tokens
    only_prompt = asked == 0
    limit = limits(asked or 1, service.settings, default=None, param="max_tokens")
    stops = stop_strings(request)
    priority = service.admissions.priority(exchange, request.service_tier)

    async def attempt(attempt: Attempt) -> None:
        if attempt.is_fallback and len(said()) < len(given_prompts):
            raise InvalidRequest("Token ids are those of the model that was asked for.", param="prompt")
        model, info = await open_route(service, attempt, attempt.model, limit)
        grammar = await service.grammars.response_format(request.response_format)
        params = sampling_params(
            request, info, model.text.eos_token_ids, limit, logprobs=request.logprobs, grammar=grammar
        )
        if request.echo and request.logprobs is not None:
            params = replace(params, prompt_logprobs=request.logprobs)
        prompts = []
        quota = service.quotas.context_tokens(exchange.caller)
        for given_prompt in given_prompts:
            tokens = await _tokens(service, exchange, model, info, given_prompt)
            fitted = fit(params, len(tokens), limit, info.max_model_len, "prompt", quota)
            prompts.append(Prompt(tokens, [with_seed(fitted, i) for i in range(n)]))
        generation = EngineGeneration(
            model,
            prompts,
            id=attempt.ids.next(),
            metrics=service.metrics,
            started_at=exchange.started_at,
            cache_salt=service.cache_salt(exchange.caller),
            affinity=attempt.affinity(request.prompt_cache_key),
            patient=not attempt.has_fallback,
            stops=stops,
            priority=priority,
            speculation=request.speculation is not False,
            time_limit_s=time_limit(service, exchange),
            want_logprobs=request.logprobs is not None,
            discard=only_prompt,
            continuation=True,
            seeded=request.seed is not None,
        )
        renderer = CompletionRenderer(request, model, generation)
        await answer(service, attempt, generation, renderer, stream=bool(request.stream))

    def said() -> list[str]:
        return [prompt for prompt in given_prompts if isinstance(prompt, str)]

    await answered(service, exchange, request.model, attempt, said, limit.max_tokens)


def _check(request: CompletionRequest, n: int) -> None:
    if given(request.suffix) and bytes(request.suffix).strip() != b'""':  # type: ignore[arg-type]
        raise InvalidRequest(
            "`suffix` is not supported: the models served here complete text, they do not fill gaps.",
            param="suffix",
            code="unsupported_parameter",
        )
    if request.best_of is not None and request.best_of != n:
        raise not_supported("best_of")
    if request.max_tokens == 0 and not request.echo:
        raise InvalidRequest("`max_tokens` must be at least 1, or 0 together with `echo: true`.", param="max_tokens")


def _prompts(request: CompletionRequest) -> list[str | list[int]]:
    """A string, strings, token ids, or lists of token ids; not a mixture."""
    prompt = request.prompt
    if isinstance(prompt, str):
        return [prompt]
    if not prompt:
        raise InvalidRequest("`prompt` is empty.", param="prompt")
    kind = type(prompt[0])
    if any(type(item) is not kind for item in prompt):
        raise InvalidRequest(
            "`prompt` must be a string, a list of strings, a list of token ids or a list of lists of token ids.",
            param="prompt",
        )
    return [prompt] if kind is int else list(prompt)  # type: ignore[list-item, arg-type]


async def _tokens(
    service: Service, exchange: Exchange, model: ServedModel, info: EngineInfo, prompt: str | list[int]
) -> list[int]:
    if isinstance(prompt, list):
        check_token_ids(prompt, info.vocab_size, "prompt")
        tokens = prompt
        if service.guardrails is not None:
            text = model.text.decode(tokens)
            guarded = await service.guardrails.prompt(exchange, text)
            if guarded != text:
                tokens = await service.encode(model, guarded)
    else:
        if service.guardrails is not None:
            prompt = await service.guardrails.prompt(exchange, prompt)
        tokens = await service.encode(model, prompt)
    if not tokens:
        raise InvalidRequest("`prompt` is empty; there is nothing to continue.", param="prompt")
    return tokens


class CompletionRenderer(Renderer):
    """`text_completion` objects, whole or as chunks."""

    def __init__(self, request: CompletionRequest, model: ServedModel, generation: EngineGeneration) -> None:
        self._generation = generation
        self._model = model
        self._logprobs = request.logprobs
        self._usage = bool(request.stream_options and request.stream_options.include_usage)
        self._echo = bool(request.echo)
        self._n = request.n or 1
        self._echoed: dict[int, int] = {}
        self._head: dict[str, Any] = {
            "id": f"cmpl-{generation.id}",
            "object": "text_completion",
            "created": int(time.time()),
            "model": model.name,
            "system_fingerprint": model.fingerprint,
        }
        if request.service_tier is not None:
            self._head["service_tier"] = "default" if request.service_tier == "auto" else request.service_tier
        self._before = b"data: " + encode_json(self._head)[:-1] + b',"choices":['
        self._after = b'],"usage":null}\n\n' if self._usage else b"]}\n\n"

    def opening(self) -> bytes:
        return b""

    def event(self, piece: Piece) -> bytes:
        return self._before + encode_json(self._choice(piece.index, [piece])) + self._after

    def closing(self) -> bytes:
        if not self._usage:
            return DONE
        usage = encode_json({**self._head, "choices": [], "usage": self._generation.usage()})
        return b"data: " + usage + b"\n\n" + DONE

    def whole(self, pieces: list[list[Piece]]) -> bytes:
        choices = [self._choice(index, parts) for index, parts in enumerate(pieces)]
        return encode_json({**self._head, "choices": choices, "usage": self._generation.usage()})

    def _choice(self, index: int, parts: list[Piece]) -> dict[str, Any]:
        """The prompt comes before the first part of a choice, when it is to be echoed."""
        text = "".join(part.text for part in parts)
        tokens = [token for part in parts for token in part.tokens]
        rows: list[_Row] = []
        shift = self._echoed.get(index, 0)
        if self._echo and index not in self._echoed:
            prompt = self._generation.prompts[index // self._n]
            prefix = self._model.text.decode(prompt.tokens)
            shift = self._echoed[index] = len(prefix)
            text = prefix + text
            if self._logprobs is not None:
                rows = self._prompt_rows(prompt.tokens, self._generation.choices[index])
        choice: dict[str, Any] = {"index": index, "text": text, "logprobs": None}
        if self._logprobs is not None:
            rows += [(token.id, token.offset + shift, token.logprob) for token in tokens]
            choice["logprobs"] = self._legacy(rows)
        choice["finish_reason"] = parts[-1].finish_reason if parts else None
        if parts and parts[-1].stop_reason is not None:
            choice["stop_reason"] = parts[-1].stop_reason
        return choice

    def _prompt_rows(self, tokens: list[int], choice: Choice) -> list[_Row]:
        logprobs = choice.prompt_logprobs or [None] * len(tokens)
        detokenizer = self._model.text.detokenizer()
        rows: list[_Row] = []
        offset = 0
        for token, logprob in zip(tokens, logprobs, strict=True):
            rows.append((token, offset, logprob))
            offset += len(detokenizer.push([token]))
        return rows

    def _legacy(self, rows: list[_Row]) -> dict[str, Any]:
        top = self._logprobs or 0
        return {
            "tokens": [self._token(id) for id, _, _ in rows],
            "token_logprobs": [None if row is None else finite(row.logprob) for _, _, row in rows],
            "top_logprobs": [self._top(row, top) for _, _, row in rows] if top else None,
            "text_offset": [offset for _, offset, _ in rows],
        }

    def _top(self, row: TokenLogprob | None, top: int) -> dict[str, float] | None:
        if row is None:
            return None
        pairs = zip(row.top_ids[:top], row.top_logprobs[:top], strict=True)
        return {self._token(id): finite(logprob) for id, logprob in pairs}

    def _token(self, id: int) -> str:
        """A token that is not whole characters is written as its bytes, so that different tokens stay different."""
        data = self._model.text.token_bytes(id)
        try:
            return data.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)


_Row = tuple[int, int, TokenLogprob | None]
"""Token id, where its text starts, its probability (None for the first token of a prompt)."""
