"""Request bodies of Ollama's API. `options` that change the answer are honoured or refused; those that size or place a
model are advice to a server that loads models for each client, and are ignored and named."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from msgspec import Meta, Struct

from penstock.gateway.generation.schemas import (
    INT64,
    Name,
)
from penstock.gateway.generation.tool_schemas import (
    FunctionDefinition,
)

KeepAlive = str | int | float


class Sampled(Struct, forbid_unknown_fields=True, kw_only=True):
    """Sampling under the names that Ollama and OpenAI share. It belongs into `options`; some clients send it beside."""

    temperature: Annotated[float, Meta(ge=0, le=2)] | None = None
    top_k: Annotated[int, Meta(ge=-1, le=2**31 - 1)] | None = None
    top_p: Annotated[float, Meta(ge=0, le=1)] | None = None
    min_p: Annotated[float, Meta(ge=0, le=1)] | None = None
    seed: Annotated[int, Meta(ge=-INT64 - 1, le=INT64)] | None = None
    presence_penalty: Annotated[float, Meta(ge=-2, le=2)] | None = None
    frequency_penalty: Annotated[float, Meta(ge=-2, le=2)] | None = None
    stop: (
        Annotated[str, Meta(max_length=1024)]
        | Annotated[list[Annotated[str, Meta(max_length=1024)]], Meta(max_length=16)]
        | None
    ) = None


class Options(Sampled, kw_only=True):
    """Sampling, and advice for loading."""

    num_predict: Annotated[int, Meta(ge=-2, le=INT64)] | None = None
    """0 and less: as many as fit."""
    repeat_penalty: Annotated[float, Meta(gt=0, le=10)] | None = None
    repeat_last_n: Annotated[int, Meta(ge=-1, le=INT64)] | None = None
    """0: no repeat penalty. The penalty looks at everything before, whatever else is asked for."""
    typical_p: Annotated[float, Meta(gt=0, le=1)] | None = None
    # Refused unless neutral: no sampler here does it.
    tfs_z: float | None = None
    mirostat: int | None = None
    mirostat_tau: float | None = None
    mirostat_eta: float | None = None
    penalize_newline: bool | None = None
    # Advice.
    num_ctx: int | None = None
    num_keep: int | None = None
    num_batch: int | None = None
    num_gpu: int | None = None
    main_gpu: int | None = None
    num_thread: int | None = None
    use_mmap: bool | None = None
    use_mlock: bool | None = None
    numa: bool | None = None
    low_vram: bool | None = None
    f16_kv: bool | None = None
    vocab_only: bool | None = None
    draft_num_predict: int | None = None


NEUTRAL: dict[str, tuple[Any, ...]] = {"tfs_z": (1,), "mirostat": (0,)}
ADVICE = (
    "mirostat_tau",
    "mirostat_eta",
    "penalize_newline",
    "num_ctx",
    "num_keep",
    "num_batch",
    "num_gpu",
    "main_gpu",
    "num_thread",
    "use_mmap",
    "use_mlock",
    "numa",
    "low_vram",
    "f16_kv",
    "vocab_only",
    "draft_num_predict",
)


class OllamaCallFunction(Struct, forbid_unknown_fields=True, kw_only=True):
    name: Name
    arguments: dict[str, Any] = {}
    index: int | None = None


class OllamaCall(Struct, forbid_unknown_fields=True, kw_only=True):
    """A call the model made earlier in the conversation."""

    function: OllamaCallFunction
    id: Annotated[str, Meta(max_length=256)] | None = None
    type: Literal["function"] | None = None


class OllamaMessage(Struct, forbid_unknown_fields=True, kw_only=True):
    role: Annotated[str, Meta(max_length=32)]
    content: str | None = None
    images: list[Any] | None = None
    thinking: str | None = None
    tool_calls: Annotated[list[OllamaCall], Meta(max_length=128)] | None = None
    tool_name: Annotated[str, Meta(max_length=256)] | None = None
    tool_call_id: Annotated[str, Meta(max_length=256)] | None = None


class OllamaTool(Struct, forbid_unknown_fields=True, kw_only=True):
    function: FunctionDefinition
    type: str | None = None


Think = bool | Literal["high", "medium", "low", "max"]


class Answered(Sampled, kw_only=True):
    """What both kinds of generation take."""

    model: Name
    stream: bool | None = None
    """True when not given."""
    format: Literal["", "json"] | dict[str, Any] | None = None
    """`json`, or the JSON schema of the answer."""
    options: Options | None = None
    max_tokens: Annotated[int, Meta(ge=1, le=INT64)] | None = None
    max_output_tokens: Annotated[int, Meta(ge=1, le=INT64)] | None = None
    keep_alive: KeepAlive | None = None
    think: Think | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Meta(ge=0, le=20)] | None = None
    truncate: bool | None = None
    shift: bool | None = None


class OllamaChatRequest(Answered, kw_only=True):
    """POST /api/chat"""

    messages: Annotated[list[OllamaMessage], Meta(max_length=4096)] | None = None
    """None: only load the model."""
    tools: Annotated[list[OllamaTool], Meta(max_length=128)] | None = None


class OllamaGenerateRequest(Answered, kw_only=True):
    """POST /api/generate"""

    prompt: str | None = None
    """None: only load the model."""
    system: str | None = None
    suffix: str | None = None
    template: str | None = None
    raw: bool | None = None
    """The prompt is not put into the chat template."""
    context: list[int] | None = None
    images: list[Any] | None = None


class OllamaEmbedRequest(Struct, forbid_unknown_fields=True, kw_only=True):
    """POST /api/embed"""

    model: Name
    input: str | Annotated[list[str], Meta(max_length=2**20)] = ""
    truncate: bool | None = None
    """True when not given: a text that is too long is cut."""
    dimensions: Annotated[int, Meta(ge=0, le=2**20)] | None = None
    options: Options | None = None
    keep_alive: KeepAlive | None = None


class OllamaEmbeddingsRequest(Struct, forbid_unknown_fields=True, kw_only=True):
    """POST /api/embeddings"""

    model: Name
    prompt: str = ""
    options: Options | None = None
    keep_alive: KeepAlive | None = None


class OllamaNamedRequest(Struct, forbid_unknown_fields=True, kw_only=True):
    """POST /api/show and others that name a model, under either of two names."""

    model: Annotated[str, Meta(max_length=4096)] | None = None
    name: Annotated[str, Meta(max_length=4096)] | None = None
    verbose: bool | None = None


class OllamaPullRequest(Struct, forbid_unknown_fields=True, kw_only=True):
    """POST /api/pull"""

    model: Annotated[str, Meta(max_length=4096)] | None = None
    name: Annotated[str, Meta(max_length=4096)] | None = None
    stream: bool | None = None
    insecure: bool | None = None
