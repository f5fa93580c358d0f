"""Requests of SGLang's API as text completion requests."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from penstock.gateway.api.sglang.schemas import ADVICE, OF_LOGPROBS, OFF, REFUSED, SglangRequest, SglangSampling
from penstock.gateway.app.decoding import given, not_supported
from penstock.gateway.app.exchange import Exchange
from penstock.gateway.generation.request_decoder import ignore_advice
from penstock.gateway.generation.schemas import CompletionRequest
from penstock.protocol.errors import InvalidRequest

_IN_SAMPLING = (
    *("temperature", "top_p", "top_k", "min_p", "frequency_penalty", "presence_penalty", "repetition_penalty"),
    *("logit_bias", "stop", "stop_token_ids", "ignore_eos", "skip_special_tokens", "no_stop_trim", "n"),
    *("json_schema", "regex", "ebnf", "structural_tag"),
)
NAMES = (
    (r"max_tokens$", "sampling_params.max_new_tokens"),
    (r"min_tokens$", "sampling_params.min_new_tokens"),
    (r"seed$", "sampling_params.sampling_seed"),
    (rf"({'|'.join(_IN_SAMPLING)})$", r"sampling_params.\1"),
    (r"prompt_logprobs$", "logprob_start_len"),
    (r"logprobs$", "return_logprob"),
    (r"return_token_ids$", "return_prompt_token_ids"),
)
"""Parameters that text completion requests call differently; see `renamed`. Those of the prompt and of a grammar depend
on what was sent, see `Asked.names`."""


@dataclass(frozen=True, slots=True)
class Asked:
    """A request, as far as it does not depend on the model."""

    model: str | None
    completion: CompletionRequest
    prompts: Sequence[str | list[int]]
    max_tokens: int | None
    several: bool
    """The answer is a list."""
    from_token: int | None
    """The first token of the prompt whose log-probability is shown; None: none is."""
    top: int
    """How many of the likeliest tokens are shown at each place."""

    @property
    def names(self) -> tuple[tuple[str, str], ...]:
        """See `NAMES`."""
        prompt = "text" if isinstance(self.prompts[0], str) else "input_ids"
        given = (name for name in ("json_schema", "regex", "ebnf", "structural_tag") if getattr(self.completion, name))
        grammar = f"sampling_params.{next(given, 'json_schema')}"
        return (*NAMES, (r"prompt$", prompt), (r"response_format.*", grammar))


def completion_request(exchange: Exchange, request: SglangRequest) -> Asked:
    """What of the request has no effect is noted for the header."""
    _check(exchange, request)
    prompts, several = _prompts(request)
    sampling = _one("sampling_params", request.sampling_params) or SglangSampling()
    _check_sampling(exchange, sampling)
    scored = bool(_one("return_logprob", request.return_logprob))
    start = _one("logprob_start_len", request.logprob_start_len)
    top = _one("top_logprobs_num", request.top_logprobs_num) or 0
    if not 0 <= top <= 20:
        raise InvalidRequest("`top_logprobs_num` must be from 0 to 20.", param="top_logprobs_num")
    from_token = start if scored and start is not None and start >= 0 else None
    fields: dict[str, Any] = {name: getattr(sampling, name) for name in _IN_SAMPLING}
    salt = "\0".join(part for part in (request.cache_salt, request.extra_key) if part) or None
    completion = CompletionRequest(
        model="",
        prompt="",
        **{name: None if value == "" else value for name, value in fields.items()},
        max_tokens=sampling.max_new_tokens,
        min_tokens=sampling.min_new_tokens,
        seed=sampling.sampling_seed,
        stream=request.stream,
        logprobs=top if scored else None,
        prompt_logprobs=None if from_token is None else top,
        cache_salt=salt,
        prompt_cache_key=request.routing_key,
    )
    adapter = _one("lora_path", request.lora_path)
    more = several or (sampling.n or 1) > 1
    return Asked(adapter or request.model, completion, prompts, sampling.max_new_tokens, more, from_token, top)


def _check(exchange: Exchange, request: SglangRequest) -> None:
    for name, why in REFUSED.items():
        if given(getattr(request, name)):
            raise not_supported(name, why)
    for name in OFF:
        value = getattr(request, name)
        if value not in (None, False) and (not isinstance(value, list) or any(value)):
            raise not_supported(name)
    for name in ADVICE:
        if getattr(request, name) is not None:
            ignore_advice(exchange, name)
    if not _one("return_logprob", request.return_logprob):
        for name in OF_LOGPROBS:
            if getattr(request, name) not in (None, False, 0, -1, []):
                ignore_advice(exchange, name)


def _check_sampling(exchange: Exchange, sampling: SglangSampling) -> None:
    if sampling.stop_regex:
        raise not_supported("sampling_params.stop_regex", "`regex` prescribes the whole answer")
    if sampling.custom_params:
        raise not_supported("sampling_params.custom_params", REFUSED["custom_logit_processor"])
    for name in ("spaces_between_special_tokens", "stream_interval"):
        if getattr(sampling, name) is not None:
            ignore_advice(exchange, f"sampling_params.{name}")


def _prompts(request: SglangRequest) -> tuple[list[str | list[int]], bool]:
    """The prompts, and whether there may be several."""
    if (request.text is None) == (request.input_ids is None):
        raise InvalidRequest(
            "Send either `text` or `input_ids`, as SGLang takes them, or `inputs`, as text-generation-inference does.",
            param="text",
            code="missing_parameter" if request.text is None else "invalid_value",
        )
    if request.text is not None:
        return ([request.text], False) if isinstance(request.text, str) else (list(request.text), True)
    ids = request.input_ids or []
    if all(isinstance(id, int) for id in ids):
        return [ids], False  # type: ignore[list-item]
    if all(isinstance(part, list) for part in ids):
        return list(ids), True  # type: ignore[arg-type]
    raise InvalidRequest("`input_ids` must be token ids, or lists of token ids.", param="input_ids")


def _one(name: str, value: Any) -> Any:
    """The value of a parameter that may have come as a list with an entry for each prompt."""
    if not isinstance(value, list):
        return value
    if any(each != value[0] for each in value[1:]):
        raise InvalidRequest(
            f"`{name}` differs between the prompts; send those with other values in requests of their own.", param=name
        )
    return value[0] if value else None
