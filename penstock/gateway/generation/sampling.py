"""From a request to the sampling parameters of the engine; what depends on the model is checked here."""

from __future__ import annotations

import random
from collections.abc import Callable, Collection
from dataclasses import dataclass, replace
from functools import partial
from typing import TypeVar

from penstock.config.sampling import SamplingDefaults
from penstock.engine.request import EngineInfo, SamplingParams
from penstock.gateway.accounting.request_limits import Cap
from penstock.gateway.generation.schemas import Sampling, TokenDetails
from penstock.gateway.generation.settings import GenerationSettings
from penstock.protocol.errors import ContextLengthExceeded, ContextQuotaExceeded, InvalidRequest
from penstock.text import TextModel

SEED_MASK = 2**63 - 1
Number = TypeVar("Number", int, float)
MOST_PROMPT_SCORES = 2**19
"""Log-probabilities of prompt tokens in one answer: some 40 MB of JSON."""


@dataclass(frozen=True, slots=True)
class TokenLimit:
    """How many tokens a request asks for, before the prompt's length is known."""

    max_tokens: int | None
    """As asked; None: as many as fit, at most `default`."""
    default: int | None
    param: str = "max_tokens"
    clip: bool = False
    """More than fits the window is not refused: the answer then ends where the window does."""
    default_is: str = ""
    """The setting that `default` comes from."""
    clipped_by: str = ""
    """The limit that `max_tokens` was lowered to, where that is no reason to refuse the request."""

    def lowered(self, default: int | None, setting: str) -> TokenLimit:
        """With this default, if it is lower."""
        if default is None or (self.default is not None and self.default <= default):
            return self
        return replace(self, default=default, default_is=setting)

    def capped(self, cap: Cap | None, *, asked: bool = True) -> TokenLimit:
        """Within what the caller may ask for; a request for more is refused, unless it may be clipped. `asked`: the
        request itself gave `max_tokens`."""
        if cap is None:
            return self
        if self.max_tokens is not None and self.max_tokens > cap.most:
            if asked and not self.clip:
                raise cap.refusal(f"`{self.param}` is {self.max_tokens}", "completion tokens", self.param)
            return replace(self, max_tokens=cap.most, clipped_by=cap.name)
        return self.lowered(cap.most, cap.name)


def sampling_params(
    request: Sampling,
    info: EngineInfo,
    eos: tuple[int, ...],
    limit: TokenLimit,
    *,
    defaults: SamplingDefaults,
    logprobs: int | None,
    bad_words: tuple[tuple[int, ...], ...] = (),
    grammar: str = "",
) -> SamplingParams:
    """Everything, with the seed of choice 0. `defaults`: the model's, for what the request does not give.

    Whether there is room for `max_tokens` depends on the prompt (`fit`).
    """
    stop_ids = tuple(request.stop_token_ids or ())
    check_token_ids(stop_ids, info.vocab_size, "stop_token_ids")
    check_token_ids(request.logit_bias or {}, info.vocab_size, "logit_bias")
    check_token_ids(request.allowed_token_ids or (), info.vocab_size, "allowed_token_ids")
    check_stream_options(request)
    seed = random.getrandbits(63) if request.seed is None else request.seed & SEED_MASK
    return SamplingParams(
        max_tokens=limit.max_tokens or 0,
        min_tokens=request.min_tokens or 0,
        temperature=first_given(request.temperature, defaults.temperature, 1.0),
        top_k=max(first_given(request.top_k, defaults.top_k, 0), 0),
        # 0 keeps the most likely token only, which any tiny mass does.
        top_p=max(first_given(request.top_p, defaults.top_p, 1.0), 1e-9),
        # It was chosen for the default temperature: one that asks for variety must not be filtered back to none.
        min_p=first_given(request.min_p, defaults.min_p if request.temperature is None else None, 0.0),
        typical_p=first_given(request.typical_p, defaults.typical_p, 1.0),
        presence_penalty=first_given(request.presence_penalty, defaults.presence_penalty, 0.0),
        frequency_penalty=first_given(request.frequency_penalty, defaults.frequency_penalty, 0.0),
        repetition_penalty=first_given(request.repetition_penalty, defaults.repetition_penalty, 1.0),
        logit_bias=request.logit_bias or {},
        seed=seed,
        stop_token_ids=stop_ids if request.ignore_eos else tuple(dict.fromkeys((*eos, *stop_ids))),
        logprobs=logprobs,
        allowed_token_ids=tuple(dict.fromkeys(request.allowed_token_ids or ())),
        bad_words=bad_words,
        grammar=grammar,
    )


def check_stream_options(request: Sampling) -> None:
    if request.stream_options is None:
        return
    if not request.stream:
        raise InvalidRequest("`stream_options` is only allowed with `stream: true`.", param="stream_options")


def first_given(asked: Number | None, default: Number | None, neutral: Number) -> Number:
    """What the request gives (null gives nothing), or the model's default, or what changes nothing."""
    return asked if asked is not None else default if default is not None else neutral


def fit(
    params: SamplingParams,
    prompt_tokens: int,
    limit: TokenLimit,
    window: int,
    prompt_param: str,
    quota: Cap | None = None,
) -> SamplingParams:
    """Set `max_tokens` so that prompt and completion fit the window, or say why they cannot. `quota`: how much of the
    window the caller may use. Of a longer prompt, one token more than that may be all that was counted."""
    exceeded: Callable[..., ContextLengthExceeded] = ContextLengthExceeded
    if quota is not None and quota.most < window:
        window, exceeded = quota.most, partial(ContextQuotaExceeded, whose=quota.whose, scope=quota.scope)
    room = window - prompt_tokens
    if room < 1:
        cut = prompt_tokens == window + 1
        raise exceeded(limit=window, prompt_tokens=prompt_tokens, at_least=cut, param=prompt_param)
    if limit.max_tokens is not None:
        if limit.max_tokens > room and not limit.clip:
            raise exceeded(limit=window, prompt_tokens=prompt_tokens, max_tokens=limit.max_tokens, param=prompt_param)
        max_tokens = min(limit.max_tokens, room)
    else:
        max_tokens = room if limit.default is None else min(room, limit.default)
    if params.min_tokens > max_tokens:
        raise InvalidRequest(
            f"`min_tokens` ({params.min_tokens}) is more than may be generated ({max_tokens}).", param="min_tokens"
        )
    return params if params.max_tokens == max_tokens else replace(params, max_tokens=max_tokens)


def length_limit(params: SamplingParams, limit: TokenLimit, window: int, quota: Cap | None) -> str:
    """The limit of this server that ends an answer of `params.max_tokens`; empty when the request chose that."""
    if limit.max_tokens is not None:
        if params.max_tokens >= limit.max_tokens:
            return limit.clipped_by
    elif limit.default is not None and params.max_tokens >= limit.default:
        return limit.default_is
    return "context_tokens" if quota is not None and quota.most < window else "context_window"


def token_limit(
    asked: int | None, settings: GenerationSettings, *, default: int | None, param: str, clip: bool = False
) -> TokenLimit:
    """Apply the server's own cap to what was asked."""
    cap = settings.max_tokens
    if asked is not None and cap is not None and asked > cap:
        raise InvalidRequest(f"`{param}` is {asked}; this server allows at most {cap}.", param=param)
    return TokenLimit(asked, default, param, clip, "default_max_tokens").lowered(cap, "max_tokens")


def choice_params(params: SamplingParams, n: int | None, *, score_once: bool = False) -> list[SamplingParams]:
    """The parameters of each of `n` choices: the same, with the next seed. `score_once`: the first choice scores the
    prompt for all of them; the others can then take it from the prefix cache."""
    if n is None or n == 1:
        return [params]
    other = replace(params, prompt_logprobs=None) if score_once else params
    return [params, *(replace(other, seed=(params.seed + i) & SEED_MASK) for i in range(1, n))]


def forbidden_words(request: Sampling, text: TextModel) -> tuple[tuple[int, ...], ...]:
    """`bad_words` as sequences of tokens: each as the beginning of a text and behind a space."""
    found: dict[tuple[int, ...], None] = {}
    for word in request.bad_words or ():
        if not word.strip():
            raise InvalidRequest("`bad_words` must not contain an empty word.", param="bad_words")
        for spelling in (word.lstrip(), f" {word.lstrip()}"):
            found[tuple(text.encode(spelling, special=False, add_special_tokens=False))] = None
    return tuple(found)


def check_prompt_scores(request: TokenDetails, tokens: int, choices: int) -> None:
    """Log-probabilities of a prompt must fit an answer."""
    if request.prompt_logprobs is None:
        return
    if request.stream:
        raise InvalidRequest("`prompt_logprobs` is not available in streams.", param="prompt_logprobs")
    entries = (request.prompt_logprobs + 1) * tokens * choices
    if entries > MOST_PROMPT_SCORES:
        raise InvalidRequest(
            f"`prompt_logprobs` asks for {entries} log-probabilities; one answer holds at most {MOST_PROMPT_SCORES}. "
            "Ask for fewer per token, or for fewer prompts.",
            param="prompt_logprobs",
        )


def stop_strings(request: Sampling) -> list[str]:
    stops = [request.stop] if isinstance(request.stop, str) else list(request.stop or ())
    if "" in stops:
        raise InvalidRequest("`stop` must not contain an empty string.", param="stop")
    return stops


def check_token_ids(ids: Collection[int], vocab_size: int, param: str) -> None:
    if ids and (worst := max(ids)) >= vocab_size:
        raise InvalidRequest(
            f"`{param}` contains token id {worst}; this model's ids are 0 to {vocab_size - 1}.", param=param
        )


def check_foreign_tokens(request: Sampling) -> None:
    """Before another model answers: ids mean other tokens there."""
    for name in ("logit_bias", "stop_token_ids", "allowed_token_ids"):
        if getattr(request, name):
            raise InvalidRequest("Token ids are those of the model that was asked for.", param=name)


def check_choices(prompts: int, n: int, settings: GenerationSettings, cap: Cap | None = None) -> None:
    """`cap`: of the caller."""
    asked = f"`n` is {n}" if prompts == 1 else f"{prompts} prompts with `n` {n} make {prompts * n} choices"
    param = "n" if prompts == 1 else "prompt"
    if prompts * n > settings.max_choices:
        raise InvalidRequest(
            f"{asked}; this server allows at most {settings.max_choices} in one request.",
            param=param,
        )
    if cap is not None and prompts * n > cap.most:
        raise cap.refusal(asked, "choices", param)
