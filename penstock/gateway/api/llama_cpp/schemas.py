"""Request bodies of llama.cpp's server. Parameters that could only end an answer sooner than it ends here are advice,
and so is what places a request in slots and caches; both are ignored and named."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from msgspec import Meta, Struct

from penstock.gateway.generation.schemas import INT64, TokenId

ModelName = Annotated[str, Meta(max_length=256)]
Stop = Annotated[str, Meta(max_length=1024)]
Bias = Annotated[float, Meta(ge=-100, le=100)] | Literal[False]
"""False: the token is not generated."""


class PromptObject(Struct, forbid_unknown_fields=True, kw_only=True):
    """A prompt, where it could have come with images."""

    prompt_string: str
    multimodal_data: list[Any] | None = None


Parts = Annotated[list[str | TokenId], Meta(max_length=2**20)]
"""Texts and token ids, mixed, as one prompt."""


class LoraScale(Struct, forbid_unknown_fields=True, kw_only=True):
    id: Annotated[int, Meta(ge=0, le=2**31 - 1)]
    scale: float


class LlamaCppOptions(Struct, forbid_unknown_fields=True, kw_only=True):
    """What /completion and /infill share."""

    model: ModelName | None = None
    """The first model when not given."""
    n_predict: Annotated[int, Meta(ge=-1, le=INT64)] | None = None
    """-1, as not given: as many as fit. 0: only the prompt is computed."""
    max_tokens: Annotated[int, Meta(ge=-1, le=INT64)] | None = None
    max_completion_tokens: Annotated[int, Meta(ge=-1, le=INT64)] | None = None
    n_cmpl: Annotated[int, Meta(ge=1, le=128)] | None = None
    n: Annotated[int, Meta(ge=1, le=128)] | None = None
    stream: bool | None = None
    temperature: Annotated[float, Meta(ge=0, le=2)] | None = None
    top_k: Annotated[int, Meta(ge=-1, le=2**31 - 1)] | None = None
    top_p: Annotated[float, Meta(ge=0, le=1)] | None = None
    min_p: Annotated[float, Meta(ge=0, le=1)] | None = None
    typical_p: Annotated[float, Meta(gt=0, le=1)] | None = None
    repeat_penalty: Annotated[float, Meta(gt=0, le=10)] | None = None
    repeat_last_n: Annotated[int, Meta(ge=-1, le=INT64)] | None = None
    """0: no repeat penalty. Otherwise it looks at everything before, as -1 asks for."""
    presence_penalty: Annotated[float, Meta(ge=-2, le=2)] | None = None
    frequency_penalty: Annotated[float, Meta(ge=-2, le=2)] | None = None
    logit_bias: (
        Annotated[
            list[
                Annotated[
                    list[Annotated[str, Meta(max_length=256)] | float | Literal[False]],
                    Meta(min_length=2, max_length=2),
                ]
            ],
            Meta(max_length=1024),
        ]
        | Annotated[dict[Annotated[str, Meta(max_length=256)], Bias], Meta(max_length=1024)]
        | None
    ) = None
    """Pairs of a token (its id, or text, each token of which is meant) and a bias, or an object of them."""
    seed: Annotated[int, Meta(ge=-INT64 - 1, le=INT64)] | None = None
    """-1: another one for every request."""
    stop: Stop | Annotated[list[Stop], Meta(max_length=16)] | None = None
    ignore_eos: bool | None = None
    samplers: (
        Annotated[str, Meta(max_length=32)]
        | Annotated[list[Annotated[str, Meta(max_length=64)]], Meta(max_length=32)]
        | None
    ) = None
    json_schema: dict[str, Any] | None = None
    grammar: str | None = None
    n_probs: Annotated[int, Meta(ge=0, le=20)] | None = None
    logprobs: Annotated[int, Meta(ge=0, le=20)] | None = None
    """Another name of `n_probs`."""
    return_tokens: bool | None = None
    timings_per_token: bool | None = None
    response_fields: Annotated[list[Annotated[str, Meta(max_length=256)]], Meta(max_length=256)] | None = None
    speculation: bool | None = None
    # Refused unless the value asks for nothing: no sampler here does it.
    dynatemp_range: float | None = None
    top_n_sigma: float | None = None
    dry_multiplier: float | None = None
    xtc_probability: float | None = None
    mirostat: int | None = None
    adaptive_target: float | None = None
    min_keep: int | None = None
    post_sampling_probs: bool | None = None
    grammar_lazy: bool | None = None
    grammar_triggers: list[Any] | None = None
    lora: Annotated[list[LoraScale], Meta(max_length=1024)] | None = None
    # Advice.
    dynatemp_exponent: float | None = None
    dry_base: float | None = None
    dry_allowed_length: int | None = None
    dry_penalty_last_n: int | None = None
    dry_sequence_breakers: list[str] | None = None
    xtc_threshold: float | None = None
    mirostat_tau: float | None = None
    mirostat_eta: float | None = None
    adaptive_decay: float | None = None
    id_slot: int | None = None
    cache_prompt: bool | None = None
    n_cache_reuse: int | None = None
    n_keep: int | None = None
    n_discard: int | None = None
    n_indent: Annotated[int, Meta(ge=0, le=2**31 - 1)] | None = None
    t_max_predict_ms: float | None = None
    t_max_prompt_ms: float | None = None
    preserved_tokens: list[Any] | None = None
    backend_sampling: bool | None = None
    return_progress: bool | None = None
    sse_ping_interval: int | None = None
    stream_options: dict[str, Any] | None = None
    verbose: bool | None = None


NEUTRAL: dict[str, tuple[Any, ...]] = {
    "dynatemp_range": (0,),
    "dry_multiplier": (0,),
    "mirostat": (0,),
    "min_keep": (0, 1),
    "post_sampling_probs": (False,),
    "grammar_lazy": (False,),
    "grammar_triggers": ([],),
}
"""Values that ask for nothing; others are refused. Some have ranges of such values, see `completion_request`."""
ADVICE = (
    *("dynatemp_exponent", "dry_base", "dry_allowed_length", "dry_penalty_last_n", "dry_sequence_breakers"),
    *("xtc_threshold", "mirostat_tau", "mirostat_eta", "adaptive_decay"),
    *("id_slot", "cache_prompt", "n_cache_reuse", "n_keep", "n_discard", "n_indent", "t_max_predict_ms"),
    *("t_max_prompt_ms", "preserved_tokens", "backend_sampling", "return_progress", "sse_ping_interval"),
    *("stream_options", "verbose"),
)


class LlamaCppCompletionRequest(LlamaCppOptions, kw_only=True):
    """POST /completion and /completions"""

    prompt: (
        str | PromptObject | Annotated[list[str | TokenId | PromptObject | Parts], Meta(min_length=1, max_length=2**20)]
    )
    """A text; token ids; both mixed; or several of those."""


class InputFile(Struct, forbid_unknown_fields=True, kw_only=True):
    """Another file, or a part of one."""

    text: str
    filename: Annotated[str, Meta(max_length=4096)] = "tmp"


class InfillRequest(LlamaCppOptions, kw_only=True):
    """POST /infill"""

    input_prefix: str
    input_suffix: str
    input_extra: Annotated[list[InputFile], Meta(max_length=4096)] | None = None
    prompt: str | None = None
    """More of the text before the gap, such as the line that is being written."""


class LlamaCppEmbeddingRequest(Struct, forbid_unknown_fields=True, kw_only=True):
    """POST /embedding and /embeddings"""

    model: ModelName | None = None
    """The first encoder when not given."""
    content: str | Annotated[list[str | TokenId | list[TokenId]], Meta(min_length=1, max_length=2**20)] | None = None
    input: str | Annotated[list[str | TokenId | list[TokenId]], Meta(min_length=1, max_length=2**20)] | None = None
    """Another name of `content`."""
    embd_normalize: int | None = None
    encoding_format: Literal["float", "base64"] | None = None


class LlamaCppModelQuery(Struct, forbid_unknown_fields=True):
    """Of /props and /lora-adapters."""

    model: str | None = None
    """The first model when not given."""
    autoload: str | None = None


class SlotsQuery(Struct, forbid_unknown_fields=True):
    """Of /slots."""

    model: str | None = None
    fail_on_no_slot: str | None = None
    """Given: a 503 when every slot is taken."""
