"""POST /v1/completions: text or token ids, several prompts at once, echo, and the older logprobs format."""

from __future__ import annotations

import functools
import time
from collections.abc import Iterator
from typing import Any

from penstock.engine.request import TokenLogprob
from penstock.gateway.accounting.attribution import identify
from penstock.gateway.app.exchange import Exchange, encode_json
from penstock.gateway.generation.attempt import Attempt
from penstock.gateway.generation.choice import Choice, Piece
from penstock.gateway.generation.engine import EngineGeneration
from penstock.gateway.generation.logprobs import finite, id_name, prompt_entries
from penstock.gateway.generation.pipeline import GenerationPipeline
from penstock.gateway.generation.question import prompt_question
from penstock.gateway.generation.renderer import DONE, Renderer
from penstock.gateway.generation.request_decoder import RequestDecoder
from penstock.gateway.generation.resumption import asked_for
from penstock.gateway.generation.sampling import check_choices, token_limit
from penstock.gateway.generation.schemas import CompletionRequest
from penstock.gateway.generation.spec import TokenPrompt
from penstock.gateway.generation.spellings import respell
from penstock.protocol.errors import InvalidRequest

DEFAULT_MAX_TOKENS = 16
_decoder = RequestDecoder(CompletionRequest)


class CompletionEndpoints:
    def __init__(self, pipeline: GenerationPipeline) -> None:
        self._pipeline = pipeline

    async def completions(self, exchange: Exchange) -> None:
        pipeline, settings = self._pipeline, self._pipeline.settings
        request = _decoder(exchange, await exchange.body(settings.body_limit))
        identify(exchange, request.user or request.safety_identifier, request.metadata)
        respell(request)
        n = request.n or 1
        _check(request, n)
        prompts = _prompts(request)
        check_choices(len(prompts), max(n, request.best_of or 1), settings)
        asked = DEFAULT_MAX_TOKENS if request.max_tokens is None else request.max_tokens
        limit = token_limit(asked or 1, settings, default=None, param="max_tokens")

        scored = request.logprobs is not None and bool(request.echo)
        resumption = asked_for(exchange, stream=request.stream, n=n > 1, prompt=len(prompts) > 1, echo=scored)

        async def answer(attempt: Attempt) -> None:
            attempt.resumption = resumption
            generation = await pipeline.completion(attempt, request, prompts, limit, prompt_only=asked == 0)
            renderer = CompletionRenderer(request, generation)
            await pipeline.respond(attempt, generation, renderer, stream=bool(request.stream))

        question = functools.partial(prompt_question, prompts, limit, max(n, request.best_of or 1))
        await pipeline.answer(exchange, request.model, answer, question)


def _check(request: CompletionRequest, n: int) -> None:
    if request.best_of is not None and request.best_of < n:
        raise InvalidRequest(f"`best_of` ({request.best_of}) must be at least `n` ({n}).", param="best_of")
    if request.best_of is not None and request.best_of > n and request.stream:
        raise InvalidRequest("`best_of` chooses among finished texts; it cannot be streamed.", param="best_of")
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


class CompletionRenderer(Renderer):
    """`text_completion` objects, whole or as chunks."""

    def __init__(self, request: CompletionRequest, generation: EngineGeneration) -> None:
        self._generation = generation
        self._model = model = generation.model
        self._logprobs = request.logprobs
        self._usage = bool(request.stream_options and request.stream_options.include_usage)
        self._continuous = bool(request.stream_options and request.stream_options.continuous_usage_stats)
        self._echo = bool(request.echo)
        self._n = request.n or 1
        self._made = max(request.best_of or 1, self._n)
        """Choices per prompt, of which `n` are shown."""
        self._prompt_top = request.prompt_logprobs
        self._ids = bool(request.return_token_ids)
        self._as_ids = bool(request.return_tokens_as_token_ids)
        self._echoed: dict[int, int] = {}
        self._told: set[int] = set()
        """Choices whose prompt's token ids have been sent."""
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
        chunk = self._before + encode_json(self._choice(piece.index, [piece]))
        if not self._continuous:
            return chunk + self._after
        return chunk + b'],"usage":%b}\n\n' % encode_json(self._generation.usage())

    def closing(self) -> bytes:
        if not self._usage:
            return DONE
        usage = encode_json({**self._head, "choices": [], "usage": self._generation.usage()})
        return b"data: " + usage + b"\n\n" + DONE

    def whole(self, pieces: list[list[Piece]]) -> bytes:
        shown = range(len(pieces)) if self._made == self._n else self._best()
        choices = [{**self._choice(made, pieces[made]), "index": index} for index, made in enumerate(shown)]
        return encode_json({**self._head, "choices": choices, "usage": self._generation.usage()})

    def _choice(self, index: int, parts: list[Piece]) -> dict[str, Any]:
        """With `echo`, the prompt comes before the first part of a choice."""
        text = "".join(part.text for part in parts)
        tokens = [token for part in parts for token in part.tokens]
        rows: list[_Row] = []
        shift = self._echoed.get(index, 0)
        if self._echo and index not in self._echoed:
            prompt = self._generation.spec.prompts[index // self._made]
            prefix = prompt.text
            if prefix is None:
                prefix = self._model.text.decode(prompt.tokens, skip_special=False)
            shift = self._echoed[index] = len(prefix)
            text = prefix + text
            if self._logprobs is not None:
                rows = self._prompt_rows(prompt, self._generation.choices[index])
        choice: dict[str, Any] = {"index": index, "text": text, "logprobs": None}
        if self._logprobs is not None:
            rows += [(token.id, token.offset + shift, token.logprob) for token in tokens]
            choice["logprobs"] = self._legacy(rows)
        choice["finish_reason"] = parts[-1].finish_reason if parts else None
        if parts and parts[-1].stop_reason is not None:
            choice["stop_reason"] = parts[-1].stop_reason
        if self._ids or self._prompt_top is not None:
            self._add_tokens(choice, index, parts)
        return choice

    def _best(self) -> Iterator[int]:
        """Of each prompt's choices, the `n` with the highest mean log-probability per token, the best first."""
        choices = self._generation.choices
        for first in range(0, len(choices), self._made):
            made = choices[first : first + self._made]
            made = sorted(made, key=lambda choice: choice.logprob / max(choice.completion_tokens, 1), reverse=True)
            yield from (choice.index for choice in made[: self._n])

    def _add_tokens(self, choice: dict[str, Any], index: int, parts: list[Piece]) -> None:
        first = index - index % self._made
        prompt = self._generation.spec.prompts[index // self._made]
        if self._prompt_top is not None:
            scores = self._generation.choices[first].prompt_logprobs
            choice["prompt_logprobs"] = prompt_entries(self._model.text, prompt.tokens, scores, self._prompt_top)
        if self._ids:
            choice["token_ids"] = [id for part in parts for id in part.token_ids or ()]
            if index not in self._told:
                self._told.add(index)
                choice["prompt_token_ids"] = prompt.tokens

    def _prompt_rows(self, prompt: TokenPrompt, choice: Choice) -> list[_Row]:
        logprobs = choice.prompt_logprobs or [None] * len(prompt.tokens)
        text = self._model.text
        detokenizer = text.detokenizer(skip_special=False)
        rows: list[_Row] = []
        # What the tokenizer put before a text is not part of it.
        offset = 0 if prompt.text is None else -text.added_length(prompt.tokens, prompt.text)
        for token, logprob in zip(prompt.tokens, logprobs, strict=True):
            rows.append((token, max(offset, 0), logprob))
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
        """A token that is not whole characters is written as its bytes, so that tokens remain distinguishable."""
        if self._as_ids:
            return id_name(id)
        data = self._model.text.token_bytes(id)
        try:
            return data.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)


_Row = tuple[int, int, TokenLogprob | None]
"""Token id, the offset of its text, its probability (None for the first token of a prompt)."""
