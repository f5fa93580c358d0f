"""Answers of text-generation-inference: the text with its tokens; a stream has an event for each token, and the last
one has the whole text too.

The text of a token is what it adds to the text, so the texts of all tokens make up the whole."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from penstock.gateway.api.tgi.completion_request import samples
from penstock.gateway.api.tgi.schemas import TgiParameters
from penstock.gateway.app.dialects import TGI
from penstock.gateway.app.exchange import encode_json
from penstock.gateway.generation.base import Generation
from penstock.gateway.generation.choice import AnyToken, Choice, Piece, SpelledToken
from penstock.gateway.generation.engine import EngineGeneration
from penstock.gateway.generation.logprobs import finite
from penstock.gateway.generation.remote import RemoteGeneration
from penstock.gateway.generation.renderer import Renderer
from penstock.protocol.errors import ApiError
from penstock.text import TextModel

UNKNOWN = -1
"""The id of a token that only its text is known of."""
Json = dict[str, Any]


@dataclass(slots=True)
class _Said:
    """What a choice has said so far."""

    text: str = ""
    shown: int = 0
    """Characters whose tokens have been shown."""
    tokens: list[Json] = field(default_factory=list)
    top: list[list[Json]] = field(default_factory=list)
    last: Piece | None = None


class TgiRenderer(Renderer):
    """See above."""

    def __init__(
        self,
        generation: Generation,
        asked: TgiParameters,
        *,
        prompt: str,
        listed: bool,
    ) -> None:
        """`prompt`: what comes before the text, where the whole text is wanted. `listed`: the answer is a list."""
        self._generation = generation
        self._asked = asked
        self._prompt = prompt
        self._listed = listed
        self._details = bool(asked.details or asked.decoder_input_details)
        self._top = asked.top_n_tokens or 0
        self._said = [_Said() for _ in generation.choices]
        self._events = 0
        self._held: Json | None = None
        """The last event, which waits for the settlement."""
        self._head = {"id": f"tgi-{generation.id}"}

    def opening(self) -> bytes:
        return b""

    def event(self, piece: Piece) -> bytes:
        said = self._said[piece.index]
        found = self._tokens(said, piece)
        ends = piece.finish_reason is not None
        if ends and (not found or said.shown < len(said.text)):
            rest, said.shown = said.text[said.shown :], len(said.text)
            found.append((_token(UNKNOWN, rest, None, special=not rest), []))
        events = []
        for token, top in found:
            self._events += 1
            event: Json = {"index": self._events, "token": token}
            if self._top:
                event["top_tokens"] = top
            events.append(event | {"generated_text": None, "details": None})
        if ends:
            self._held = events.pop()
        return b"".join(map(_event, events))

    def closing(self) -> bytes:
        said = self._said[0]
        assert self._held is not None, "an answer that has ended has a last piece"
        self._held["generated_text"] = self._prompt + said.text
        self._held["details"] = None
        if self._details:
            self._held["details"] = {
                "finish_reason": _reason(said.last),
                "generated_tokens": self._generation.completion_tokens,
                "seed": self._seed(0),
                "input_length": self._generation.prompt_tokens,
            }
        return _event(self._held)

    def whole(self, pieces: list[list[Piece]]) -> bytes:
        for index, parts in enumerate(pieces):
            said = self._said[index]
            for part in parts:
                found = self._tokens(said, part)
                said.tokens += [token for token, _ in found]
                said.top += [top for _, top in found]
            if said.tokens:
                said.tokens[-1]["text"] += said.text[said.shown :]
        best = self._best()
        answer: Json = {"generated_text": self._prompt + self._said[best].text}
        if self._details:
            answer["details"] = self._detail(best)
            if len(pieces) > 1:
                others = (index for index in range(len(pieces)) if index != best)
                answer["details"]["best_of_sequences"] = [
                    {"generated_text": self._prompt + self._said[index].text, **self._detail(index)} for index in others
                ]
        return encode_json([answer] if self._listed else answer)

    def failure(self, error: ApiError) -> bytes:
        return _event(TGI.error(error, ""))

    def _tokens(self, said: _Said, piece: Piece) -> list[tuple[Json, list[Json]]]:
        """The tokens of a piece, each with the likeliest ones at its place."""
        said.text += piece.text
        if piece.finish_reason is not None:
            said.last = piece
        found: list[tuple[Json, list[Json]]] = []
        tokens = piece.tokens
        for at, token in enumerate(tokens):
            end = (
                len(said.text) if at + 1 == len(tokens) else max(min(tokens[at + 1].offset, len(said.text)), said.shown)
            )
            text, said.shown = said.text[said.shown : end], end
            found.append((self._shown(token, text), self._likeliest(token)))
        if not tokens and piece.text and not self._known:
            said.shown = len(said.text)
            found.append((_token(UNKNOWN, piece.text, None), []))
        return found

    @property
    def _known(self) -> bool:
        """Whether tokens come with the text."""
        generation = self._generation
        assert isinstance(generation, EngineGeneration | RemoteGeneration)
        return generation.spec.logprobs

    def _shown(self, token: AnyToken, text: str) -> Json:
        if isinstance(token, SpelledToken):
            return _token(UNKNOWN, text, finite(token.logprob))
        model = self._text
        return _token(token.id, text, finite(token.logprob.logprob), special=model.is_special(token.id))

    def _likeliest(self, token: AnyToken) -> list[Json]:
        if isinstance(token, SpelledToken):
            return [_token(UNKNOWN, other.token, finite(other.logprob)) for other in token.top[: self._top]]
        model = self._text
        pairs = zip(token.logprob.top_ids[: self._top], token.logprob.top_logprobs[: self._top], strict=True)
        return [
            _token(id, model.token_text(id), finite(logprob), special=model.is_special(id)) for id, logprob in pairs
        ]

    @property
    def _text(self) -> TextModel:
        assert self._generation.text is not None, "ids are of a tokenizer that is known"
        return self._generation.text

    def _best(self) -> int:
        """The choice with the highest mean log-probability per token."""
        generation = self._generation
        assert isinstance(generation, EngineGeneration | RemoteGeneration)
        choices: Sequence[Any] = generation.choices
        return max(
            range(len(choices)),
            key=lambda index: choices[index].logprob / max(choices[index].completion_tokens, 1),
        )

    def _detail(self, index: int) -> Json:
        said = self._said[index]
        detail: Json = {
            "finish_reason": _reason(said.last),
            "generated_tokens": self._generation.choices[index].completion_tokens,
            "seed": self._seed(index),
            "prefill": self._prefill(index),
            "tokens": said.tokens,
        }
        if self._top:
            detail["top_tokens"] = said.top
        return detail

    def _seed(self, index: int) -> int | None:
        """None where nothing was drawn, or another server drew it."""
        generation = self._generation
        if not isinstance(generation, EngineGeneration):
            return self._asked.seed if samples(self._asked) else None
        params = generation.spec.prompts[0].params[index]
        return None if params.greedy else params.seed

    def _prefill(self, index: int) -> list[Json]:
        generation = self._generation
        if not self._asked.decoder_input_details or not isinstance(generation, EngineGeneration):
            return []
        tokens = generation.spec.prompts[0].tokens
        scorer = generation.choices[0]
        assert isinstance(scorer, Choice)
        scores = scorer.prompt_logprobs or [None] * len(tokens)
        return [
            {"id": id, "text": self._text.token_text(id), "logprob": None if score is None else finite(score.logprob)}
            for id, score in zip(tokens, scores, strict=True)
        ]


def _token(id: int, text: str, logprob: float | None, *, special: bool = False) -> Json:
    return {"id": id, "text": text, "logprob": logprob, "special": special}


def _reason(last: Piece | None) -> str:
    if last is None or last.finish_reason in (None, "length"):
        return "length"
    if last.finish_reason != "stop":
        return str(last.finish_reason)
    return "stop_sequence" if isinstance(last.stop_reason, str) else "eos_token"


def _event(record: object) -> bytes:
    return b"data:" + encode_json(record) + b"\n\n"
