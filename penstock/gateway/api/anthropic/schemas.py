"""The bodies of POST /v1/messages and /v1/messages/count_tokens. The policy is that of
`penstock.gateway.generation.schemas`."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from msgspec import UNSET, Meta, Struct

from penstock.gateway.app.decoding import Unsupported
from penstock.gateway.generation.schemas import INT64, Name


class CacheControl(Struct, forbid_unknown_fields=True, kw_only=True):
    """Marks the end of a prefix to cache. Every prefix is cached here, so it changes nothing."""

    type: Literal["ephemeral"]
    ttl: Literal["5m", "1h"] | None = None


class Block(Struct, forbid_unknown_fields=True, kw_only=True):
    cache_control: CacheControl | None = None


class TextBlock(Block, tag_field="type", tag="text", kw_only=True):
    text: str
    citations: Annotated[list[Any], Meta(max_length=0)] | None = None


class ToolUseBlock(Block, tag_field="type", tag="tool_use", kw_only=True):
    id: Name
    name: Name
    input: dict[str, Any]


class ToolResultBlock(Block, tag_field="type", tag="tool_result", kw_only=True):
    tool_use_id: Name
    content: str | list[TextBlock] | None = None
    is_error: bool | None = None


class Message(Struct, forbid_unknown_fields=True, kw_only=True):
    role: Literal["user", "assistant"]
    content: str | Annotated[list[TextBlock | ToolUseBlock | ToolResultBlock], Meta(min_length=1)]


class ToolParam(Block, kw_only=True):
    name: Annotated[str, Meta(pattern="^[a-zA-Z0-9_.-]{1,64}$")]
    input_schema: dict[str, Any]
    type: Literal["custom"] | None = None
    description: str | None = None
    strict: bool | None = None


class Choice(Struct, forbid_unknown_fields=True, kw_only=True):
    disable_parallel_tool_use: bool | None = None


class AutoChoice(Choice, tag_field="type", tag="auto"):
    """Call tools or answer."""


class AnyChoice(Choice, tag_field="type", tag="any"):
    """Call a tool."""


class NoChoice(Struct, forbid_unknown_fields=True, tag_field="type", tag="none"):
    """Call none."""


class NamedChoice(Choice, tag_field="type", tag="tool", kw_only=True):
    """Call this one."""

    name: Name


class MessagesMetadata(Struct, forbid_unknown_fields=True):
    user_id: Annotated[str, Meta(max_length=512)] | None = None


class Thinking(Struct, forbid_unknown_fields=True):
    """How much to think before the answer; advice that is not followed yet."""

    type: Literal["disabled", "enabled", "adaptive"]
    budget_tokens: Annotated[int, Meta(ge=1024)] | None = None
    display: str | None = None


class OutputSchema(Struct, forbid_unknown_fields=True, kw_only=True):
    type: Literal["json_schema"]
    schema: dict[str, Any]


class OutputConfig(Struct, forbid_unknown_fields=True, kw_only=True):
    format: OutputSchema | None = None


class Conversation(Struct, forbid_unknown_fields=True, kw_only=True):
    """What the two endpoints share."""

    model: Name
    messages: Annotated[list[Message], Meta(min_length=1, max_length=4096)]
    system: str | list[TextBlock] | None = None
    tools: Annotated[list[ToolParam], Meta(max_length=128)] | None = None
    tool_choice: AutoChoice | AnyChoice | NoChoice | NamedChoice | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None
    cache_control: CacheControl | None = None
    speed: Literal["standard"] | None = None
    mcp_servers: Unsupported = UNSET


class MessagesRequest(Conversation, kw_only=True):
    """POST /v1/messages"""

    max_tokens: Annotated[int, Meta(ge=1, le=INT64)]
    stop_sequences: Annotated[list[Annotated[str, Meta(max_length=1024)]], Meta(max_length=16)] | None = None
    temperature: Annotated[float, Meta(ge=0, le=2)] | None = None
    top_k: Annotated[int, Meta(ge=0, le=2**31 - 1)] | None = None
    top_p: Annotated[float, Meta(ge=0, le=1)] | None = None
    stream: bool | None = None
    metadata: MessagesMetadata | None = None
    service_tier: Literal["auto", "standard_only"] | None = None
    container: Unsupported = UNSET
    inference_geo: Unsupported = UNSET


class CountTokensRequest(Conversation, kw_only=True):
    """POST /v1/messages/count_tokens"""


UNSUPPORTED = (
    "mcp_servers",
    "container",
    "inference_geo",
)
