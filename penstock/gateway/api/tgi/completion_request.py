"""Requests of text-generation-inference as text completion requests."""

from __future__ import annotations

from penstock.gateway.api.tgi.schemas import JsonSchemaGrammar, RegexGrammar, TgiParameters, TgiRequest
from penstock.gateway.generation.sampling import SEED_MASK
from penstock.gateway.generation.schemas import CompletionRequest
from penstock.protocol.errors import InvalidRequest

NAMES = (
    (r"max_tokens$", "parameters.max_new_tokens"),
    (r"truncate_prompt_tokens$", "parameters.truncate"),
    (r"prompt_logprobs$", "parameters.decoder_input_details"),
    (r"(response_format|guided_json|guided_regex).*", "parameters.grammar"),
    (r"(best_of|repetition_penalty|frequency_penalty|top_k|top_p|typical_p|stop|watermark|seed)$", r"parameters.\1"),
    (r"prompt$", "inputs"),
)
"""Parameters that text completion requests call differently; see `renamed`. What shows tokens has several
names, see the endpoints."""
DEFAULT = TgiParameters(do_sample=True)


def completion_request(request: TgiRequest, name: str, *, tokens: bool) -> CompletionRequest:
    """`name`: of the model. `tokens`: the tokens of the answer are shown."""
    asked = request.parameters or DEFAULT
    _check(request, asked)
    completion = CompletionRequest(
        model=name,
        prompt=request.inputs,
        max_tokens=asked.max_new_tokens,
        best_of=asked.best_of,
        temperature=asked.temperature,
        repetition_penalty=asked.repetition_penalty,
        frequency_penalty=asked.frequency_penalty,
        top_k=asked.top_k,
        top_p=asked.top_p,
        typical_p=asked.typical_p,
        seed=None if asked.seed is None else asked.seed & SEED_MASK,
        stop=asked.stop,
        include_stop_str_in_output=True,
        truncate_prompt_tokens=asked.truncate,
        watermark=asked.watermark or None,
        logprobs=asked.top_n_tokens or 0 if tokens else None,
        prompt_logprobs=0 if asked.decoder_input_details else None,
        stream=request.stream,
    )
    if not samples(asked):
        completion.temperature = 0.0
    if isinstance(asked.grammar, RegexGrammar):
        completion.guided_regex = asked.grammar.value
    elif isinstance(asked.grammar, JsonSchemaGrammar):
        completion.guided_json = asked.grammar.value.schema
    elif asked.grammar is not None:
        completion.guided_json = asked.grammar.value
    return completion


def samples(asked: TgiParameters) -> bool:
    """Whether tokens are drawn: where the request says so, or gives what shapes the distribution."""
    shaped = (asked.temperature, asked.top_k, asked.top_p, asked.typical_p)
    return bool(asked.do_sample) or any(value is not None for value in shaped)


def _check(request: TgiRequest, asked: TgiParameters) -> None:
    if not request.inputs:
        raise InvalidRequest("`inputs` is empty; there is nothing to continue.", param="inputs")
    best_of = asked.best_of or 1
    if best_of > 1:
        where = "parameters.best_of"
        if not samples(asked):
            raise InvalidRequest("`parameters.best_of` needs `do_sample: true`: greedy texts are equal.", param=where)
        if asked.seed is not None:
            raise InvalidRequest("`parameters.best_of` and `parameters.seed` exclude each other.", param=where)
        if request.stream:
            raise InvalidRequest(
                "`parameters.best_of` chooses among finished texts; it cannot be streamed.", param=where
            )
    if asked.decoder_input_details and request.stream:
        raise InvalidRequest(
            "`parameters.decoder_input_details` is not available in streams.", param="parameters.decoder_input_details"
        )
