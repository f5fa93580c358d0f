"""Request bodies of SGLang's /generate, which text-generation-inference has too."""

from __future__ import annotations

from typing import Annotated, Any

from msgspec import UNSET, Meta, Struct

from penstock.gateway.api.tgi.schemas import TgiParameters
from penstock.gateway.app.decoding import Unsupported
from penstock.gateway.generation.schemas import INT64, TokenId

ModelName = Annotated[str, Meta(max_length=256)]
Stop = Annotated[str, Meta(max_length=1024)]


class SglangSampling(Struct, forbid_unknown_fields=True, kw_only=True):
    """`sampling_params` of a request."""

    max_new_tokens: Annotated[int, Meta(ge=0, le=INT64)] | None = None
    """128 when not given, or what fits; 0: only the prompt is computed."""
    min_new_tokens: Annotated[int, Meta(ge=0, le=INT64)] | None = None
    temperature: Annotated[float, Meta(ge=0, le=2)] | None = None
    top_p: Annotated[float, Meta(gt=0, le=1)] | None = None
    top_k: Annotated[int, Meta(ge=-1, le=2**31 - 1)] | None = None
    min_p: Annotated[float, Meta(ge=0, le=1)] | None = None
    frequency_penalty: Annotated[float, Meta(ge=-2, le=2)] | None = None
    presence_penalty: Annotated[float, Meta(ge=-2, le=2)] | None = None
    repetition_penalty: Annotated[float, Meta(gt=0, le=10)] | None = None
    logit_bias: Annotated[dict[TokenId, Annotated[float, Meta(ge=-100, le=100)]], Meta(max_length=1024)] | None = None
    sampling_seed: Annotated[int, Meta(ge=-INT64 - 1, le=INT64)] | None = None
    stop: Stop | Annotated[list[Stop], Meta(max_length=16)] | None = None
    stop_token_ids: Annotated[list[TokenId], Meta(max_length=128)] | None = None
    ignore_eos: bool | None = None
    skip_special_tokens: bool | None = None
    no_stop_trim: bool | None = None
    n: Annotated[int, Meta(ge=1, le=128)] | None = None
    json_schema: dict[str, Any] | str | None = None
    regex: str | None = None
    ebnf: str | None = None
    structural_tag: dict[str, Any] | str | None = None
    # Advice.
    spaces_between_special_tokens: bool | None = None
    stream_interval: int | None = None
    # Refused unless empty.
    stop_regex: str | list[str] | None = None
    custom_params: dict[str, Any] | None = None


class SglangRequest(Struct, forbid_unknown_fields=True, kw_only=True):
    """What SGLang takes. Of a list with an entry for each prompt, all entries must be equal."""

    model: ModelName | None = None
    """The first model when not given."""
    text: str | Annotated[list[str], Meta(min_length=1, max_length=2**12)] | None = None
    input_ids: Annotated[list[TokenId | list[TokenId]], Meta(min_length=1, max_length=2**20)] | None = None
    sampling_params: SglangSampling | Annotated[list[SglangSampling], Meta(max_length=2**12)] | None = None
    stream: bool | None = None
    return_logprob: bool | list[bool] | None = None
    logprob_start_len: Annotated[int, Meta(ge=-1, le=INT64)] | list[int] | None = None
    """From which token of the prompt on log-probabilities are shown; -1: of the answer only."""
    top_logprobs_num: Annotated[int, Meta(ge=0, le=20)] | list[int] | None = None
    return_text_in_logprobs: bool | None = None
    return_prompt_token_ids: bool | None = None
    lora_path: ModelName | list[ModelName | None] | None = None
    """The name of an adapter."""
    cache_salt: Annotated[str, Meta(max_length=256)] | None = None
    extra_key: Annotated[str, Meta(max_length=256)] | None = None
    """Divides the cache of prefixes too."""
    routing_key: Annotated[str, Meta(max_length=512)] | None = None
    """Requests with the same one prefer the same replica."""
    # Advice.
    rid: str | list[str] | None = None
    session_id: str | None = None
    conversation_id: str | None = None
    priority: int | None = None
    log_metrics: bool | None = None
    no_logs: bool | None = None
    custom_labels: dict[str, str] | None = None
    data_parallel_rank: int | None = None
    routed_dp_rank: int | None = None
    # Refused.
    prompt: Unsupported = UNSET
    input_embeds: Unsupported = UNSET
    image_data: Unsupported = UNSET
    video_data: Unsupported = UNSET
    audio_data: Unsupported = UNSET
    token_ids_logprob: Unsupported = UNSET
    session_params: Unsupported = UNSET
    custom_logit_processor: Unsupported = UNSET
    return_hidden_states: bool | str | list[bool] | None = None
    return_routed_experts: bool | None = None
    return_sampling_mask: bool | list[bool] | None = None
    return_entropy: bool | None = None
    require_reasoning: bool | None = None


class GenerateRequest(SglangRequest, kw_only=True):
    """POST /generate: `text` or `input_ids` as SGLang takes them, or `inputs` as text-generation-inference does."""

    inputs: str | None = None
    parameters: TgiParameters | None = None


ADVICE = (
    *("rid", "session_id", "conversation_id", "priority", "log_metrics", "no_logs", "custom_labels"),
    *("data_parallel_rank", "routed_dp_rank"),
)
OF_LOGPROBS = ("logprob_start_len", "top_logprobs_num", "return_text_in_logprobs")
"""Without effect where no log-probabilities are wanted."""
REFUSED = {
    "prompt": "send `text` or `input_ids`, as SGLang takes them, or `inputs`, as text-generation-inference does",
    "input_embeds": "a prompt is text or token ids",
    "image_data": "models here read and write text",
    "video_data": "models here read and write text",
    "audio_data": "models here read and write text",
    "token_ids_logprob": "`top_logprobs_num` shows the likeliest tokens",
    "session_params": "send the whole prompt; its prefix stays cached",
    "custom_logit_processor": "code of a request does not run here; use `logit_bias`",
}
OFF = ("return_hidden_states", "return_routed_experts", "return_sampling_mask", "return_entropy", "require_reasoning")
"""Refused unless false."""


class SglangModelQuery(Struct, forbid_unknown_fields=True):
    """Of /model_info."""

    model: str | None = None
    """The first model when not given."""
