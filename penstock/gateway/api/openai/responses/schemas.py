"""The body of POST /v1/responses. The policy is that of `penstock.gateway.generation.schemas`."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from msgspec import UNSET, Meta, Raw, Struct

from penstock.gateway.app.decoding import Unsupported
from penstock.gateway.generation.schemas import (
    INT64,
    ChoiceFormat,
    Effort,
    GrammarFormat,
    JsonObjectFormat,
    JsonSchema,
    JsonSchemaFormat,
    Name,
    NamedConversation,
    RagRequest,
    ReasoningOptions,
    RegexFormat,
    ResponseFormat,
    Sampling,
    ServiceTier,
    SessionId,
    TextFormat,
    ThoughtTokens,
)
from penstock.gateway.generation.tool_schemas import (
    FunctionDefinition,
)
from penstock.gateway.rag.vector_stores.schemas import Filter, RankingOptions

LOGPROBS = "message.output_text.logprobs"
"""What `include` asks for to get log-probabilities."""
SEARCH_RESULTS = "file_search_call.results"
"""The same for what searches found."""
SEALED = "reasoning.encrypted_content"
"""The same for thoughts in a form that is only sent back."""
Status = Literal["in_progress", "completed", "incomplete"]
ToolName = Annotated[str, Meta(pattern="^[a-zA-Z0-9_.-]{1,64}$")]


class InputText(Struct, forbid_unknown_fields=True, tag_field="type", tag="input_text"):
    text: str


class PlainText(Struct, forbid_unknown_fields=True, tag_field="type", tag="text"):
    """As stored conversations show it."""

    text: str


class OutputText(Struct, forbid_unknown_fields=True, tag_field="type", tag="output_text"):
    text: str
    annotations: list[Any] | None = None
    logprobs: list[Any] | None = None
    """As the answer had them; the conversation does not depend on them."""


class Refusal(Struct, forbid_unknown_fields=True, tag_field="type", tag="refusal"):
    refusal: str


class MessageItem(Struct, forbid_unknown_fields=True, kw_only=True):
    """A message. The only item whose `type` may be left out."""

    role: Literal["user", "assistant", "system", "developer"]
    content: str | Annotated[list[InputText | PlainText | OutputText | Refusal], Meta(min_length=1)]
    type: Literal["message"] = "message"
    id: str | None = None
    status: Status | None = None


class Item(Struct, forbid_unknown_fields=True, kw_only=True):
    """What all other items have. Their `type` has been read when they are decoded."""

    type: str
    id: str | None = None
    status: Status | None = None


class CallItem(Item, kw_only=True):
    """The model called a function, which may be in a namespace."""

    call_id: Name
    name: Name
    arguments: str
    namespace: Name | None = None


class CustomCallItem(Item, kw_only=True):
    """The model called a tool that takes free text."""

    call_id: Name
    name: Name
    input: str
    namespace: Name | None = None


class ActionCallItem(Item, kw_only=True):
    """The model called `local_shell` or `shell`."""

    call_id: Name
    action: dict[str, Any]


class PatchCallItem(Item, kw_only=True):
    """The model called `apply_patch`."""

    call_id: Name
    operation: dict[str, Any]


class CompactionItem(Struct, forbid_unknown_fields=True, kw_only=True):
    """The earlier part of a conversation, as `/v1/responses/compact` summarised it."""

    type: str
    encrypted_content: str
    id: str | None = None


class ReasoningItem(Struct, forbid_unknown_fields=True, kw_only=True):
    """What the model thought before the next item."""

    type: str
    id: str | None = None
    status: Status | None = None
    summary: list[dict[str, Any]] | None = None
    content: list[dict[str, Any]] | None = None
    encrypted_content: str | None = None


class CallOutputItem(Item, kw_only=True):
    """What a tool returned."""

    call_id: Name
    output: str | Annotated[list[InputText | PlainText | OutputText], Meta(min_length=1)]
    name: str | None = None
    namespace: str | None = None


class LocalShellOutputItem(Item, kw_only=True):
    """What a command of `local_shell` printed; `id` is that of the call."""

    output: str
    call_id: Name | None = None


class ShellOutputItem(Item, kw_only=True):
    """What the commands of `shell` printed."""

    call_id: Name
    output: list[dict[str, Any]]
    max_output_length: int | None = None


class PatchOutputItem(Struct, forbid_unknown_fields=True, kw_only=True):
    """Whether a patch could be applied."""

    type: str
    call_id: Name
    status: Literal["completed", "failed"]
    output: str | None = None
    id: str | None = None


class ReferenceItem(Struct, forbid_unknown_fields=True, kw_only=True):
    """An item of a stored response."""

    id: Annotated[str, Meta(min_length=1, max_length=256)]
    type: Literal["item_reference"] | None = None


class AdditionalToolsItem(Item, kw_only=True):
    """Tools that are offered from here on."""

    tools: Annotated[list[Raw], Meta(max_length=256)]
    role: str | None = None


class FunctionTool(FunctionDefinition, kw_only=True):
    type: Literal["function"]


class AnyText(Struct, forbid_unknown_fields=True, tag_field="type", tag="text"):
    """Any text."""


class GrammarText(Struct, forbid_unknown_fields=True, tag_field="type", tag="grammar"):
    """Text of a grammar."""

    syntax: Literal["lark", "regex"]
    definition: Annotated[str, Meta(min_length=1)]


class CustomTool(Struct, forbid_unknown_fields=True, kw_only=True):
    """A tool that takes free text."""

    type: Literal["custom"]
    name: ToolName
    description: str | None = None
    format: AnyText | GrammarText | None = None


class NamespaceTool(Struct, forbid_unknown_fields=True, kw_only=True):
    """A group of tools."""

    type: Literal["namespace"]
    name: ToolName
    description: str | None = None
    tools: Annotated[list[Raw], Meta(max_length=256)]


class FileSearchTool(Struct, forbid_unknown_fields=True, kw_only=True):
    """Search in vector stores, which this server does."""

    type: Literal["file_search"]
    vector_store_ids: Annotated[list[Name], Meta(min_length=1, max_length=8)]
    filters: Filter | None = None
    max_num_results: Annotated[int, Meta(ge=1, le=50)] | None = None
    ranking_options: RankingOptions | None = None


class SearchResult(Struct, forbid_unknown_fields=True, kw_only=True):
    text: str | None = None
    filename: str | None = None
    file_id: str | None = None
    score: float | None = None
    attributes: dict[str, Any] | None = None


class FileSearchCallItem(Struct, forbid_unknown_fields=True, kw_only=True):
    """What was searched for in an earlier answer."""

    type: str
    id: str | None = None
    status: str | None = None
    queries: Annotated[list[str], Meta(max_length=64)]
    results: Annotated[list[SearchResult], Meta(max_length=256)] | None = None


class ChosenTool(Struct, forbid_unknown_fields=True, kw_only=True, omit_defaults=True):
    """The tool that must be called, or those that may be."""

    type: Annotated[str, Meta(max_length=64)]
    name: Name | None = None
    namespace: Name | None = None
    mode: Literal["auto", "required"] | None = None
    tools: Annotated[list[ChosenTool], Meta(min_length=1, max_length=256)] | None = None


class SchemaFormat(JsonSchema, tag_field="type", tag="json_schema", kw_only=True):
    """As in chat completions, with the schema one level higher."""

    def nested(self) -> JsonSchemaFormat:
        inner = JsonSchema(name=self.name, schema=self.schema, description=self.description, strict=self.strict)
        return JsonSchemaFormat(inner)


class TextConfig(Struct, forbid_unknown_fields=True, kw_only=True):
    format: TextFormat | JsonObjectFormat | SchemaFormat | RegexFormat | ChoiceFormat | GrammarFormat | None = None

    def response_format(self) -> ResponseFormat | None:
        return self.format.nested() if isinstance(self.format, SchemaFormat) else self.format


class ResponsesRequest(Sampling, kw_only=True):
    """POST /v1/responses. The parameters of chat completions mean the same here."""

    input: str | Annotated[list[Raw], Meta(min_length=1, max_length=4096)]
    instructions: str | None = None
    previous_response_id: Annotated[str, Meta(min_length=1, max_length=128)] | None = None
    conversation: SessionId | NamedConversation | None = None
    store: bool | None = None
    max_output_tokens: Annotated[int, Meta(ge=1, le=INT64)] | None = None
    max_tool_calls: Annotated[int, Meta(ge=1, le=INT64)] | None = None
    """Of `file_search`, the only tool that the server runs."""
    tools: Annotated[list[Raw], Meta(max_length=256)] | None = None
    tool_choice: Literal["none", "auto", "required"] | ChosenTool | None = None
    parallel_tool_calls: bool | None = None
    text: TextConfig | None = None
    rag: RagRequest | None = None
    truncation: Literal["auto", "disabled"] | None = None
    include: Annotated[list[Annotated[str, Meta(max_length=64)]], Meta(max_length=32)] | None = None
    top_logprobs: Annotated[int, Meta(ge=0, le=20)] | None = None
    reasoning: ReasoningOptions | None = None
    reasoning_effort: Effort | None = None
    enable_thinking: bool | None = None
    thinking_budget: ThoughtTokens | None = None
    thinking_token_budget: ThoughtTokens | None = None
    max_reasoning_tokens: ThoughtTokens | None = None
    chat_template_kwargs: Annotated[dict[str, Any], Meta(max_length=64)] | None = None
    """Extensions: as in chat completions."""
    background: bool | None = None
    access_programs: Unsupported = UNSET
    image: Unsupported = UNSET
    moderation: Unsupported = UNSET
    prompt: Unsupported = UNSET


class CompactRequest(Struct, forbid_unknown_fields=True, kw_only=True):
    """POST /v1/responses/compact"""

    model: Name
    input: str | Annotated[list[Raw], Meta(min_length=1, max_length=4096)] | None = None
    instructions: str | None = None
    previous_response_id: Annotated[str, Meta(min_length=1, max_length=128)] | None = None
    prompt_cache_key: Annotated[str, Meta(max_length=512)] | None = None
    service_tier: ServiceTier | None = None

    def request(self) -> ResponsesRequest:
        return ResponsesRequest(
            model=self.model,
            input="",
            instructions=self.instructions,
            prompt_cache_key=self.prompt_cache_key,
            service_tier=self.service_tier,
            temperature=0.0,
        )


class InputTokensRequest(Struct, forbid_unknown_fields=True, kw_only=True):
    """POST /v1/responses/input_tokens"""

    model: Name
    input: str | Annotated[list[Raw], Meta(min_length=1, max_length=4096)] | None = None
    instructions: str | None = None
    previous_response_id: Annotated[str, Meta(min_length=1, max_length=128)] | None = None
    conversation: SessionId | NamedConversation | None = None
    tools: Annotated[list[Raw], Meta(max_length=256)] | None = None
    tool_choice: Literal["none", "auto", "required"] | ChosenTool | None = None
    parallel_tool_calls: bool | None = None
    text: TextConfig | None = None
    truncation: Literal["auto", "disabled"] | None = None

    def request(self) -> ResponsesRequest:
        return ResponsesRequest(
            model=self.model,
            input="",
            instructions=self.instructions,
            tool_choice=self.tool_choice,
            parallel_tool_calls=self.parallel_tool_calls,
            text=self.text,
        )


UNSUPPORTED = {
    "access_programs": "there are none here; leave it out",
    "image": "models here write text; leave it out",
    "moderation": "the operator decides what is moderated (`guardrails` in the configuration); leave it out",
    "prompt": "no prompts are stored here; send its text as `instructions` and `input`",
}
