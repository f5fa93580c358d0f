"""The body of POST /v1/responses. The policy is that of `penstock.gateway.generation.schemas`."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from msgspec import UNSET, Meta, Raw, Struct

from penstock.gateway.app.decoding import Unsupported
from penstock.gateway.generation.schemas import (
    INT64,
    ChoiceFormat,
    FunctionDefinition,
    FunctionName,
    GrammarFormat,
    JsonObjectFormat,
    JsonSchema,
    JsonSchemaFormat,
    Metadata,
    Name,
    NamedConversation,
    NamedTool,
    RagRequest,
    RegexFormat,
    ResponseFormat,
    SessionId,
    StreamOptions,
    TextFormat,
    ToolDefinition,
)

Nothing = Annotated[list[Any], Meta(max_length=0)]
"""A list that must be empty: the models served here have no use for its items."""
LOGPROBS = "message.output_text.logprobs"
"""What `include` asks for to get log-probabilities."""
Status = Literal["in_progress", "completed", "incomplete"]


class InputText(Struct, forbid_unknown_fields=True, tag_field="type", tag="input_text"):
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
    content: str | Annotated[list[InputText | OutputText | Refusal], Meta(min_length=1)]
    type: Literal["message"] = "message"
    id: str | None = None
    status: Status | None = None


class CallItem(Struct, forbid_unknown_fields=True, kw_only=True):
    """The model called a function."""

    type: Literal["function_call"]
    call_id: Name
    name: Name
    arguments: str
    id: str | None = None
    status: Status | None = None


class CallOutputItem(Struct, forbid_unknown_fields=True, kw_only=True):
    """What a function returned."""

    type: Literal["function_call_output"]
    call_id: Name
    output: str | Annotated[list[InputText], Meta(min_length=1)]
    id: str | None = None
    status: Status | None = None


class FunctionTool(FunctionDefinition, kw_only=True):
    type: Literal["function"]

    def definition(self) -> ToolDefinition:
        function = FunctionDefinition(
            name=self.name, description=self.description, parameters=self.parameters, strict=self.strict
        )
        return ToolDefinition(type="function", function=function)


class FunctionChoice(Struct, forbid_unknown_fields=True, kw_only=True):
    type: Literal["function"]
    name: Name


class SchemaFormat(JsonSchema, tag_field="type", tag="json_schema", kw_only=True):
    """As in chat completions, with the schema one level higher."""

    def nested(self) -> JsonSchemaFormat:
        inner = JsonSchema(name=self.name, schema=self.schema, description=self.description, strict=self.strict)
        return JsonSchemaFormat(inner)


class TextConfig(Struct, forbid_unknown_fields=True, kw_only=True):
    format: TextFormat | JsonObjectFormat | SchemaFormat | RegexFormat | ChoiceFormat | GrammarFormat | None = None

    def response_format(self) -> ResponseFormat | None:
        return self.format.nested() if isinstance(self.format, SchemaFormat) else self.format


class ResponsesRequest(Struct, forbid_unknown_fields=True, kw_only=True):
    """POST /v1/responses"""

    model: Name
    input: str | Annotated[list[Raw], Meta(min_length=1, max_length=4096)]
    instructions: str | None = None
    previous_response_id: Annotated[str, Meta(min_length=1, max_length=128)] | None = None
    conversation: SessionId | NamedConversation | None = None
    store: bool | None = None
    max_output_tokens: Annotated[int, Meta(ge=1, le=INT64)] | None = None
    temperature: Annotated[float, Meta(ge=0, le=2)] | None = None
    top_p: Annotated[float, Meta(ge=0, le=1)] | None = None
    tools: Annotated[list[FunctionTool], Meta(max_length=128)] | None = None
    tool_choice: Literal["none", "auto", "required"] | FunctionChoice | None = None
    parallel_tool_calls: bool | None = None
    text: TextConfig | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    metadata: Metadata | None = None
    user: Annotated[str, Meta(max_length=512)] | None = None
    safety_identifier: Annotated[str, Meta(max_length=512)] | None = None
    prompt_cache_key: Annotated[str, Meta(max_length=512)] | None = None
    service_tier: Literal["auto", "default", "flex", "priority"] | None = None
    rag: RagRequest | None = None
    truncation: Literal["disabled"] | None = None
    include: Annotated[list[Annotated[str, Meta(max_length=64)]], Meta(max_length=32)] | None = None
    top_logprobs: Annotated[int, Meta(ge=0, le=20)] | None = None
    background: bool | None = None
    access_programs: Unsupported = UNSET
    image: Unsupported = UNSET
    moderation: Unsupported = UNSET
    prompt: Unsupported = UNSET

    def choice(self) -> Literal["none", "auto", "required"] | NamedTool | None:
        """`tool_choice` as chat completions have it."""
        chosen = self.tool_choice
        if isinstance(chosen, FunctionChoice):
            return NamedTool(type="function", function=FunctionName(chosen.name))
        return chosen


UNSUPPORTED = (
    "access_programs",
    "image",
    "moderation",
    "prompt",
)
