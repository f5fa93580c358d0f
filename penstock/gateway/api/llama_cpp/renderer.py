"""Answers of llama.cpp's API: records with settings, timings and the reason of the end. A stream has a record for each
piece of text, and for tokens that add none; the last ones are those of the whole answer, without its text."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from penstock.engine.request import SamplingParams
from penstock.gateway.api.llama_cpp.schemas import LlamaCppOptions
from penstock.gateway.app.dialects import LLAMA_CPP
from penstock.gateway.app.exchange import encode_json
from penstock.gateway.generation.base import Generation
from penstock.gateway.generation.choice import AnyToken, Piece, SpelledToken
from penstock.gateway.generation.engine import EngineGeneration
from penstock.gateway.generation.logprobs import finite
from penstock.gateway.generation.remote import RemoteGeneration
from penstock.gateway.generation.renderer import Renderer
from penstock.gateway.generation.samplers import HERE
from penstock.gateway.generation.schemas import CompletionRequest
from penstock.protocol.errors import ApiError
from penstock.telemetry.timeline import EngineRun

PREFIX = "llama-cpp-"
NO_SLOT = -1
"""There are no slots here: a request joins the batch when there is room."""


@dataclass(slots=True)
class _Progress:
    """What a choice has said so far."""

    new_line: bool = False
    last: Piece | None = None


class LlamaCppRenderer(Renderer):
    """See above."""

    def __init__(
        self,
        generation: Generation,
        request: LlamaCppOptions,
        completion: CompletionRequest,
        *,
        n_predict: int | None,
        several: bool,
        prompts: Sequence[str | list[int]],
    ) -> None:
        """`n_predict`: None: as many as fit. `several`: the answer is a list. `prompts`: as they were sent."""
        self._generation = generation
        self._request = request
        self._completion = completion
        self._n_predict = -1 if n_predict is None else n_predict
        self._several = several
        self._prompts = prompts
        self._n = completion.n or 1
        self._top = completion.logprobs
        self._ids = bool(completion.return_token_ids)
        self._progress = [_Progress() for _ in generation.choices]
        self._head = {"id": f"{PREFIX}{generation.id}"}

    def opening(self) -> bytes:
        return b""

    def event(self, piece: Piece) -> bytes:
        self._take(piece)
        if not (piece.text or piece.tokens or piece.token_ids):
            return b""
        at = piece.index
        record: dict[str, Any] = {
            "index": at,
            "content": piece.text,
            "tokens": piece.token_ids or [],
            "stop": False,
            "id_slot": NO_SLOT,
            "tokens_predicted": self._generation.choices[at].completion_tokens,
            "tokens_evaluated": self._prompt_tokens(at),
        }
        if self._request.timings_per_token:
            record["timings"] = timings(self._generation.runs()[at])
        if self._top is not None:
            record["completion_probabilities"] = self._odds(piece.tokens)
        return _event(record)

    def closing(self) -> bytes:
        runs = self._generation.runs()
        return b"".join(_event(self._record(index, "", [], (), runs[index])) for index in range(len(runs)))

    def whole(self, pieces: list[list[Piece]]) -> bytes:
        runs = self._generation.runs()
        records = []
        for index, parts in enumerate(pieces):
            for part in parts:
                self._take(part)
            text = "".join(part.text for part in parts)
            ids = [id for part in parts for id in part.token_ids or ()]
            tokens = [token for part in parts for token in part.tokens]
            records.append(self._record(index, text, ids, tokens, runs[index]))
        return encode_json(records if self._several else records[0])

    def failure(self, error: ApiError) -> bytes:
        return _event(LLAMA_CPP.error(error, ""))

    def _take(self, piece: Piece) -> None:
        progress = self._progress[piece.index]
        progress.new_line = progress.new_line or "\n" in piece.text
        if piece.finish_reason is not None:
            progress.last = piece

    def _record(
        self, index: int, text: str, ids: list[int], tokens: Sequence[AnyToken], run: EngineRun
    ) -> dict[str, Any]:
        progress = self._progress[index]
        last = progress.last
        reason = "length" if last is None or last.finish_reason is None else last.finish_reason
        word = last.stop_reason if last is not None and isinstance(last.stop_reason, str) else ""
        stop_type = "limit"
        if reason == "stop":
            stop_type = "word" if word else "eos"
        elif reason != "length":
            stop_type = reason
        fields = self._request.response_fields
        record: dict[str, Any] = {
            **self._head,
            "index": index,
            "content": text,
            "tokens": ids if self._ids else [],
            "id_slot": NO_SLOT,
            "stop": True,
            "model": self._generation.model.name,
            "tokens_predicted": run.completion_tokens,
            "tokens_evaluated": run.prompt_tokens,
            "generation_settings": self._settings(index),
            "has_new_line": progress.new_line,
            "truncated": reason == "length" and self._filled(run),
            "stop_type": stop_type,
            "stopping_word": word if stop_type == "word" else "",
            "tokens_cached": run.cached_tokens,
            "timings": timings(run),
        }
        if not fields or "prompt" in fields:
            record["prompt"] = self._prompt(index)
        if tokens and self._top is not None:
            record["completion_probabilities"] = self._odds(tokens)
        return _selected(record, fields) if fields else record

    def _filled(self, run: EngineRun) -> bool:
        """Whether the window is full."""
        window = self._generation.model.context_window
        return window is not None and run.prompt_tokens + run.completion_tokens >= window

    def _prompt_tokens(self, index: int) -> int:
        generation = self._generation
        if isinstance(generation, EngineGeneration):
            return len(generation.spec.prompts[index // self._n].tokens)
        return generation.prompt_tokens

    def _prompt(self, index: int) -> str:
        """The prompt as the model read it, with what the tokenizer added."""
        generation, place = self._generation, index // self._n
        if isinstance(generation, RemoteGeneration):
            return generation.spec.prompts[place]
        assert isinstance(generation, EngineGeneration)
        text, prompt = generation.model.text, generation.spec.prompts[place]
        if prompt.text is None:
            return text.decode(prompt.tokens, skip_special=False)
        added = len(prompt.tokens) - len(text.without_added(prompt.tokens))
        return text.decode(prompt.tokens[:added], skip_special=False) + prompt.text

    def _settings(self, index: int) -> dict[str, Any]:
        generation = self._generation
        if isinstance(generation, EngineGeneration):
            params = generation.spec.prompts[index // self._n].params[index % self._n]
        else:
            params = _asked(self._completion)
        return {
            **settings(params),
            "n_predict": self._n_predict,
            "max_tokens": self._n_predict,
            "n_probs": self._top or 0,
            "stop": self._completion.stop or [],
            "ignore_eos": bool(self._completion.ignore_eos),
            "stream": bool(self._completion.stream),
            "grammar": self._completion.grammar or "",
            "timings_per_token": bool(self._request.timings_per_token),
        }

    def _odds(self, tokens: Sequence[AnyToken]) -> list[dict[str, Any]]:
        top = self._top or 0
        found = []
        for token in tokens:
            if isinstance(token, SpelledToken):
                found.append({**_spelled(token), "top_logprobs": [_spelled(other) for other in token.top[:top]]})
                continue
            pairs = zip(token.logprob.top_ids[:top], token.logprob.top_logprobs[:top], strict=True)
            found.append(
                {**self._odd(token.id, token.logprob.logprob), "top_logprobs": [self._odd(*pair) for pair in pairs]}
            )
        return found

    def _odd(self, id: int, logprob: float) -> dict[str, Any]:
        text = self._generation.text
        assert text is not None, "ids are of a tokenizer that is known"
        data = text.token_bytes(id)
        return {"id": id, "token": text.token_text(id), "bytes": list(data), "logprob": finite(logprob)}


def settings(params: SamplingParams) -> dict[str, Any]:
    """`generation_settings`: how tokens are sampled; filters that are not there have the values with which they do
    nothing."""
    return {
        "seed": params.seed,
        "temperature": params.temperature,
        "dynatemp_range": 0.0,
        "dynatemp_exponent": 1.0,
        "top_k": params.top_k,
        "top_p": params.top_p,
        "min_p": params.min_p,
        "top_n_sigma": -1.0,
        "xtc_probability": 0.0,
        "xtc_threshold": 0.1,
        "typical_p": params.typical_p,
        "repeat_last_n": -1,
        "repeat_penalty": params.repetition_penalty,
        "presence_penalty": params.presence_penalty,
        "frequency_penalty": params.frequency_penalty,
        "dry_multiplier": 0.0,
        "dry_base": 1.75,
        "dry_allowed_length": 2,
        "dry_penalty_last_n": 0,
        "dry_sequence_breakers": [],
        "mirostat": 0,
        "mirostat_tau": 5.0,
        "mirostat_eta": 0.1,
        "adaptive_target": -1.0,
        "adaptive_decay": 0.9,
        "stop": [],
        "max_tokens": -1,
        "n_predict": -1,
        "n_keep": 0,
        "n_discard": 0,
        "ignore_eos": False,
        "stream": False,
        "logit_bias": [{"token": token, "bias": bias} for token, bias in params.logit_bias.items()],
        "n_probs": 0,
        "min_keep": 0,
        "grammar": "",
        "grammar_lazy": False,
        "grammar_triggers": [],
        "preserved_tokens": [],
        "samplers": list(HERE),
        "timings_per_token": False,
        "post_sampling_probs": False,
        "lora": [],
    }


def timings(run: EngineRun) -> dict[str, Any]:
    """How long a choice took, in milliseconds; a prompt's cached tokens are not part of `prompt_n`."""
    prefill = run.prefill_s
    if prefill is None:
        begun, first = run.submitted_at, run.first_at
        prefill = 0.0 if begun is None or first is None else first - begun
    decode = run.decode_s
    if decode is None:
        decode = 0.0 if run.first_at is None or run.last_at is None else run.last_at - run.first_at
    computed = max(run.prompt_tokens - run.cached_tokens, 0)
    return {
        "cache_n": run.cached_tokens,
        **_pace("prompt", computed, prefill),
        **_pace("predicted", run.completion_tokens, decode),
    }


def _pace(name: str, tokens: int, seconds: float) -> dict[str, Any]:
    ms = seconds * 1000
    return {
        f"{name}_n": tokens,
        f"{name}_ms": ms,
        f"{name}_per_token_ms": ms / tokens if tokens else 0.0,
        f"{name}_per_second": tokens / seconds if seconds > 0 else 0.0,
    }


def _asked(request: CompletionRequest) -> SamplingParams:
    """What another server was asked; what the request does not give is that server's own, and not known here."""
    asked = SamplingParams(logit_bias=request.logit_bias or {})
    return SamplingParams(
        temperature=asked.temperature if request.temperature is None else request.temperature,
        top_k=request.top_k or 0,
        top_p=asked.top_p if request.top_p is None else request.top_p,
        min_p=request.min_p or 0.0,
        typical_p=asked.typical_p if request.typical_p is None else request.typical_p,
        presence_penalty=request.presence_penalty or 0.0,
        frequency_penalty=request.frequency_penalty or 0.0,
        repetition_penalty=request.repetition_penalty or 1.0,
        logit_bias=asked.logit_bias,
        seed=request.seed or 0,
    )


def _spelled(token: SpelledToken) -> dict[str, Any]:
    data = list(token.token.encode()) if token.bytes is None else token.bytes
    return {"token": token.token, "bytes": data, "logprob": finite(token.logprob)}


def _selected(record: dict[str, Any], fields: Sequence[str]) -> dict[str, Any]:
    """Only these fields; `a/b` is the field `b` in `a`, and those that are not there are left out."""
    found: dict[str, Any] = {}
    for path in fields:
        value: Any = record
        for name in path.split("/"):
            value = value.get(name, ...) if isinstance(value, dict) else ...
        if value is not ...:
            found[path] = value
    return found


def _event(record: object) -> bytes:
    return b"data: " + encode_json(record) + b"\n\n"
