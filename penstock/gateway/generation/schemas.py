"""Request bodies, as typed structs: decoding one checks every type and range.

Policy: a parameter is honoured, refused, or ignored and named; see `penstock.gateway.generation.request_decoder` for
fields that are not in a struct. Fields of type `Unsupported` exist in the public API, would change the answer, and are
refused. `null` means "not given" for every optional field.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from msgspec import UNSET, Meta, Struct

from penstock.gateway.app.decoding import Unsupported
from penstock.gateway.app.exchange import Exchange
from penstock.gateway.app.obfuscation import obfuscated
from penstock.gateway.generation.tool_schemas import (
    FunctionCall,
    FunctionDefinition,
    FunctionName,
    NamedTool,
    ToolCall,
    Tools,
)

INT64 = 2**63 - 1
Name = Annotated[str, Meta(min_length=1, max_length=256)]
TokenId = Annotated[int, Meta(ge=0, le=2**31 - 1)]
Metadata = Annotated[
    dict[Annotated[str, Meta(max_length=64)], Annotated[str, Meta(max_length=512)]], Meta(max_length=16)
]


ServiceTier = Literal["auto", "default", "flex", "priority", "fast", "scale"]


def served_tier(asked: ServiceTier | None) -> str:
    """The tier that an answer reports: `fast` is another name of `priority`, and the others mean the usual one."""
    return "priority" if asked == "fast" else asked if asked in ("flex", "priority") else "default"


Truncation = Annotated[int, Meta(ge=-1, le=2**31 - 1)]
"""How many tokens at the end of a prompt are kept; -1: as many as fit the window."""


class StreamOptions(Struct, forbid_unknown_fields=True):
    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None
    """The usage so far in every chunk."""
    include_obfuscation: bool | None = None
    """Random characters in every event, so that its size does not tell the length of its text."""

    def apply(self, exchange: Exchange) -> None:
        if self.include_obfuscation:
            exchange.padding = obfuscated


class JsonSchema(Struct, forbid_unknown_fields=True, kw_only=True):
    name: Annotated[str, Meta(pattern="^[a-zA-Z0-9_-]{1,64}$")] = "answer"
    schema: dict[str, Any]
    description: str | None = None
    strict: bool | None = None
    """The schema is enforced either way."""


class TextFormat(Struct, forbid_unknown_fields=True, tag_field="type", tag="text"):
    """Anything."""


class JsonObjectFormat(Struct, forbid_unknown_fields=True, omit_defaults=True, tag_field="type", tag="json_object"):
    """Any JSON object, or one that is valid under a schema."""

    schema: dict[str, Any] | None = None


class JsonSchemaFormat(Struct, forbid_unknown_fields=True, omit_defaults=True, tag_field="type", tag="json_schema"):
    """JSON that is valid under a schema."""

    json_schema: JsonSchema | None = None
    schema: dict[str, Any] | None = None
    """The schema alone, as some servers take it."""


class RegexFormat(Struct, forbid_unknown_fields=True, tag_field="type", tag="regex"):
    """Text that matches a regular expression, from its beginning to its end."""

    regex: Annotated[str, Meta(min_length=1)]


class ChoiceFormat(Struct, forbid_unknown_fields=True, tag_field="type", tag="choice"):
    """One of some texts."""

    choice: Annotated[list[Annotated[str, Meta(min_length=1)]], Meta(min_length=1, max_length=1024)]


class GrammarFormat(Struct, forbid_unknown_fields=True, tag_field="type", tag="grammar"):
    """Text of a Lark grammar, or one in GBNF."""

    grammar: Annotated[str, Meta(min_length=1)]


class StructuralTagFormat(Struct, forbid_unknown_fields=True, tag_field="type", tag="structural_tag", kw_only=True):
    """Free text with tags whose content is prescribed."""

    structures: Annotated[list[dict[str, Any]], Meta(max_length=256)] | None = None
    triggers: Annotated[list[str], Meta(max_length=256)] | None = None
    format: dict[str, Any] | None = None


ResponseFormat = (
    TextFormat | JsonObjectFormat | JsonSchemaFormat | RegexFormat | ChoiceFormat | GrammarFormat | StructuralTagFormat
)
Pattern = Annotated[str, Meta(min_length=1)]
Options = Annotated[list[Annotated[str, Meta(min_length=1)]], Meta(min_length=1, max_length=1024)]


class StructuredOutputs(Struct, forbid_unknown_fields=True, kw_only=True):
    """vLLM's spelling of `response_format`; one of them."""

    json: dict[str, Any] | str | None = None
    json_object: bool | None = None
    regex: Pattern | None = None
    choice: Options | None = None
    grammar: Pattern | None = None
    structural_tag: dict[str, Any] | str | None = None


class Sampling(Struct, forbid_unknown_fields=True, kw_only=True):
    """What chat and text completions share."""

    model: Name
    max_tokens: Annotated[int, Meta(ge=0, le=INT64)] | None = None
    min_tokens: Annotated[int, Meta(ge=0, le=INT64)] | None = None
    temperature: Annotated[float, Meta(ge=0, le=2)] | None = None
    top_p: Annotated[float, Meta(ge=0, le=1)] | None = None
    top_k: Annotated[int, Meta(ge=-1, le=2**31 - 1)] | None = None
    min_p: Annotated[float, Meta(ge=0, le=1)] | None = None
    typical_p: Annotated[float, Meta(ge=0, le=1)] | None = None
    presence_penalty: Annotated[float, Meta(ge=-2, le=2)] | None = None
    frequency_penalty: Annotated[float, Meta(ge=-2, le=2)] | None = None
    repetition_penalty: Annotated[float, Meta(gt=0, le=10)] | None = None
    logit_bias: Annotated[dict[TokenId, Annotated[float, Meta(ge=-100, le=100)]], Meta(max_length=1024)] | None = None
    seed: Annotated[int, Meta(ge=-INT64 - 1, le=INT64)] | None = None
    stop: (
        Annotated[str, Meta(max_length=1024)]
        | Annotated[list[Annotated[str, Meta(max_length=1024)]], Meta(max_length=16)]
        | None
    ) = None
    stop_token_ids: Annotated[list[TokenId], Meta(max_length=128)] | None = None
    allowed_token_ids: Annotated[list[TokenId], Meta(min_length=1, max_length=2**18)] | None = None
    bad_words: Annotated[list[Annotated[str, Meta(max_length=256)]], Meta(max_length=256)] | None = None
    ignore_eos: bool | None = None
    n: Annotated[int, Meta(ge=1, le=128)] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    user: Annotated[str, Meta(max_length=512)] | None = None
    metadata: Metadata | None = None
    service_tier: ServiceTier | None = None
    speculation: bool | None = None
    watermark: bool | None = None
    prompt_cache_key: Annotated[str, Meta(max_length=512)] | None = None
    safety_identifier: Annotated[str, Meta(max_length=512)] | None = None
    cache_salt: Annotated[str, Meta(max_length=512)] | None = None
    priority: Annotated[int, Meta(ge=-INT64 - 1, le=INT64)] | None = None
    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    guided_json: dict[str, Any] | str | None = None
    guided_json_object: bool | None = None
    guided_regex: str | None = None
    guided_choice: Options | None = None
    guided_grammar: str | None = None
    json_schema: dict[str, Any] | str | None = None
    grammar: str | None = None
    regex: str | None = None
    ebnf: str | None = None
    structural_tag: dict[str, Any] | str | None = None
    """Other servers' names of a `response_format`; see `structured_output`."""
    truncate_prompt_tokens: Truncation | None = None
    skip_special_tokens: bool | None = None
    include_stop_str_in_output: bool | None = None
    no_stop_trim: bool | None = None
    """Another name of `include_stop_str_in_output`."""


Effort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]
ThoughtTokens = Annotated[int, Meta(ge=0, le=INT64)]


class ReasoningOptions(Struct, forbid_unknown_fields=True, kw_only=True):
    """`reasoning` of a chat completion, as OpenRouter has it, and of a response."""

    effort: Effort | None = None
    max_tokens: ThoughtTokens | None = None
    """Most tokens of the thought."""
    exclude: bool | None = None
    """Do not show it."""
    enabled: bool | None = None
    summary: Literal["auto", "concise", "detailed"] | None = None
    generate_summary: Literal["auto", "concise", "detailed"] | None = None


class ThinkingOptions(Struct, forbid_unknown_fields=True, kw_only=True):
    """`thinking` of a chat completion, as DeepSeek, GLM and Anthropic have it."""

    type: Literal["enabled", "disabled", "adaptive", "auto"]
    budget_tokens: ThoughtTokens | None = None
    clear_thinking: bool | None = None


class ChatMessage(Struct, forbid_unknown_fields=True, kw_only=True):
    role: Literal["system", "developer", "user", "assistant", "tool", "function"]
    content: str | list[dict[str, Any]] | None = None
    name: Annotated[str, Meta(max_length=256)] | None = None
    refusal: str | None = None
    annotations: Unsupported = UNSET
    audio: Unsupported = UNSET
    tool_calls: Annotated[list[ToolCall], Meta(max_length=128)] | None = None
    tool_call_id: Name | None = None
    function_call: FunctionCall | None = None
    """The older form of `tool_calls`."""
    reasoning_content: str | None = None
    reasoning: str | None = None
    thinking: str | None = None
    """What the assistant thought before it said that, by any of three names; the chat template decides what becomes of
    it."""
    prefix: bool | None = None
    partial: bool | None = None
    """Of the last message, by either name: the answer continues its text."""


REQUEST_TEMPLATE = 32 * 1024
"""Characters of a chat template in a request."""
SessionId = Annotated[str, Meta(pattern="^[A-Za-z0-9._:-]{1,128}$")]


class NamedConversation(Struct, forbid_unknown_fields=True):
    """A stored conversation, and what becomes of its oldest turns when it outgrows the window."""

    id: SessionId
    overflow: Literal["truncate", "summarise"] | None = None


Messages = Annotated[list[ChatMessage], Meta(min_length=1, max_length=4096)]


QUERY_CHARACTERS = 4096
SearchQuery = Annotated[str, Meta(min_length=1, max_length=QUERY_CHARACTERS)]
SearchMode = Literal["hybrid", "vector", "bm25"]
SearchCandidates = Annotated[int, Meta(ge=1, le=200)]
SearchTopK = Annotated[int, Meta(ge=1, le=50)]


class RagRequest(Struct, forbid_unknown_fields=True, kw_only=True):
    """`rag` of a chat completion: answer from a collection."""

    collection: Annotated[str, Meta(min_length=1, max_length=128)]
    query: SearchQuery | None = None
    """What to search for; the last message of the user when not given."""
    mode: SearchMode | None = None
    candidates: SearchCandidates | None = None
    top_k: SearchTopK | None = None
    rerank: bool | None = None
    context_tokens: Annotated[int, Meta(ge=64)] | None = None
    """Most tokens of sources; never more than the server allows."""
    citations: Literal["auto", "model", "none"] | None = None
    """model: the numbers the model writes are resolved. auto (the default): sentences that plainly come from a source
    and have no number get one as well. none: nothing is resolved."""


class TokenDetails(Sampling, kw_only=True):
    """What comes back about single tokens, and other names of parameters; see `spellings`."""

    prompt_logprobs: Annotated[int, Meta(ge=0, le=20)] | None = None
    return_token_ids: bool | None = None
    return_tokens_as_token_ids: bool | None = None
    n_predict: Annotated[int, Meta(ge=-1, le=INT64)] | None = None
    max_new_tokens: Annotated[int, Meta(ge=0, le=INT64)] | None = None
    min_new_tokens: Annotated[int, Meta(ge=0, le=INT64)] | None = None
    repeat_penalty: Annotated[float, Meta(gt=0, le=10)] | None = None
    n_probs: Annotated[int, Meta(ge=0, le=20)] | None = None
    samplers: (
        Annotated[str, Meta(max_length=32)]
        | Annotated[list[Annotated[str, Meta(max_length=64)]], Meta(max_length=32)]
        | None
    ) = None


class ChatRequest(TokenDetails, kw_only=True):
    """POST /v1/chat/completions"""

    messages: Messages
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: Annotated[dict[str, Any], Meta(max_length=64)] | None = None
    chat_template: Annotated[str, Meta(max_length=REQUEST_TEMPLATE)] | None = None
    documents: Annotated[list[dict[str, Any]], Meta(max_length=1024)] | None = None
    """For chat templates that know documents."""
    echo: bool | None = None
    """Give back the text of the last message, too, where the answer continues it."""
    reasoning_effort: Effort | None = None
    reasoning: ReasoningOptions | None = None
    thinking: ThinkingOptions | None = None
    enable_thinking: bool | None = None
    thinking_budget: ThoughtTokens | None = None
    thinking_token_budget: ThoughtTokens | None = None
    max_reasoning_tokens: ThoughtTokens | None = None
    thinking_budget_tokens: Annotated[int, Meta(ge=-1, le=INT64)] | None = None
    reasoning_budget: Annotated[int, Meta(ge=-1, le=INT64)] | None = None
    """How much to think, as several servers spell it; see `thoughts`."""
    include_reasoning: bool | None = None
    """False: thoughts are not shown."""
    max_completion_tokens: Annotated[int, Meta(ge=1, le=INT64)] | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Meta(ge=0, le=20)] | None = None
    store: bool | None = None
    conversation: SessionId | NamedConversation | None = None
    rag: RagRequest | None = None
    modalities: Unsupported = UNSET
    tools: Tools | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedTool | None = None
    parallel_tool_calls: bool | None = None
    server_tools: Annotated[list[Name], Meta(max_length=128)] | None = None
    functions: Annotated[list[FunctionDefinition], Meta(max_length=128)] | None = None
    function_call: Literal["none", "auto"] | FunctionName | None = None
    """The older form of `tools` and `tool_choice`; see `older_functions`."""
    audio: Unsupported = UNSET
    web_search_options: Unsupported = UNSET
    moderation: Unsupported = UNSET


_TEXT_ONLY = "models here read and write text; leave it out"
CHAT_UNSUPPORTED = {
    "audio": _TEXT_ONLY,
    "web_search_options": "nothing here searches the web; search in the client, or connect a tool that does "
    "(`server_tools`)",
    "moderation": "the operator decides what is moderated (`guardrails` in the configuration); leave it out",
}
"""What would change the answer, with what to do instead."""
MESSAGE_UNSUPPORTED = {"audio": _TEXT_ONLY}


class CompletionRequest(TokenDetails, kw_only=True):
    """POST /v1/completions"""

    prompt: str | Annotated[list[str | TokenId | list[TokenId]], Meta(max_length=2**20)]
    echo: bool | None = None
    logprobs: Annotated[int, Meta(ge=0, le=20)] | None = None
    best_of: Annotated[int, Meta(ge=1, le=128)] | None = None
    suffix: str | None = None
    """What comes after the gap that the model fills."""
    add_special_tokens: bool | None = None


class TokenizeRequest(Struct, forbid_unknown_fields=True, kw_only=True):
    """POST /v1/tokenize, /tokenize and /apply-template: `prompt` or `messages`; or a text by its names in the APIs of
    llama.cpp and text-generation-inference, with an answer in their forms."""

    model: Name | None = None
    """The first model served when not given."""
    prompt: str | None = None
    messages: Messages | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: Annotated[dict[str, Any], Meta(max_length=64)] | None = None
    chat_template: Annotated[str, Meta(max_length=REQUEST_TEMPLATE)] | None = None
    documents: Annotated[list[dict[str, Any]], Meta(max_length=1024)] | None = None
    """For chat templates that know documents."""
    tools: Tools | None = None
    add_special_tokens: bool | None = None
    max_tokens: Annotated[int, Meta(ge=0, le=INT64)] | None = None
    """For the estimate: how many completion tokens to price."""
    return_token_strs: bool | None = None
    """Also each token as the vocabulary spells it."""
    content: str | None = None
    """The text, for clients of llama.cpp."""
    add_special: bool | None = None
    parse_special: bool | None = None
    with_pieces: bool | None = None
    """Go with `content`."""
    inputs: str | None = None
    """The text, for clients of text-generation-inference."""


class DetokenizeRequest(Struct, forbid_unknown_fields=True, kw_only=True):
    """POST /v1/detokenize and /detokenize"""

    model: Name | None = None
    tokens: Annotated[list[TokenId], Meta(max_length=2**20)]
    skip_special_tokens: bool | None = None
    """Leave control tokens out; they are shown otherwise."""


class EmbeddingsRequest(Struct, forbid_unknown_fields=True, kw_only=True):
    """POST /v1/embeddings"""

    model: Name
    input: str | Annotated[list[str | TokenId | list[TokenId]], Meta(max_length=2**20)]
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: Annotated[int, Meta(ge=1, le=2**20)] | None = None
    truncate_prompt_tokens: Annotated[int, Meta(ge=-1, le=2**20)] | None = None
    """Keep only this many tokens of each text, beginning and end marks included; -1: as many as the model takes."""
    user: Annotated[str, Meta(max_length=512)] | None = None


class PoolingRequest(Struct, forbid_unknown_fields=True, kw_only=True):
    """POST /pooling: a vector per text, or per token (`task: token_embed`)."""

    model: Name | None = None
    """The first encoder when not given."""
    input: str | Annotated[list[str | TokenId | list[TokenId]], Meta(max_length=2**20)]
    task: Literal["embed", "token_embed"] | None = None
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: Annotated[int, Meta(ge=1, le=2**20)] | None = None
    truncate_prompt_tokens: Annotated[int, Meta(ge=-1, le=2**20)] | None = None
    user: Annotated[str, Meta(max_length=512)] | None = None


ScoreTexts = (
    Annotated[str, Meta(min_length=1)]
    | Annotated[list[Annotated[str, Meta(min_length=1)]], Meta(min_length=1, max_length=2**20)]
)


class ScoreRequest(Struct, forbid_unknown_fields=True, kw_only=True):
    """POST /score and /v1/score: one text against one or many, or pairs. The two sides have several names."""

    model: Name | None = None
    """The first encoder when not given."""
    text_1: ScoreTexts | None = None
    text_2: ScoreTexts | None = None
    data_1: ScoreTexts | None = None
    data_2: ScoreTexts | None = None
    queries: ScoreTexts | None = None
    documents: ScoreTexts | None = None
    items: ScoreTexts | None = None
    user: Annotated[str, Meta(max_length=512)] | None = None


class RerankDocument(Struct, forbid_unknown_fields=True):
    text: str


class RerankRequest(Struct, forbid_unknown_fields=True, kw_only=True):
    """POST /v1/rerank, /rerank and /v2/rerank"""

    model: Name
    query: str
    documents: Annotated[list[str | RerankDocument], Meta(max_length=2**20)]
    top_n: Annotated[int, Meta(ge=0, le=2**31 - 1)] | None = None
    """How many of the best come back; 0, as not given: all."""
    max_tokens_per_doc: Annotated[int, Meta(ge=0, le=2**31 - 1)] | None = None
    """Only so many tokens of each document are read; 0: as many as the model takes."""
    return_documents: bool | None = None
    user: Annotated[str, Meta(max_length=512)] | None = None
