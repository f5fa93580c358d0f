"""Answers of SGLang's API: text, token ids and `meta_info`. Each event of a stream has everything that was said so far.

That makes a stream as long as the square of its text. So from some length on an event comes only when the text has
grown by a small part of it, which bounds the stream to a multiple of the text."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from penstock.engine.request import TokenLogprob
from penstock.gateway.api.sglang.completion_request import Asked
from penstock.gateway.app.exchange import encode_json
from penstock.gateway.generation.base import Generation
from penstock.gateway.generation.choice import AnyToken, Choice, Piece, SpelledToken
from penstock.gateway.generation.engine import EngineGeneration
from penstock.gateway.generation.logprobs import finite
from penstock.gateway.generation.remote import RemoteGeneration
from penstock.gateway.generation.renderer import DONE, Renderer
from penstock.protocol.errors import ApiError
from penstock.telemetry.timeline import EngineRun

PREFIX = "sglang-"
EVERY_PIECE = 256
"""Pieces of a choice that each have an event; from then on, one for every 1/256 more."""
Json = dict[str, Any]


@dataclass(slots=True)
class _Said:
    """What a choice has said so far."""

    text: str = ""
    ids: list[int] = field(default_factory=list)
    logprobs: list[list[Any]] = field(default_factory=list)
    top: list[list[list[Any]]] = field(default_factory=list)
    last: Piece | None = None
    pieces: int = 0
    due: int = 0
    """The number of the piece that has the next event."""


class SglangRenderer(Renderer):
    """See above."""

    def __init__(
        self, generation: Generation, asked: Asked, *, texts: bool, prompt_ids: bool, elapsed: Callable[[], float]
    ) -> None:
        """`texts`: log-probabilities come with the text of tokens. `prompt_ids`: the prompt's token ids are shown.
        `elapsed`: seconds since the request arrived."""
        self._generation = generation
        self._asked = asked
        self._texts = texts
        self._prompt_ids = prompt_ids
        self._elapsed = elapsed
        self._n = asked.completion.n or 1
        self._scored = asked.completion.logprobs is not None
        self._ids = bool(asked.completion.return_token_ids)
        self._said = [_Said() for _ in generation.choices]
        self._head = {"id": f"{PREFIX}{generation.id}"}

    def opening(self) -> bytes:
        return b""

    def event(self, piece: Piece) -> bytes:
        said = self._said[piece.index]
        self._take(piece)
        if piece.finish_reason is not None or said.pieces < said.due:
            return b""
        said.due = said.pieces + 1 + said.pieces // EVERY_PIECE
        return self._event(piece.index, self._generation.runs()[piece.index])

    def closing(self) -> bytes:
        runs = self._generation.runs()
        return b"".join(self._event(index, runs[index]) for index in range(len(runs))) + DONE

    def whole(self, pieces: list[list[Piece]]) -> bytes:
        for parts in pieces:
            for part in parts:
                self._take(part)
        runs = self._generation.runs()
        records = [self._record(index, runs[index]) for index in range(len(runs))]
        return encode_json(records if self._asked.several else records[0])

    def failure(self, error: ApiError) -> bytes:
        return super().failure(error) + DONE

    def _event(self, index: int, run: EngineRun) -> bytes:
        record = self._record(index, run)
        if self._asked.several:
            record["index"] = index
        return b"data: " + encode_json(record) + b"\n\n"

    def _take(self, piece: Piece) -> None:
        said = self._said[piece.index]
        said.text += piece.text
        said.pieces += 1
        said.ids += piece.token_ids or ()
        if self._scored:
            said.logprobs += [self._logprob(token) for token in piece.tokens]
            if self._asked.top:
                said.top += [self._likeliest(token) for token in piece.tokens]
        if piece.finish_reason is not None:
            said.last = piece

    def _record(self, index: int, run: EngineRun) -> Json:
        said, generation = self._said[index], self._generation
        meta: Json = {
            "id": self.response_id if len(self._said) == 1 else f"{self.response_id}-{index}",
            "finish_reason": None if said.last is None else self._reason(said.last, said.ids, run),
            "prompt_tokens": run.prompt_tokens,
            "weight_version": generation.model.fingerprint,
            "completion_tokens": run.completion_tokens,
            "cached_tokens": run.cached_tokens,
            "reasoning_tokens": 0,
        }
        if said.last is not None:
            meta["e2e_latency"] = self._elapsed()
        if self._scored:
            meta |= {
                "input_token_logprobs": self._prompt(index, top=False),
                "output_token_logprobs": said.logprobs,
                "output_token_logprobs_length": len(said.logprobs),
            }
            if self._asked.top:
                meta |= {"input_top_logprobs": self._prompt(index, top=True), "output_top_logprobs": said.top}
        record: Json = {"text": said.text, "meta_info": meta}
        if self._ids:
            record["output_ids"] = said.ids
        if self._prompt_ids and isinstance(generation, EngineGeneration):
            record["prompt_token_ids"] = generation.spec.prompts[index // self._n].tokens
        return record

    def _reason(self, last: Piece, ids: Sequence[int], run: EngineRun) -> Json:
        reason = last.finish_reason
        if reason == "stop":
            matched = last.stop_reason
            return {"type": "stop", "matched": (ids[-1] if ids else None) if matched is None else matched}
        if reason == "length":
            return {"type": "length", "length": run.completion_tokens}
        return {"type": reason}

    def _logprob(self, token: AnyToken) -> list[Any]:
        if isinstance(token, SpelledToken):
            return [finite(token.logprob), None, token.token if self._texts else None]
        return self._entry(token.logprob.logprob, token.id)

    def _likeliest(self, token: AnyToken) -> list[list[Any]]:
        top = self._asked.top
        if isinstance(token, SpelledToken):
            return [[finite(each.logprob), None, each.token if self._texts else None] for each in token.top[:top]]
        return self._top(token.logprob)

    def _top(self, score: TokenLogprob) -> list[list[Any]]:
        top = self._asked.top
        pairs = zip(score.top_logprobs[:top], score.top_ids[:top], strict=True)
        return [self._entry(logprob, id) for logprob, id in pairs]

    def _entry(self, logprob: float | None, id: int) -> list[Any]:
        text = self._generation.text
        assert text is not None, "ids are of a tokenizer that is known"
        return [None if logprob is None else finite(logprob), id, text.token_text(id) if self._texts else None]

    def _prompt(self, index: int, *, top: bool) -> list[Any]:
        """Log-probabilities of the prompt, from where they are wanted; the first token of all has none."""
        generation, start = self._generation, self._asked.from_token
        if start is None or not isinstance(generation, EngineGeneration):
            assert start is None or isinstance(generation, RemoteGeneration)
            return []
        tokens = generation.spec.prompts[index // self._n].tokens
        first = generation.choices[index - index % self._n]
        assert isinstance(first, Choice)
        scores = first.prompt_logprobs or [None] * len(tokens)
        pairs = list(zip(tokens, scores, strict=True))[start:]
        if top:
            return [None if score is None else self._top(score) for _, score in pairs]
        return [self._entry(None if score is None else score.logprob, token) for token, score in pairs]
