"""POST /v1/completions: text or token ids, several prompts at once, echo, and the older logprobs format."""

from __future__ import annotations

import functools
import time
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from penstock.engine.request import TokenLogprob
from penstock.gateway.accounting.attribution import identify
from penstock.gateway.app.exchange import Exchange, encode_json
from penstock.gateway.generation.attempt import Attempt
from penstock.gateway.generation.base import Generation
from penstock.gateway.generation.choice import AnyToken, Choice, Piece, SpelledToken
from penstock.gateway.generation.engine import EngineGeneration
from penstock.gateway.generation.logprobs import finite, id_name, prompt_entries
from penstock.gateway.generation.pipeline import GenerationPipeline
from penstock.gateway.generation.question import prompt_question
from penstock.gateway.generation.remote import RemoteGeneration
from penstock.gateway.generation.remote_choice import RemoteChoice
from penstock.gateway.generation.renderer import DONE, Renderer
from penstock.gateway.generation.request_decoder import RequestDecoder
from penstock.gateway.generation.resumption import asked_for
from penstock.gateway.generation.sampling import check_choices, token_limit
from penstock.gateway.generation.schemas import CompletionRequest, served_tier
from penstock.gateway.generation.spec import TokenPrompt
from penstock.gateway.generation.spellings import respell
from penstock.protocol.errors import InvalidRequest
from penstock.text import TextModel

DEFAULT_MAX_TOKENS = 16
_decoder = RequestDecoder(CompletionRequest)


class CompletionEndpoints:
    def __init__(self, pipeline: GenerationPipeline) -> None:
        self._pipeline = pipeline

    async def completions(self, exchange: Exchange) -> None:
        pipeline, settings = self._pipeline, self._pipeline.settings
        request = _decoder(exchange, await exchange.body(settings.body_limit))
        if request.stream_options is not None:
            request.stream_options.apply(exchange)
        identify(exchange, request.user or request.safety_identifier, request.metadata)
        respell(exchange, request)
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

        local = request.prompt_logprobs is not None
        question = functools.partial(prompt_question, prompts, limit, max(n, request.best_of or 1), local=local)
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
    if len(set(map(type, prompt))) > 1:  # a prompt may have a hundred thousand ids
        raise InvalidRequest(
            "`prompt` must be a string, a list of strings, a list of token ids or a list of lists of token ids.",
            param="prompt",
        )
    return [prompt] if kind is int else list(prompt)  # type: ignore[list-item, arg-type]


class CompletionRenderer(Renderer):
    """`text_completion` objects, whole or as chunks."""

    def __init__(self, request: CompletionRequest, generation: Generation) -> None:
        self._generation = generation
        model = generation.model
        self._logprobs = request.logprobs
        self._usage = bool(request.stream_options and request.stream_options.include_usage)
        self._continuous = bool(request.stream_options and request.stream_options.continuous_usage_stats)
        self._echo = bool(request.echo) and not _echoed_elsewhere(request, generation)
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
            self._head["service_tier"] = served_tier(request.service_tier)
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
            prefix, rows = self._prompt(index)
            shift = self._echoed[index] = len(prefix)
            text = prefix + text
        choice: dict[str, Any] = {"index": index, "text": text, "logprobs": None}
        if self._logprobs is not None:
            rows += [self._row(token, shift) for token in tokens]
            choice["logprobs"] = self._legacy(rows)
        choice["finish_reason"] = parts[-1].finish_reason if parts else None
        if parts and parts[-1].stop_reason is not None:
            choice["stop_reason"] = parts[-1].stop_reason
        if self._ids or self._prompt_top is not None:
            self._add_tokens(choice, index, parts)
        return choice

    def _prompt(self, index: int) -> tuple[str, list[_Row]]:
        """The prompt of a choice, and its tokens where they are shown."""
        generation, place = self._generation, index // self._made
        if not isinstance(generation, EngineGeneration):
            assert isinstance(generation, RemoteGeneration)
            return generation.spec.prompts[place], []
        prompt = generation.spec.prompts[place]
        prefix = prompt.text
        if prefix is None:
            prefix = generation.model.text.decode(prompt.tokens, skip_special=False)
        if self._logprobs is None:
            return prefix, []
        return prefix, self._prompt_rows(prompt, generation.choices[index], generation.model.text)

    def _row(self, token: AnyToken, shift: int) -> _Row:
        if isinstance(token, SpelledToken):
            # The first token of a prompt that was given back has no probability.
            first = token.offset == 0 and not token.top and token.logprob == 0.0
            tops = {other.token: finite(other.logprob) for other in token.top[: self._logprobs or 0]}
            return _Row(token.token, token.offset + shift, None if first else finite(token.logprob), tops or None)
        return self._scored(token.id, token.offset + shift, token.logprob)

    def _scored(self, id: int, offset: int, score: TokenLogprob | None) -> _Row:
        if score is None:
            return _Row(self._token(id), offset, None, None)
        top = self._logprobs or 0
        pairs = zip(score.top_ids[:top], score.top_logprobs[:top], strict=True)
        tops = {self._token(each): finite(logprob) for each, logprob in pairs}
        return _Row(self._token(id), offset, finite(score.logprob), tops)

    def _best(self) -> Iterator[int]:
        """Of each prompt's choices, the `n` with the highest mean log-probability per token, the best first."""
        generation = self._generation
        assert isinstance(generation, EngineGeneration | RemoteGeneration)
        choices: Sequence[Choice | RemoteChoice] = generation.choices
        for first in range(0, len(choices), self._made):
            made = choices[first : first + self._made]
            made = sorted(made, key=lambda choice: choice.logprob / max(choice.completion_tokens, 1), reverse=True)
            yield from (choice.index for choice in made[: self._n])

    def _add_tokens(self, choice: dict[str, Any], index: int, parts: list[Piece]) -> None:
        generation = self._generation
        first = index - index % self._made
        if self._ids:
            choice["token_ids"] = [id for part in parts for id in part.token_ids or ()]
        if isinstance(generation, RemoteGeneration):
            if self._ids and not index and generation.prompt_token_ids is not None and index not in self._told:
                self._told.add(index)
                choice["prompt_token_ids"] = generation.prompt_token_ids
            return
        assert isinstance(generation, EngineGeneration)
        prompt = generation.spec.prompts[index // self._made]
        if self._prompt_top is not None:
            scores = generation.choices[first].prompt_logprobs
            choice["prompt_logprobs"] = prompt_entries(generation.model.text, prompt.tokens, scores, self._prompt_top)
        if self._ids and index not in self._told:
            self._told.add(index)
            choice["prompt_token_ids"] = prompt.tokens

    def _prompt_rows(self, prompt: TokenPrompt, choice: Choice, text: TextModel) -> list[_Row]:
        logprobs = choice.prompt_logprobs or [None] * len(prompt.tokens)
        detokenizer = text.detokenizer(skip_special=False)
        rows: list[_Row] = []
        # What the tokenizer put before a text is not part of it.
        offset = 0 if prompt.text is None else -text.added_length(prompt.tokens, prompt.text)
        for token, logprob in zip(prompt.tokens, logprobs, strict=True):
            rows.append(self._scored(token, max(offset, 0), logprob))
            offset += len(detokenizer.push([token]))
        return rows

    def _legacy(self, rows: list[_Row]) -> dict[str, Any]:
        return {
            "tokens": [row.token for row in rows],
            "token_logprobs": [row.logprob for row in rows],
            "top_logprobs": [row.top for row in rows] if self._logprobs else None,
            "text_offset": [row.offset for row in rows],
        }

    def _token(self, id: int) -> str:
        """A token that is not whole characters is written as its bytes, so that tokens remain distinguishable."""
        if self._as_ids:
            return id_name(id)
        assert self._generation.text is not None, "ids are of a tokenizer that is known"
        data = self._generation.text.token_bytes(id)
        try:
            return data.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)


class _Row(NamedTuple):
    """A token, the offset of its text, its probability (None for the first token of a prompt) and the likeliest."""

    token: str
    offset: int
    logprob: float | None
    top: dict[str, float] | None


def _echoed_elsewhere(request: CompletionRequest, generation: Generation) -> bool:
    """Whether the server that runs the model gives the prompt back itself, with its probabilities."""
    scored = request.logprobs is not None or request.max_tokens == 0
    return scored and isinstance(generation, RemoteGeneration)
