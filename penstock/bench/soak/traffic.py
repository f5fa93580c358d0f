"""Random requests, and what happens to each: a pure function of the seed and the request's number."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from penstock.bench.soak.engines import ADAPTERS, VOCAB, WINDOW
from penstock.engine.grammar.interface import Vocabulary
from penstock.engine.request import Request, SamplingParams

Fate = Literal["finish", "cancel", "expire", "refuse"]
_FATES: dict[Fate, int] = {"finish": 70, "cancel": 16, "expire": 10, "refuse": 4}
"""In percent."""

_WORDS = [b"ab", b"abc", b"10", b"the ", b'{"', b'":', b'", "', b"true", b"<tool_call>", b'{"name": ', b"\xc3", b"\xa9"]
_FIRST_SPECIAL, END = VOCAB - 9, VOCAB - 1
_TEXT = [bytes([byte]) for byte in range(128)] + _WORDS
_NAMES = [*_TEXT, *[b""] * (_FIRST_SPECIAL - len(_TEXT)), *(b"<%d>" % token for token in range(_FIRST_SPECIAL, VOCAB))]
VOCABULARY = Vocabulary(
    _NAMES, frozenset(range(_FIRST_SPECIAL, VOCAB)), (END,), lambda text: list(text.encode("ascii"))
)


def text_of(tokens: Sequence[int]) -> str:
    """The text of generated tokens."""
    return b"".join(_NAMES[token] for token in tokens if token < _FIRST_SPECIAL).decode(errors="replace")


@dataclass(frozen=True, slots=True)
class Form:
    """A format that an answer may have to have."""

    name: str
    grammar: str
    valid: Callable[[list[int]], bool]
    """Whether a complete answer, as tokens without the end token, matches the grammar."""


@dataclass(frozen=True, slots=True)
class Case:
    """One request and what happens to it."""

    request: Request
    fate: Fate
    after: int = 0
    """Steps after which a request is cancelled."""
    form: Form | None = None


class Traffic:
    """Makes the cases of a soak. The documents that prompts begin with are the same in all rounds."""

    def __init__(self, seed: int, forms: Sequence[Form]) -> None:
        self.seed = seed
        self.forms = forms
        rng = random.Random(f"{seed} documents")
        self._documents = [_tokens(rng, rng.randrange(10, 150)) for _ in range(6)]

    def case(self, round_: int, index: int, earlier: Sequence[list[int]], adapters: bool = True) -> Case:
        """The request number `index` of a round; `earlier`: texts that it may continue."""
        rng = random.Random(f"{self.seed} {round_} {index}")
        prompt = self._prompt(rng, earlier)
        values = _params(rng)
        form = rng.choice(self.forms) if rng.random() < 0.35 else None
        if form is not None:
            values |= {"grammar": form.grammar, "stop_token_ids": (END,), "max_tokens": rng.choice((12, 48, 80))}
        request = Request(
            f"{round_}-{index}",
            prompt,
            SamplingParams(**values),
            priority=rng.choice((0, 0, 0, 1, -1)),
            timeout_s=rng.choice((None, None, 3600.0)),
            cache_salt=rng.choice(("", "", "", "", "other")),
            speculation=rng.random() < 0.9,
            adapter=rng.choice(ADAPTERS) if rng.random() < 0.55 and adapters else "",
        )
        fate = rng.choices(list(_FATES), list(_FATES.values()))[0]
        if fate == "cancel":
            return Case(request, fate, rng.choice((0, 1, 2, rng.randrange(80))), form)
        if fate == "expire":
            return Case(replace(request, timeout_s=rng.choice((0.0, 0.3 * rng.random()))), fate, form=form)
        if fate == "refuse":
            return Case(_spoiled(rng, request), fate)
        return Case(request, "finish", form=form)

    def _prompt(self, rng: random.Random, earlier: Sequence[list[int]]) -> list[int]:
        kind = rng.random()
        if earlier and kind < 0.3:
            head = rng.choice(earlier)
        elif kind < 0.8:
            document = rng.choice(self._documents)
            head = document if rng.random() < 0.7 else document[: rng.randrange(1, len(document))]
        else:
            head = []
        if rng.random() < 0.2:  # something for n-gram drafts to find
            head = head + _tokens(rng, 7) * rng.randrange(2, 5)
        return (head + _tokens(rng, rng.randrange(1, 40)))[-(WINDOW - 100) :]


def _tokens(rng: random.Random, count: int) -> list[int]:
    return [rng.randrange(VOCAB) for _ in range(count)]


def _params(rng: random.Random) -> dict[str, Any]:
    values: dict[str, Any] = {"max_tokens": rng.choice((1, 6, 24, 40, 90)), "seed": rng.randrange(1 << 40)}
    values["temperature"] = rng.choice((0.0, 0.0, 0.3, 0.8, 1.2))
    if rng.random() < 0.3:
        values |= {"top_k": rng.choice((0, 3, 20)), "top_p": rng.choice((0.8, 0.95)), "min_p": rng.choice((0.0, 0.05))}
    if rng.random() < 0.3:
        values |= {"presence_penalty": 0.6, "frequency_penalty": 0.3, "repetition_penalty": rng.choice((1.0, 1.3))}
    if rng.random() < 0.25:
        values["logit_bias"] = {rng.randrange(VOCAB): 4.0, rng.randrange(VOCAB): -4.0}
    if rng.random() < 0.4:
        values["stop_token_ids"] = tuple(rng.sample(range(VOCAB), 5))
        values["min_tokens"] = rng.choice((0, 5, 20))
    if rng.random() < 0.35:
        values["logprobs"] = rng.choice((0, 3))
    if rng.random() < 0.04:
        values["prompt_logprobs"] = 2
    return values


def _spoiled(rng: random.Random, request: Request) -> Request:
    """A request that must be refused, alone."""
    kind = rng.randrange(5)
    if kind == 0:
        return replace(request, adapter="nobody")
    if kind == 1:
        return replace(request, prompt=_tokens(rng, WINDOW))
    if kind == 2:
        return replace(request, prompt=[*request.prompt, VOCAB])
    if kind == 3:
        return replace(request, params=replace(request.params, logit_bias={VOCAB: 1.0}))
    return replace(request, params=replace(request.params, grammar="nonsense"))
